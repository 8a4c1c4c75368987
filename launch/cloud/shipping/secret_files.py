"""Finds files that look like secrets, by their names and by their content.

Detectors of `detect-secrets`, and patterns for what it lacks, find tokens of known forms. Its
detectors by entropy, by names of variables or by a few letters (one takes `APCalculator` for a key
of Artifactory) are left out: they find something in most projects. A line with the comment
`pragma: allowlist secret` is not searched.
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
# Examples by convention: they hold no values.
_EXAMPLES = (".env.example", ".env.sample", ".env.template")
# Strings (marks) that the tokens of each detector contain. Only text around marks is searched.
_DETECTORS = {
    "AWSKeyDetector": ("A3T", "ABIA", "ACCA", "AKIA", "ASIA", "aws", "Aws", "AWS"),
    "AzureStorageKeyDetector": ("AccountKey=",),
    "BasicAuthDetector": ("://",),
    "GitHubTokenDetector": ("ghp_", "gho_", "ghu_", "ghs_", "ghr_"),
    "GitLabTokenDetector": ("glpat-", "gldt-", "glft-", "glsoat-", "glrt-", "glcbt-", "GR1348941"),
    "JwtTokenDetector": (".e",),  # the payload begins with "{", whose base64 begins with "e"
    "OpenAIDetector": ("T3BlbkFJ",),
    "PypiTokenDetector": ("pypi-Ag",),
    "SendGridDetector": ("SG.",),
    "SlackDetector": ("xox", "hooks.slack.com"),
    "SquareOAuthDetector": ("sq0csp-",),
    "StripeDetector": ("k_live_",),
    "TwilioKeyDetector": ("AC", "SK"),
}
_TOKENS = {
    "private key": (
        ("PRIVATE KEY", "PuTTY-User-Key-File-", "AGE-SECRET-KEY-1"),
        r"-----BEGIN [A-Z0-9 ]*PRIVATE KEY(?: BLOCK)?-----"
        r"|PuTTY-User-Key-File-\d|AGE-SECRET-KEY-1[0-9A-Z]{50}",
    ),
    "Hugging Face token": (("hf_",), r"\bhf_[A-Za-z0-9]{30,}"),
    "Google API key": (("AIza",), r"\bAIza[\w-]{35}(?![\w-])"),
    "Google OAuth token": (
        ("ya29.", "GOCSPX-", "1//0"),
        r"\bya29\.[\w-]{20,}|\bGOCSPX-[\w-]{20,}|\b1//0[\w-]{40,}",
    ),
    "OAuth token": (
        ("refresh_token", "client_secret"),
        r"""["'](?:refresh_token|client_secret)["']\s*:\s*["']([^"'\s<>{}]{16,})["']""",
    ),
    "AWS Access Key": (
        ("AWS_SECRET", "aws_secret", "SECRET_ACCESS_KEY", "ecret_access_key", "ecretAccessKey"),
        r"""(?i:aws_secret(?:_access)?_key|secret_?access_?key)["'\])]{0,2}\s*[=:,]\s*["']?"""
        r"([A-Za-z0-9/+]{40})(?![\w/+=])",
    ),
    "DigitalOcean token": (("dop_v1_", "doo_v1_", "dor_v1_"), r"\bdo[opr]_v1_[0-9a-f]{64}"),
    "HashiCorp Vault token": (
        ("hvs.", "hvb."),
        r"\bhv[sb]\.(?=[\w-]{0,90}\d)(?=[\w-]{0,90}[A-Z])[\w-]{24,}",
    ),
    "LangSmith key": (("lsv2_",), r"\blsv2_[a-z]{2}_[0-9a-f]{32}_[0-9a-f]{10}"),
    "Pinecone key": (("pcsk_",), r"\bpcsk_[A-Za-z0-9]{4,8}_[A-Za-z0-9]{50,}"),
    "GitHub token": (("github_pat_",), r"\bgithub_pat_\w{50,}"),
    "token of a model's API": (
        ("sk-", *(name + sign for name in ("gsk", "xai", "pplx", "r8", "nvapi") for sign in "_-")),
        r"\bsk-(?:ant|proj|svcacct|admin|or)-[\w-]{20,}"
        r"|\b(?:gsk|xai|pplx|r8|nvapi)[_-][A-Za-z0-9]{30,}",
    ),
    "Docker token": (("dckr_",), r"\bdckr_(?:pat|oat)_[\w-]{20,}"),
    "Databricks token": (("dapi",), r"\bdapi[0-9a-f]{32}\b"),
    "Weights & Biases key": (
        ("wandb", "Wandb", "WANDB"),
        r"""(?i:wandb)[^\n]{0,60}?["'=\s:]([0-9a-f]{40})\b|\bwandb_v1_\w{40,}""",
    ),
    "Kaggle key": (
        ("kaggle", "Kaggle", "KAGGLE", "KGAT_"),
        # A word that means a key must stand before the digits, and no word that means a checksum or
        # an id may stand between: data sets on Kaggle have those. The digits are matched first,
        # which is cheaper.
        r"""(?i:kaggle)(?=[^\n]{0,120}?["'=\s:][0-9a-f]{32}\b)"""
        r"(?i:[^\n]{0,60}?(?:keys?|secrets?|tokens?|password|login|auth)(?![a-z])"
        r"(?:(?!md5|sha|hash|checksum|digest|(?<![a-z])id\b)[^\n]){0,40}?)"
        r"""["'=\s:]([0-9a-f]{32})\b|\bKGAT_[0-9a-f]{32}""",
    ),
    "NPM tokens": (
        ("npm_", ":_authToken=", ":_auth=", ":_password="),
        r"""\bnpm_[A-Za-z0-9]{36}\b|:_authToken=\s*["']?(npm_\w{30,}|[A-Fa-f0-9-]{36})"""
        r"""|:_(?:auth|password)=\s*["']?([A-Za-z0-9+/]{12,}={0,2})(?![\w+/=-])""",
    ),
    "Neptune token": (("eyJhcGlfYWRkcmVzcyI6",), r"\beyJhcGlfYWRkcmVzcyI6[\w+/=-]{20,}"),
}
_REACH = 2048  # characters searched before and after a mark; some patterns take quadratic time
# Kinds of documents that hold secrets: a document is of a kind if all the kind's patterns match.
_DOCUMENTS = {
    "logins to container registries": (
        r'"auths"\s*:',
        r'"(?:auth|password|identitytoken|registrytoken)"\s*:\s*"[^"]{8,}"',
    ),
    "kubeconfig": (r"""kind["']?\s*:\s*["']?Config\b""", r"""users["']?\s*:"""),
}
# Placeholders that documentation writes in place of a token. A real token rarely contains one: of
# ten thousand random texts of 800 letters, less than one does.
_PLACEHOLDER = re.compile(
    r"(?i)your[-_]|example|placeholder|change[-_]?me|(?<![a-z\d])x{4}|\*{4}|(.)\1{7}"
)
# One character 32 times or more: a placeholder as long as a Kaggle key.
_ZEROS = re.compile(r"\b(\w)\1{31,}\b")
_ALLOWED = re.compile(r"pragma: ?allowlist[ -]secret\b")
_ACCOUNT = r'"type"\s*:\s*"(?:service_account|authorized_user|external_account\w*)"'


