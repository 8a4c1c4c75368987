"""Files that look like secrets, by their names and by their content.

Tokens of known forms are found by detectors of `detect-secrets` and by patterns for what it lacks.
Left out are its detectors that go by entropy, by the names of variables or by few letters, such as
`APCalculator` for Artifactory: they find something in most projects. A line with its mark, the
comment `pragma: allowlist secret`, is not searched.
"""

import fnmatch
import functools
import re
from collections.abc import Iterator
from typing import Any

_NAMES = (
    *(".env", ".env.*", "*.env", ".netrc", "_netrc", ".pypirc", ".npmrc", ".git-credentials"),
    *(".htpasswd", ".boto", "*.pem", "*.key", "*.p12", "*.pfx", "*.jks", "*.keystore", "*.ppk"),
    *("id_rsa*", "id_dsa*", "id_ecdsa*", "id_ed25519*", "credentials", "*credentials*.json"),
    *("*credentials*.y*ml", "*credentials*.toml", "*credentials*.ini", "client_secret*.json"),
    *("*service*account*.json", "kaggle.json", "secrets.json", "secrets.y*ml", "secrets.toml"),
    *("kubeconfig", "*.kubeconfig", ".dockercfg", ".pgpass", ".s3cfg", ".vault-token"),
    *("rclone.conf", "secring.*", "*.kdbx"),
)
_EXAMPLES = (".env.example", ".env.sample", ".env.template")  # without values, by convention
_DETECTORS = (
    *("AWSKeyDetector", "AzureStorageKeyDetector", "BasicAuthDetector", "GitHubTokenDetector"),
    *("GitLabTokenDetector", "JwtTokenDetector", "NpmDetector", "OpenAIDetector"),
    *("PypiTokenDetector", "SendGridDetector", "SlackDetector", "SquareOAuthDetector"),
    *("StripeDetector", "TwilioKeyDetector"),
)
_TOKENS = {
    "private key": r"-----BEGIN [A-Z0-9 ]*PRIVATE KEY(?: BLOCK)?-----"
    r"|PuTTY-User-Key-File-\d|AGE-SECRET-KEY-1[0-9A-Z]{50}",
    "Hugging Face token": r"\bhf_[A-Za-z0-9]{30,}",
    "Google API key": r"\bAIza[\w-]{35}(?![\w-])",
    "Google OAuth token": r"\bya29\.[\w-]{20,}|\bGOCSPX-[\w-]{20,}|\b1//0[\w-]{40,}",
    "OAuth token": r"""["'](?:refresh_token|client_secret)["']\s*:\s*["'][^"'\s<>{}]{16,}["']""",
    "GitHub token": r"\bgithub_pat_\w{50,}",
    "token of a model's API": r"\bsk-(?:ant|proj|svcacct|admin|or)-[\w-]{20,}"
    r"|\b(?:gsk|xai|pplx|r8|nvapi)[_-][A-Za-z0-9]{30,}",
    "Docker token": r"\bdckr_(?:pat|oat)_[\w-]{20,}",
    "Databricks token": r"\bdapi[0-9a-f]{32}\b",
    "Weights & Biases key": r"""(?i:wandb)[^\n]{0,60}["'=\s:][0-9a-f]{40}\b|\bwandb_v1_\w{40,}""",
    "Kaggle key": r"""(?i:kaggle)[^\n]{0,60}["'=\s:][0-9a-f]{32}\b|\bKGAT_[0-9a-f]{32}""",
    "Neptune token": r"\beyJhcGlfYWRkcmVzcyI6[\w+/=-]{20,}",
}
# Documents that hold all of some patterns.
_DOCUMENTS = {
    "logins to container registries": (
        r'"auths"\s*:',
        r'"(?:auth|password|identitytoken|registrytoken)"\s*:\s*"[^"]{8,}"',
    ),
    "kubeconfig": (r"""\bkind["']?\s*:\s*["']?Config\b""", r"""\busers["']?\s*:"""),
}
_ALLOWED = re.compile(r"pragma: ?allowlist[ -]secret\b")
_ACCOUNT = r'"type"\s*:\s*"(?:service_account|authorized_user|external_account\w*)"'


def reason(name: str, data: bytes) -> str:
    """Returns why a file looks like a secret, such as "Slack Token, line 3"; "" if it does not.

    Args:
        name: of the file, without its folder.
        data: its content.
    """
    lower = name.lower()
    if lower not in _EXAMPLES and any(fnmatch.fnmatchcase(lower, known) for known in _NAMES):
        return "its name"
    for text in _texts(data):
        if lower.endswith(".json") and re.search(_ACCOUNT, text):
            return "credentials for Google Cloud"
        for what, parts in _DOCUMENTS.items():
            if all(re.search(part, text) for part in parts):
                return what
        for what, line in _tokens(text):
            return f"{what}, line {line}"
    return ""


def _texts(data: bytes) -> Iterator[str]:
    """Yields the content as text, where quotes that a notebook or other JSON escapes stand alone.

    It is read as UTF-8, and as UTF-16 or UTF-32, whose letters have zeros beside them.
    """
    for read in (data, data.replace(b"\0", b"")) if b"\0" in data else (data,):
        yield read.decode(errors="replace").replace('\\"', '"')


def _tokens(text: str) -> Iterator[tuple[str, int]]:
    """Yields the kind and the line of what looks like a token."""
    for what, find in _searches():
        if not any(find(text)):  # at once, which is faster than by lines
            continue
        for number, line in enumerate(text.split("\n"), 1):
            if any(map(_is_value, find(line))) and not _ALLOWED.search(line):
                yield what, number


@functools.cache
def _searches() -> tuple[tuple[str, Any], ...]:
    """Returns the kinds of tokens, each with the function that yields those of a text."""
    from detect_secrets.settings import get_plugins, transient_settings

    with transient_settings({"plugins_used": [{"name": name} for name in _DETECTORS]}):
        detectors = get_plugins()
    found = [(detector.secret_type, detector.analyze_string) for detector in detectors]
    return (*((what, re.compile(form).findall) for what, form in _TOKENS.items()), *found)


def _is_value(token: str) -> bool:
    """Returns whether a token is none that a program fills in, such as "{password}" or "$TOKEN"."""
    from detect_secrets.filters import heuristic

    return not heuristic.is_templated_secret(token) and token[0] not in "$%"
