"""Reports the software, the hardware and the problems of this machine, and how to fix them.

With --config or --workdir, the bucket of the run is checked as well.

    tftpu doctor --workdir=gs://BUCKET/run
"""

import dataclasses
import json
import re
import sys
from typing import TYPE_CHECKING

from tftpu.config import Experiment
from tftpu.errors import UserError, counted
from tftpu.launch.diagnosis import cloud, place, seen, settings, tpu, wheels
from tftpu.launch.diagnosis.machine import Machine, Problem
from tftpu.launch.settings import config_flags, own_code
from tftpu.launch.settings.options import Overrides, flag

if TYPE_CHECKING:
    from rich.console import Console


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(Overrides):
    """The run that the machine will train, and the form of the report."""

    config: str | None = flag(None, "config that is to run here", metavar="CONFIG", word=True)
    workdir: str | None = flag(None, "folder of a run; its bucket is checked", metavar="DIR")
    json: bool = flag(False, "print JSON, for programs")


def run(options: Options) -> None:
    """Prints the report on this machine.

    Raises:
        UserError: the machine has a problem, which the report describes, or a flag is wrong.
    """
    experiment = None
    if options.config:
        experiment = config_flags.load(options.config, list(options.overrides))
        own_code.validate(experiment)
    elif options.overrides:
        raise UserError(f"tftpu doctor needs CONFIG for {options.overrides[0]}.")
    facts, problems = examine(Machine(), _list_buckets(experiment, options.workdir))
    if not options.json:
        _print_facts(facts)
    seen_by: dict[str, str] = {}
    if problems:
        seen_by["TensorFlow sees"] = "not checked: fix the problems below first"
    else:
        print("starting TensorFlow, to ask for its devices", file=sys.stderr)
        asked = [seen.ask_tensorflow]
        if tpu.list_devices(Machine()) and wheels.jax_drives_tpus(Machine()):
            asked.append(seen.ask_jax)
        for ask in asked:
            fact, found = ask(Machine())
            seen_by |= fact
            problems += found
    if options.json:
        found = [dataclasses.asdict(problem) for problem in problems]
        print(json.dumps({"facts": facts | seen_by, "problems": found}, indent=2))
    else:
        _print_facts(seen_by)
        _print_problems(problems)
    if problems:
        names = ", ".join(problem.name for problem in problems)
        raise UserError(f"doctor found {counted(len(problems), 'problem')}: {names}.")


def examine(machine: Machine, buckets: list[str]) -> tuple[dict[str, str], list[Problem]]:
    """Returns the facts and the problems of a machine, without importing TensorFlow.

    Args:
        machine: the machine to examine.
        buckets: names of the buckets that a run needs.
    """
    facts = wheels.describe(machine) | place.describe(machine) | tpu.describe(machine)
    facts |= cloud.describe(machine) | settings.describe(machine)
    problems = wheels.find_problems(machine, has_tpu=bool(tpu.list_devices(machine)))
    problems += tpu.find_problems(machine) + settings.find_problems(machine)
    problems += cloud.find_problems(machine, buckets)
    return facts, problems


def _list_buckets(experiment: Experiment | None, workdir: str | None) -> list[str]:
    paths = [workdir, experiment.data.data_dir if experiment else None]
    found = [re.match(r"gs://([^/]+)", path or "") for path in paths]
    return sorted({match[1] for match in found if match})


def _print_facts(facts: dict[str, str]) -> None:
    for name, value in facts.items():
        _open_console().print(f"  {name:17}{value}", markup=False)


def _print_problems(problems: list[Problem]) -> None:
    console = _open_console()
    for number, problem in enumerate(problems, start=1):
        console.print(f"\n{number}. {problem.what}", markup=False, style="bold")
        console.print(f"   {problem.why}", markup=False)
        console.print(f"   Fix it with:  {problem.command}", markup=False)
    if not problems:
        console.print("\nNo problems found.", markup=False)


def _open_console() -> "Console":
    from rich.console import Console

    return Console(soft_wrap=True, highlight=False)
