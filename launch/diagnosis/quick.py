"""The checks of `tftpu doctor` that are quick enough to run before every training."""

import sys

from tftpu.errors import UserError
from tftpu.launch.diagnosis import settings, tpu, wheels
from tftpu.launch.diagnosis.machine import Machine, Problem

# Problems that make training impossible. Others may not matter to a run, and are only printed.
_FATAL = frozenset(
    {
        *("damaged-wheel", "keras-version", "libtpu-version", "no-libtpu", "no-tensorboard"),
        *("jax-only-tpu", "no-tpu-wheel", "python-version", "setuptools-version"),
    }
)


def check(machine: Machine) -> None:
    """Prints the problems of a machine to stderr; imports no TensorFlow.

    Raises:
        UserError: one of the problems makes training impossible.
    """
    found = wheels.find_problems(machine, has_tpu=bool(tpu.list_devices(machine)))
    found += tpu.find_problems(machine) + settings.find_problems(machine)
    fatal = [problem for problem in found if problem.name in _FATAL]
    for problem in found:
        if problem not in fatal:
            print(f"tftpu: {_format_problem(problem)}", file=sys.stderr)
    if fatal:
        raise UserError(
            " ".join([*map(_format_problem, fatal), "`tftpu doctor` reports everything."])
        )


def _format_problem(problem: Problem) -> str:
    return f"{problem.what} {problem.why} Fix it with: {problem.command}"
