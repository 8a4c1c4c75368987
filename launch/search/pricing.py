"""The price of a trial on a TPU slice, which preflight predicts before the trial runs."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading

from tftpu.errors import ExitCode, UserError

_POLL_S = 0.2
# Preflight runs in its own process: it makes JAX use the CPU, which the trials must not do.
_CHECK = """
import sys
from tftpu.launch.failures import run_for_exit_code
from tftpu.preflight.compiling.compiler import check_machine
sys.exit(run_for_exit_code(check_machine))
"""


class CannotRunError(UserError):
    """Raised if preflight ends without a verdict on the trial."""


@dataclasses.dataclass(frozen=True)
class Price:
    """The verdict of preflight on a trial.

    Attributes:
        usd: the price of all the trial's steps, in dollars; 0 if it does not fit.
        refusal: why the slice cannot run the trial; "" if it can.
    """

    usd: float
    refusal: str = ""


def check() -> None:
    """Raises `UserError` if preflight cannot compile on this machine."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", _CHECK],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise UserError(f"--slice needs preflight: {lines[-1].removeprefix('tftpu: ')}")


def price(words: list[str], slice_name: str, log: str, stopped: threading.Event) -> Price | None:
    """Returns the price of a trial, and writes `preflight.json` to its workdir.

    Args:
        words: the arguments of `tftpu train` for the trial.
        slice_name: the name of the slice, such as "v5e-8".
        log: the local path of a file for preflight's output.
        stopped: an event that ends preflight; then None is returned.

    Raises:
        CannotRunError: preflight ended without a verdict.
        UserError: preflight rejects the config, or cannot tell whether it fits.
    """
    with tempfile.TemporaryDirectory() as folder, open(log, "ab") as output:
        report = os.path.join(folder, "report.json")
        process = subprocess.Popen(
            # -P: does not import a folder `tftpu` in the working directory.
            [sys.executable, "-P", "-m", "tftpu.launch.main", "preflight", *words]
            + [f"--slices={slice_name}", f"--json={report}"],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,  # Ctrl-C reaches only the search
        )
        while process.poll() is None:
            if stopped.wait(_POLL_S):
                os.killpg(process.pid, signal.SIGINT)  # interrupts preflight's compilers, too
                process.wait()
                return None
        if not os.path.exists(report):
            refused = process.returncode == ExitCode.USER_ERROR
            kind = UserError if refused else CannotRunError
            raise kind(f"preflight ended with exit code {process.returncode}")
        with open(report) as file:
            found = json.load(file)
    (item,) = found["slices"]
    if item["undecided"]:
        raise UserError(f"preflight does not know whether it fits {slice_name}")
    if not item["fits"]:
        return Price(0.0, f"it does not run on {slice_name}: {item['error'].splitlines()[0]}")
    if item["usd_per_1000_steps"] is None:
        raise UserError(f"preflight knows no price on {slice_name}")
    return Price(item["usd_per_1000_steps"] * found["steps"] / 1000)
