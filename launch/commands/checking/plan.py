"""Finds the slice, mesh and memory settings on which a run costs least, without a TPU.

The same training is compiled for several slices, meshes, microbatches, and values of remat and
attention: the cheapest by estimate first, and only candidates that may be better than the best so
far. Fields that overrides set are kept. The engine is the config's; for engine=auto it is jax,
whose mesh can be chosen.

With --budget, the plan is the fastest run within it; with --deadline, the cheapest run that ends in
time. The results are kept in the workdir, and the same command resumes from them.

    tftpu plan llama_110m_tinystories --deadline=12h
    tftpu plan python_gpt --slices=v5e-1,v5e-4,v6e-1 --budget=2
"""

import dataclasses
import json
import math
import os
import sys
import time
from collections.abc import Sequence

from tftpu.amounts import format_period
from tftpu.engines import selection
from tftpu.errors import UserError, counted
from tftpu.launch import interrupts
from tftpu.launch.plan import table
from tftpu.launch.plan.bounds import Facts, estimate
from tftpu.launch.plan.candidates import Candidate, Space, name_state
from tftpu.launch.plan.journal import FILE, Journal, compute_key
from tftpu.launch.plan.search import Goal, Search
from tftpu.launch.preflight.check import build_console, parse_prices, prepare
from tftpu.launch.run import finished
from tftpu.launch.settings import config_flags
from tftpu.launch.settings.options import TIME, flag
from tftpu.launch.startup import import_tensorflow
from tftpu.preflight.compiling.compiler import check_machine
from tftpu.runtime import slow
from tftpu.storage import files
from tftpu.tpu.slices import PRICE_SOURCE, Slice, parse_slice