def find_secret(name: str, data: bytes) -> str:
    """Returns why a file looks like a secret, such as "Slack Token, line 3"; "" if it does not.

    Args:
        name: the name of the file, without its folder.
        data: its content.
    """
    lower = name.lower()
    if lower not in _EXAMPLES and any(fnmatch.fnmatchcase(lower, known) for known in _NAMES):
        return "its name"
    for text in _decode_texts(data):
        if lower.endswith(".json") and re.search(_ACCOUNT, text):
            return "credentials for Google Cloud"
        for what, parts in _DOCUMENTS.items():
            if all(re.search(part, text) for part in parts):
                return what
        for what, line in _iterate_tokens(text):
            return f"{what}, line {line}"
    return ""


def _decode_texts(data: bytes) -> Iterator[str]:
    """Yields the content as text, without the escapes of quotes in notebooks and other JSON.

    Tokens are ASCII, so they are found in UTF-8 directly. UTF-16 and UTF-32 have zero bytes between
    the letters, so such content is also yielded without them.
    """
    for read in (data, data.replace(b"\0", b"")) if b"\0" in data else (data,):
        yield read.decode("latin-1").replace('\\"', '"')


def _iterate_tokens(text: str) -> Iterator[tuple[str, int]]:
    """Yields the kind and the line number of each string that looks like a token."""
    for what, marks, find in _build_searches():
        for begin, end in (piece for mark in marks for piece in _iterate_pieces(text, mark)):
            if any(map(_is_value, find(text[begin:end]))):
                rest = text.find("\n", end)  # the end of the line, where the allowlist comment is
                if not _ALLOWED.search(text[begin : rest if rest >= 0 else None]):
                    yield what, text.count("\n", 0, begin) + 1


def _iterate_pieces(text: str, mark: str) -> Iterator[tuple[int, int]]:
    """Yields start and end of each line with the string `mark`; in a long line, of text near it."""
    found = text.find(mark)
    while found >= 0:
        least = max(0, found - _REACH)
        begin = max(least, text.rfind("\n", least, found) + 1)
        end = text.find("\n", found, found + _REACH)
        yield begin, end if end >= 0 else found + _REACH
        found = text.find(mark, end if end >= 0 else found + _REACH // 2)


@functools.cache
def _build_searches() -> tuple[tuple[str, tuple[str, ...], Any], ...]:
    """Returns each kind of token, its marks (strings in such tokens), and a function to find it."""
    from detect_secrets.settings import get_plugins, transient_settings

    with transient_settings({"plugins_used": [{"name": name} for name in _DETECTORS]}):
        found = [
            (detector.secret_type, _DETECTORS[type(detector).__name__], detector.analyze_string)
            for detector in get_plugins()
        ]
    own = [
        (what, marks, functools.partial(_find_tokens, re.compile(form)))
        for what, (marks, form) in _TOKENS.items()
    ]
    return (*own, *found)


def _find_tokens(form: re.Pattern[str], text: str) -> Iterator[str]:
    """Yields the matches of a pattern; if a group of it matched, only the text of the group.

    A key of one repeated character is a placeholder, removed first: a real key may follow.
    """
    for match in form.finditer(_ZEROS.sub("", text)):
        yield match[match.lastindex or 0]


def _is_value(token: str) -> bool:
    """Returns whether a token is not a placeholder, such as "{password}", "$TOKEN" or "hf_xxxx"."""
    from detect_secrets.filters import heuristic

    is_filled_in = heuristic.is_templated_secret(token) or token[0] in "$%"
    return not is_filled_in and not _PLACEHOLDER.search(token)
