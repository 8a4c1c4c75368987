"""The commands that install an extra of tftpu, however tftpu itself was installed."""

import shlex
from importlib import metadata


def command(extra: str) -> str:
    """Returns the pip command that adds what an extra of tftpu requires to this environment.

    It names the packages of the extra, so it is the same for a clone, a wheel and a Git URL. It
    never names tftpu, which is on no package index: whoever registers the name there is a stranger.

    Args:
        extra: as in `setup.py`, such as "plot".
    """
    from packaging.requirements import Requirement

    try:
        requirements = metadata.requires("tftpu") or ()
    except metadata.PackageNotFoundError:  # a clone that is on the path and was never installed
        requirements = ()
    found = []
    for requirement in map(Requirement, requirements):
        marker = requirement.marker
        if marker and marker.evaluate({"extra": extra}) and not marker.evaluate({"extra": ""}):
            requirement.marker = None
            found.append(shlex.quote(str(requirement)))
    # What was installed is older than this clone, if it does not know the extra.
    return "pip install " + (" ".join(found) or f"-e '.[{extra}]'")