# Default slices, each of one host; a plan considers larger ones only if the user names them.
_SLICES = {
    "tensorflow": "v5e-1,v5e-4,v5e-8,v2-8,v3-8",
    "jax": "v5e-1,v5e-4,v5e-8,v6e-1,v6e-4,v6e-8,v5p-8",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(finished.ConfigOrRunOptions):
    """The config, the slices, and the limit of the run."""

    slices: str = flag(
        "",
        "TPU slices to choose from",
        metavar="SLICE,...",
        aliases=("slice",),
        shown="the engine's slices of one host",
    )
    budget: float | None = flag(
        None, "dollars that the run may cost: find the fastest", metavar="DOLLARS"
    )
    deadline: float | None = flag(
        None, "time that the run may take, such as 6h: find the cheapest", metavar=TIME, minimum=1
    )
    time_limit: float = flag(1800.0, "how long the plan may take", metavar=TIME, minimum=1)
    top: int = flag(
        5, "how many candidates to show, beside the best of each slice", metavar="N", minimum=1
    )
    price: str = flag(
        "", "dollars per chip-hour, such as v5e=1.10,v3=1.50", shown="list prices", metavar="PRICES"
    )
    json: str | None = flag(None, "write the answer to this file, too", metavar="FILE")
    workdir: str | None = flag(
        None, f"folder for {FILE}, local or gs://", metavar="DIR", shown="runs/<config>"
    )

    def validate(self) -> None:
        """Raises `UserError` for flags that contradict each other or have no meaning."""
        if self.budget is not None and self.deadline is not None:
            raise UserError(
                f"--budget={self.budget:g} asks for the fastest run that costs no more, and "
                f"--deadline={format_period(self.deadline)} for the cheapest that ends in time: "
                "give one of them."
            )
        if self.budget is not None and not 0 < self.budget < math.inf:
            raise UserError(f"--budget={self.budget:g}: give dollars, more than 0.")
        for name in self.slices.split(",") if self.slices else ():
            parse_slice(name)
        parse_prices(self.price)
        if self.json and os.path.isdir(self.json):
            raise UserError(f"--json={self.json} is a folder: name a file in it.")

    def list_slices(self, engine: str) -> list[Slice]:
        """Returns the slices of --slices, or the engine's default slices, without duplicates."""
        names = self.slices or _SLICES[engine]
        return list({one.name: one for one in map(parse_slice, names.split(","))}.values())


@interrupts.answering_sigterm()
def run(options: Options) -> None:
    """Prints the best candidates, and records all verdicts in the workdir."""
    options.validate()
    with slow.reporting_if_slow(f"Loading {options.config}"):
        experiment = options.load_experiment()
    fixed = {word.partition("=")[0].removeprefix("--config.") for word in options.overrides}
    space = Space(experiment, fixed)
    engine = "jax" if space.has_mesh else "tensorflow"
    targets = options.list_slices(engine)
    for target in targets:
        selection.check_generation(engine, target.generation)
    if not space.list_states(targets):
        reasons = " ".join(f"{target.name}: {space.explain_refusal(target)}" for target in targets)
        raise UserError(f"The config allows none of the slices. {reasons}")
    journal = _open_journal(options, space)
    search = _search_known(options, space, targets, journal)
    if search is None:
        search = _search(options, space, targets, journal)
    else:
        _print_answer(options, space, targets, search, journal)
    best = next(iter(search.list_best()), None)
    if best is None or not search.meets_goal(best):
        nearest = ": the first above is the nearest" if best else ", see above"
        raise UserError(f"No candidate is known to run{search.goal.limit}{nearest}.")


def _open_journal(options: Options, space: Space) -> Journal:
    workdir = options.workdir or options.default_workdir
    key = compute_key(space)
    try:
        return Journal(workdir, key)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(
            f"{files.join(workdir, FILE)} cannot be used ({reason}): give another folder with "
            "--workdir=DIR."
        ) from error


def _search_known(
    options: Options, space: Space, targets: Sequence[Slice], journal: Journal
) -> Search | None:
    """Returns the search if recorded verdicts suffice to complete it; otherwise None."""
    if space.experiment.train.epochs is not None or journal.facts is None:
        return None
    if not space.list_states(targets).keys() <= journal.facts.states.keys():
        return None
    search = _build_search(options, space, targets, journal.facts)
    search.record_known(journal.verdicts)
    return search if search.choose_next() is None else None


def _search(options: Options, space: Space, targets: Sequence[Slice], journal: Journal) -> Search:
    """Compiles candidates and prints the best ones, even if interrupted; returns the search."""
    with slow.reporting_if_slow("Loading TensorFlow"):
        selection.choose_backend(space.plan_cluster())
        import_tensorflow()
        from tftpu.launch.plan.examining import PlanExaminer
        from tftpu.preflight.examining.estimates import estimate_duration

        prepared, batch_spec = prepare(space.experiment)
    space = dataclasses.replace(space, experiment=prepared)
    check_machine()
    start = time.monotonic()
    examiner = PlanExaminer(space, batch_spec)
    facts = examiner.measure_facts(space.list_states(targets), journal.facts)
    if facts != journal.facts:
        journal.write_facts(facts)
    search = _build_search(options, space, targets, facts)
    search.record_known(journal.verdicts)
    for line in table.describe_estimates(search, space, facts.parameters):
        print(line, file=sys.stderr, flush=True)
    print(f"  {estimate_duration(facts.weights, 'candidate')}", file=sys.stderr, flush=True)
    if search.verdicts:
        known = f"{counted(len(search.verdicts), 'candidate')} known from {FILE}"
        if best := search.list_best():
            known += f", the best of them {table.describe_verdict(search, space, best[0])}"
        print(known, file=sys.stderr, flush=True)
    try:
        examiner.run(search, journal, options.time_limit - (time.monotonic() - start))
    finally:
        _print_answer(options, space, targets, search, journal)
    return search


def _build_search(options: Options, space: Space, targets: Sequence[Slice], facts: Facts) -> Search:
    prices = parse_prices(options.price)
    goal = Goal(space.experiment.train.length, options.budget, options.deadline, facts.tokens)
    estimates = [
        estimate(
            *(candidate, target, facts),
            target.chips * prices.get(target.generation.name, target.generation.usd_hour),
        )
        for target in targets
        for candidate in space.list_candidates(target, facts.blocks, facts.statistics)
        if not isinstance(facts.states[name_state(candidate.mesh, target)], str)
    ]
    own = [one.candidate for one in estimates if space.has_settings(one.candidate)]
    return Search(estimates, goal, own, [one.name for one in targets] if options.slices else [])


def _describe_run(space: Space, goal: Goal, facts: Facts | None) -> str:
    """Describes the run in a line: parameters, steps, batch, optimizer, precision, engine, aim."""
    engine = "JAX" if space.has_mesh else "TensorFlow"
    batch = counted(space.experiment.data.global_batch_size, "example")
    size = f"{counted(facts.parameters, 'parameter')}, " if facts else ""
    if facts and facts.tokens:
        batch += f" of {counted(facts.tokens // facts.examples, 'token')}"
    given = space.experiment
    words = [getattr(given.optimizer, "name", ""), given.train.precision, f"{engine} engine"]
    method = ", ".join(word for word in words if word not in ("", "auto"))
    return f"{size}{counted(goal.steps, 'step')} of {batch} ({method}): {goal.aim}"


def _list_command(options: Options, best: Candidate, space: Space) -> list[str]:
    """Returns lines with the command that trains a candidate, and one to check it or a remark."""
    words = options.overrides, best, space
    if not finished.is_run(options.config):
        more = table.format_command("preflight", options.config, *words)
        return [
            f"  {table.format_command('train', options.config, *words)}",
            f"  {more} --slices={best.slice}",
        ]
    file = space.experiment.config_file
    config = config_flags.find_config_of_run(options.config)
    command = table.format_command("train", config or "CONFIG", *words)
    # For a config of tftpu, `config` is only guessed from the run's folder: the user must check it.
    parts = "flags" if file and config else "config and the flags"
    return [f"  {command}", f"  with the {parts} that the run was trained with"]


def _list_others(options: Options, others: Sequence[Candidate], space: Space) -> list[str]:
    """Returns lines with `tftpu preflight` commands for the best candidates of other slices."""
    if not others or finished.is_run(options.config):
        return []
    lines = ["On the other slices:"]
    for candidate in others:
        words = options.config, options.overrides, candidate, space
        command = table.format_command("preflight", *words)
        lines.append(f"  {command} --slices={candidate.slice}")
    return lines


def _print_answer(
    options: Options, space: Space, targets: Sequence[Slice], search: Search, journal: Journal
) -> None:
    console = build_console()
    rows = table.build_rows(search, space, options.top)
    lines: list[str] = []
    if rows:
        described = _describe_run(space, search.goal, journal.facts)
        console.print(described, markup=False, highlight=False)
        console.print(table.build_table(rows, search.goal.miss, console.width), highlight=False)
        lines, best = [""], search.list_best()[0]
        if search.meets_goal(best):
            so_far = "The best so far, on" if search.left else "On"
            lines = ["", f"{so_far} {best.slice}:", *_list_command(options, best, space)]
            lines += [*_list_others(options, search.list_firsts()[1:], space), ""]
    else:
        lines = [table.explain_nothing(search)]
    refusals = {t.name: space.explain_refusal(t) for t in targets if not search.has_slice(t.name)}
    states = journal.facts.states if journal.facts else {}
    undivided = [states[name] for name in space.list_states(targets) if name in states]
    undivided = [reason for reason in undivided if isinstance(reason, str)]
    lines += [*table.describe_ruled_out(search, space), *table.describe_unpriced(search)]
    lines += table.describe_search(search, refusals, undivided)
    if rows:
        lines += [*table.describe_losers(search), *table.describe_next(search, space)]
        given = f"{options.price} dollars a chip-hour, as given; else " if options.price else ""
        lines.append(
            f"Prices: {table.describe_hours(search)}; {given}{PRICE_SOURCE}. Compiled, not run: "
            "predictions for the steps alone, times and prices "
            f"{table.describe_ranges(rows)}; rows that differ by less are alike."
        )
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    sys.stdout.flush()
    if options.json:
        answer = {
            "config": options.config,
            "overrides": options.overrides,
            "steps": search.goal.steps,
            "budget": search.goal.budget,
            "deadline": search.goal.deadline,
            "best": rows,
            "candidates": search.size,
            "compiled": len(search.verdicts),
            "pruned": search.count_pruned(),
            "left": search.left,
        }
        files.write_whole(options.json, (json.dumps(answer, indent=1) + "\n").encode())
