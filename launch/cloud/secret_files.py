"""Files that look like secrets, by their names and by their content."""

import fnmatch
import re

_NAMES = (
    *(".env", ".env.*", "*.env", ".netrc", "_netrc", ".pypirc", ".npmrc", ".git-credentials"),
    *(".htpasswd", ".boto", "*.pem", "*.key", "*.p12", "*.pfx", "*.jks", "*.keystore", "*.ppk"),
    *("id_rsa*", "id_dsa*", "id_ecdsa*", "id_ed25519*", "credentials", "*credentials*.json"),
    *("*credentials*.y*ml", "*credentials*.toml", "*credentials*.ini", "client_secret*.json"),
    *("*service*account*.json", "kaggle.json", "secrets.json", "secrets.y*ml", "secrets.toml"),
)
_EXAMPLES = (".env.example", ".env.sample", ".env.template")  # without values, by convention
_KEY = re.compile(rb"-----BEGIN [A-Z0-9 ]*PRIVATE KEY-----")
_ACCOUNT = re.compile(rb'"type"\s*:\s*"(service_account|authorized_user|external_account)"')


def reason(name: str, data: bytes) -> str:
    """Returns why a file looks like a secret, or "" if it does not.

    Args:
        name: of the file, without its folder.
        data: its content.
    """
    lower = name.lower()
    if lower not in _EXAMPLES and any(fnmatch.fnmatchcase(lower, known) for known in _NAMES):
        return "its name"
    if _KEY.search(data):
        return "it holds a private key"
    if lower.endswith(".json") and _ACCOUNT.search(data):
        return "it holds credentials for Google Cloud"
    return ""
