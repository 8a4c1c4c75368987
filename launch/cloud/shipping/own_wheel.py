"""Builds a wheel of the running tftpu, for machines that have to run the same code.

The wheel is made from the files of the imported package. This works for a clone, an editable
install, an installed wheel and a Git URL, without a build tool or a network. Equal files give equal
bytes.
"""

import base64
import hashlib
import io
import os
import re
import zipfile
from importlib import metadata
from pathlib import Path

import tftpu
from tftpu.errors import UserError
from tftpu.version import __version__

NAME = f"tftpu-{__version__}-py3-none-any.whl"
# Suffixes of code, and of the package data in `setup.py`.
_SUFFIXES = (".py", ".typed", ".ipynb", ".sh", ".txt")
_INFO = f"tftpu-{__version__}.dist-info"
_COPIED = ("METADATA", "entry_points.txt", "top_level.txt", "licenses/LICENSE")
_WHEEL = f"""\
Wheel-Version: 1.0
Generator: tftpu {__version__}
Root-Is-Purelib: true
Tag: py3-none-any
"""


def build() -> bytes:
    """Returns the content of the wheel; its file name is `NAME`.

    Raises:
        UserError: tftpu is not installed.
    """
    files = {**_read_code(), **_read_metadata()}
    record = [f"{name},{_compute_digest(data)},{len(data)}" for name, data in files.items()]
    record.append(f"{_INFO}/RECORD,,")
    files[f"{_INFO}/RECORD"] = ("\n".join(record) + "\n").encode()
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as wheel:
        for name, data in files.items():
            # A fixed time, so that equal files give equal bytes.
            entry = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = 0o644 << 16
            wheel.writestr(entry, data)
    return target.getvalue()


def _read_code() -> dict[str, bytes]:
    """Returns the files of the package, by their names in a wheel."""
    package = Path(tftpu.__file__).parent
    found = {}
    # In a clone, some folders of the package are links.
    for folder, _, names in os.walk(package, followlinks=True):
        for path in (Path(folder, name) for name in names):
            if path.suffix in _SUFFIXES and "__pycache__" not in path.parts:
                found[path.relative_to(package.parent).as_posix()] = path.read_bytes()
    return dict(sorted(found.items()))


def _read_metadata() -> dict[str, bytes]:
    """Returns the metadata of the installed tftpu, which name its requirements."""
    # In a clone, a build leaves tftpu.egg-info, which has no METADATA.
    found = [d for d in metadata.distributions(name="tftpu") if d.read_text("METADATA")]
    if not found:
        raise UserError(
            "tftpu is not installed in this environment, so its requirements are unknown: run "
            "`pip install -e .` in the clone."
        )
    texts = {name: found[0].read_text(name) or "" for name in _COPIED}
    # The code of a clone may be newer than the version recorded at its installation.
    version = f"Version: {__version__}"
    texts["METADATA"] = re.sub("^Version: .*$", version, texts["METADATA"], count=1, flags=re.M)
    files = {f"{_INFO}/{name}": text.encode() for name, text in texts.items() if text}
    return {**files, f"{_INFO}/WHEEL": _WHEEL.encode()}


def _compute_digest(data: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    return f"sha256={digest}"
