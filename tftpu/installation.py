"""This installation of tftpu: the commands that install its extras, and its cache on the disk."""

import os
import shlex
from importlib import metadata
from typing import Literal


def command(extra: str) -> str:
    """Returns the pip command that adds what an extra of tftpu requires to this environment.

    It names the packages of the extra, so it is the same for a clone, a wheel and a Git URL. It
    never names tftpu, because anyone could register that unused name on a package index.

    Args:
        extra: name of an extra in `setup.py`, such as "plot".
    """
    from packaging.requirements import Requirement

    try:
        requirements = metadata.requires("tftpu") or ()
    except metadata.PackageNotFoundError:  # a clone is on Python's path, but was never installed
        requirements = ()
    found = []
    for requirement in map(Requirement, requirements):
        marker = requirement.marker
        if marker and marker.evaluate({"extra": extra}) and not marker.evaluate({"extra": ""}):
            requirement.marker = None
            found.append(shlex.quote(str(requirement)))
    # If the extra is unknown, then the installed tftpu is older than this clone.
    return "pip install " + (" ".join(found) or f"-e '.[{extra}]'")


def find_cache_folder(kind: Literal["data", "preflight"]) -> str:
    """Returns the cache folder for prepared data or compiled programs, usually in ~/.cache/tftpu.

    If $TFTPU_CACHE is set, data is in that folder itself and programs in its subfolder "preflight".
    """
    given = os.environ.get("TFTPU_CACHE")
    if given and kind == "data":
        return given
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return os.path.join(given or os.path.join(home, "tftpu"), kind)
