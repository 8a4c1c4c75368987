"""Searches for the hyper-parameters of a config with the best metric.

Each trial is a run in a folder of the workdir, and those that fall behind are ended early. Given
again, the command continues the search; on another machine, with the same workdir in a bucket,
--join takes part in it. --report shows what was found.

With --slice, preflight prices each trial before it runs, and one that does not fit does not run.

    tftpu search --config=digits_resnet --space='optimizer.learning_rate=log:1e-3..1' --trials=20
    tftpu search --report --workdir=runs/digits_resnet-search
"""

import dataclasses
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tftpu.errors import UserError
from tftpu.installation import command
from tftpu.launch import config_flags
from tftpu.launch.options import ConfigOptions, flag
from tftpu.runtime.preemption import PREEMPTED
from tftpu.storage import files

if TYPE_CHECKING:
    from tftpu.launch.search.plan import Plan
    from tftpu.launch.search.space import Dimension
    from tftpu.launch.search.trials import Trials


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(ConfigOptions):
    """The config, its space, and how it is searched."""

    config: str = flag("", "name of a config, or path of your own", metavar="NAME")
    space: tuple[str, ...] = flag(
        (),
        "values of a field: FIELD=log:LOW..HIGH, uniform:LOW..HIGH or choice:A,B; repeat it",
        metavar="FIELD=VALUES",
        shown="get_space() of the config",
    )
    trials: int = flag(20, "number of trials", minimum=1)
    parallel: int = flag(1, "trials at a time on this machine", minimum=1)
    metric: str | None = flag(
        None, "metric of the evaluation", metavar="NAME", shown="train.best_metric of the config"
    )
    sampler: str = flag("tpe", "tpe, random or qmc", metavar="NAME")
    pruner: str = flag("median", "median, hyperband or none", metavar="NAME")
    seed: int = flag(0, "seed of the sampler", minimum=0)
    slice: str = flag("", "TPU slice that each trial is priced for, such as v5e-8", metavar="NAME")
    budget_usd: float | None = flag(
        None, "end before the trials cost more on the slice", minimum=0, metavar="USD", shown="none"
    )
    workdir: str | None = flag(
        None, "folder of the search, local or gs://", metavar="DIR", shown="runs/<config>-search"
    )
    join: bool = flag(False, "take part in the search of the workdir")
    report: bool = flag(False, "show what the search of the workdir found, and run nothing")


def run(options: Options) -> None:
    """Runs trials until all have ended, or shows what was found.

    Raises:
        UserError: a flag is missing or does not fit the search of the workdir, or no trial has
            succeeded.
        SystemExit: it was asked to stop; the same command continues.
    """
    try:
        import matplotlib  # noqa: F401
        import optuna  # noqa: F401
    except ImportError as error:
        raise UserError(f"Searching needs Optuna: run `{command('search')}`.") from error
    from tftpu.launch.search import pictures, report, space
    from tftpu.launch.search import plan as plans
    from tftpu.launch.search.trials import Trials

    workdir = _workdir(options)
    given = options.join or options.report
    plan = _recorded(options, workdir) if given else _plan(options)
    experiment = config_flags.load(plan.config, list(plan.overrides))
    dimensions = space.parse(plan.space, experiment)
    stopped = ""
    if options.report:
        study = plan.study(workdir)
    else:
        _check_fields(plan, dimensions)
        _check_devices(experiment.cluster, options.parallel)
        plans.record(plan, workdir)
        study = plan.study(workdir)
        trials = Trials(plan, workdir, study, dimensions)
        stopped = _carry_out(options.parallel, plan, workdir, study, trials)
        report.write_result(plan, study, workdir)
    print(report.text(plan, study, workdir, pictures.write(plan, study, dimensions, workdir)))
    if stopped:
        print(f"tftpu: Stopped by {stopped}: the same command continues.", file=sys.stderr)
        sys.exit(PREEMPTED)
    if not options.report and not report.best_first(plan, study.get_trials(deepcopy=False)):
        raise UserError("No trial is complete, so nothing was found: its reason is above.")


def _workdir(options: Options) -> str:
    if options.workdir:
        return options.workdir
    if not options.config or options.join:
        raise UserError(
            "tftpu search needs the --workdir=DIR of the search that it joins."
            if options.join
            else "tftpu search needs --config=NAME, or --report and the --workdir=DIR of a search."
        )
    return f"{options.default_workdir}-search"


