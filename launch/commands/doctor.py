"""`tftpu doctor`: what is installed, what is attached, what is wrong, the command that mends it."""

import dataclasses
import json as json_module
import re

from rich.console import Console

from tftpu.config import Experiment
from tftpu.errors import UserError
from tftpu.launch.diagnosis import cloud, place, seen, tpu, wheels
from tftpu.launch.diagnosis.machine import Machine, Problem


def run(experiment: Experiment | None, config: str | None, workdir: str | None, json: bool) -> None:
    """Prints the report.

    Args:
        experiment: the config that is to run here, if one was named.
        config: its name.
        workdir: where it is to run; its bucket is looked at.
        json: print JSON instead.

    Raises:
        UserError: something is wrong; the report says what.
    """
    del config  # its experiment is what counts
    facts, problems = examine(Machine(), _buckets(experiment, workdir))
    if problems:
        facts["TensorFlow sees"] = "not asked: mend the below first"
    else:
        fact, problems = seen.ask(Machine())
        facts |= fact
    if json:
        found = [dataclasses.asdict(problem) for problem in problems]
        print(json_module.dumps({"facts": facts, "problems": found}, indent=2))
    else:
        _print(facts, problems)
    if problems:
        names = ", ".join(problem.name for problem in problems)
        raise UserError(f"doctor found {len(problems)} problem(s): {names}.")


def examine(machine: Machine, buckets: list[str]) -> tuple[dict[str, str], list[Problem]]:
    """The facts and the problems of a machine, without loading TensorFlow.

    Args:
        machine: the one to look at.
        buckets: names of the buckets that a run needs.
    """
    facts = wheels.describe(machine) | place.describe(machine) | tpu.describe(machine)
    facts |= cloud.describe(machine)
    problems = wheels.problems(machine, has_tpu=bool(tpu.devices(machine)))
    problems += tpu.problems(machine)
    problems += cloud.problems(machine, buckets)
    return facts, problems


def _buckets(experiment: Experiment | None, workdir: str | None) -> list[str]:
    paths = [workdir, experiment.data.data_dir if experiment else None]
    found = [re.match(r"gs://([^/]+)", path or "") for path in paths]
    return sorted({match[1] for match in found if match})


def _print(facts: dict[str, str], problems: list[Problem]) -> None:
    console = Console(soft_wrap=True, highlight=False)
    for name, value in facts.items():
        console.print(f"  {name:17}{value}", markup=False)
    for number, problem in enumerate(problems, start=1):
        console.print(f"\n{number}. {problem.what}", markup=False, style="bold")
        console.print(f"   {problem.why}", markup=False)
        console.print(f"   Mend it with:  {problem.command}", markup=False)
    if not problems:
        console.print("\nNothing is wrong.", markup=False)
