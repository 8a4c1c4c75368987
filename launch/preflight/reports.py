"""Reports that `tftpu preflight` wrote earlier: where they are, and what to compare with."""

from typing import TYPE_CHECKING

from tftpu.errors import UserError, did_you_mean
from tftpu.launch.preflight import predictions
from tftpu.launch.settings import config_flags
from tftpu.storage import files

if TYPE_CHECKING:
    from tftpu.preflight import Report


def is_config(given: str) -> bool:
    """Returns whether a value of `--compare` is a config; otherwise it is a report."""
    return given.endswith(".py") or given in config_flags.list_names()


def read(flag: str, given: str) -> "Report":
    """Reads a report, given its file or the workdir that it is in.

    Args:
        flag: name of the flag, for errors.
        given: the value of the flag.

    Raises:
        UserError: there is none, or it is not one of this version.
    """
    from tftpu.preflight.saved import read_report

    path = given if given.endswith(".json") else files.join(given, predictions.FILE)
    if not files.exists(path):
        near = did_you_mean(given, config_flags.list_names()) if flag == "compare" else ""
        raise UserError(
            f"--{flag}={given}: there is no report {path}. Give a {predictions.FILE} that `tftpu "
            f"preflight` wrote, or its folder{', or a config' if near else ''}.{near}"
        )
    return read_report(path)