def _recorded(options: Options, workdir: str) -> "Plan":
    """Returns the plan of the workdir, whose flags are not given again."""
    from tftpu.launch.search import plan as plans

    if options.report and (options.join or options.parallel > 1):
        raise UserError("--report runs no trials: leave out --join and --parallel.")
    for field in dataclasses.fields(plans.Plan):
        if field.name != "config" and getattr(options, field.name) != _default(field.name):
            given = options.overrides[0] if field.name == "overrides" else f"--{field.name}"
            raise UserError(
                f"The search in {workdir!r} has its own plan, so {given} cannot change it: "
                "leave it out."
            )
    plan = plans.recorded(workdir)
    if plan is None:
        raise UserError(f"There is no search in {workdir!r}: its {plans.FILE} is missing.")
    # A config of one's own lies elsewhere on another machine.
    return dataclasses.replace(plan, config=options.config or plan.config)


def _default(name: str) -> Any:
    return next(f.default for f in dataclasses.fields(Options) if f.name == name)


def _plan(options: Options) -> "Plan":
    """Returns the plan that the flags describe, after checks that need no data."""
    from tftpu.launch.search.plan import Plan
    from tftpu.tpu.slices import parse_slice

    if not options.config:
        raise UserError("tftpu search needs --config=NAME, or --join and --workdir=DIR.")
    experiment = options.experiment()
    if options.slice:
        parse_slice(options.slice)
    elif options.budget_usd is not None:
        raise UserError("--budget_usd needs the --slice=NAME that the trials are priced for.")
    metric = options.metric or experiment.train.best_metric or "loss"
    # What a trial keeps as its best checkpoint; part of the command that trains the best config.
    own = metric == (experiment.train.best_metric or "loss")
    best = () if own else (f"--config.train.best_metric={metric}",)
    return Plan(
        config=experiment.config_file or options.config,
        overrides=(*options.overrides, *best),
        space=options.space or config_flags.space(options.config),
        trials=options.trials,
        metric=metric,
        sampler=options.sampler,
        pruner=options.pruner,
        seed=options.seed,
        slice=options.slice,
        budget_usd=options.budget_usd,
    )


def _carry_out(parallel: int, plan: "Plan", workdir: str, study: Any, trials: "Trials") -> str:
    """Runs trials until all have ended; returns the name of the signal that stopped them, or ""."""
    from tftpu.launch.search import child
    from tftpu.launch.search.worker import Workers

    logs = tempfile.mkdtemp() if files.is_remote(workdir) else os.path.join(workdir, "logs")
    os.makedirs(logs, exist_ok=True)
    workers = Workers(plan, study, trials, logs, lambda text: print(text, flush=True))
    stopped: list[str] = []

    def stop(number: int, _: Any) -> None:
        stopped.append(signal.Signals(number).name)
        if len(stopped) > 1:
            print(f"{stopped[-1]}: the running trials end at once.", flush=True)
        else:
            says = "the running trials save, and are resumed later. A second signal ends them"
            print(f"{stopped[-1]}: {says} at once.", flush=True)
        workers.stop()

    before = {n: signal.signal(n, stop) for n in (signal.SIGTERM, signal.SIGINT)}
    try:
        child.start_server()
        workers.run(parallel)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return stopped[0] if stopped else ""


def _check_fields(plan: "Plan", dimensions: Sequence["Dimension"]) -> None:
    """Raises `UserError` for a field of the space that has its value elsewhere."""
    for dimension in dimensions:
        if dimension.field == "train.best_metric":
            raise UserError("--space: train.best_metric is that of the search, in all trials.")
        given = [o for o in plan.overrides if o.startswith(f"--config.{dimension.field}=")]
        if given:
            raise UserError(f"{given[0]} sets a field of the space: leave out one of them.")


def _check_devices(cluster: Any, parallel: int) -> None:
    """Chooses Keras's backend for the trials; refuses more of them than the devices can hold."""
    from tftpu.engines import selection
    from tftpu.tpu import environment

    selection.choose_backend(cluster)
    if selection.task(cluster).count > 1:
        raise UserError(
            "tftpu search trains each trial on one host: run it on one host of the pod, or on "
            "several machines with --join."
        )
    if parallel > 1 and environment.has_tpu() and cluster.tpu != "none":
        raise UserError("The TPU of this machine trains one trial at a time: leave out --parallel.")
