"""Searches for the hyper-parameters of a config with the best metric.

Each trial is a run in a folder of the workdir, and trials that fall behind are ended early. The
same command continues the search. On another machine, with the same workdir in a bucket, --join
takes part in it. --report shows the results.

With --slice, preflight predicts the price of each trial before it runs, and a trial that does not
fit does not run.

    tftpu search digits_resnet --space='optimizer.learning_rate=log:1e-3..1' --trials=20
    tftpu search --report --workdir=runs/digits_resnet-search
"""

import dataclasses
import signal
import sys
from typing import TYPE_CHECKING, Any

from tftpu.errors import ExitCode, UserError
from tftpu.installation import command
from tftpu.launch.settings import config_flags, own_code
from tftpu.launch.settings.options import ConfigOptions, flag
from tftpu.launch.tfx import examples

if TYPE_CHECKING:
    from tftpu.config import Experiment
    from tftpu.launch.search.plan import Plan
    from tftpu.launch.search.space import Dimension
    from tftpu.launch.search.trials import Trials


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(ConfigOptions):
    """The config, its space, and how it is searched."""

    config: str = flag("", "name of a config, or path of your own", metavar="CONFIG", word=True)
    space: tuple[str, ...] = flag(
        (),
        "values of a field: FIELD=log:LOW..HIGH, uniform:LOW..HIGH or choice:A,B; repeat it",
        metavar="FIELD=VALUES",
        shown="get_space() of the config",
    )
    # None means that a flag was not given; a new plan then uses the default in `shown`.
    trials: int | None = flag(None, "number of trials", minimum=1, shown="20")
    parallel: int | None = flag(None, "trials at a time on this machine", minimum=1, shown="1")
    metric: str | None = flag(
        None, "metric of the evaluation", metavar="NAME", shown="train.best_metric of the config"
    )
    sampler: str | None = flag(None, "tpe, random or qmc", metavar="NAME", shown="tpe")
    pruner: str | None = flag(None, "median, hyperband or none", metavar="NAME", shown="median")
    seed: int | None = flag(None, "seed of the sampler", minimum=0, shown="0")
    slice: str = flag(
        "",
        "TPU slice that each trial is priced for, such as v5e-8",
        metavar="SLICE",
        aliases=("slices",),
    )
    budget_usd: float | None = flag(
        None, "end before the trials' price exceeds this", minimum=0, metavar="USD", shown="none"
    )
    workdir: str | None = flag(
        None, "folder of the search, local or gs://", metavar="DIR", shown="runs/<config>-search"
    )
    join: bool = flag(False, "take part in the search of the workdir")
    report: bool = flag(False, "show what the search of the workdir found, and run nothing")


def run(options: Options) -> None:
    """Runs trials until all have ended, or shows the results.

    Raises:
        UserError: Optuna is not installed, a flag is missing or does not fit the search of the
            workdir, or no trial has succeeded.
        SystemExit: a signal stopped the search; the same command resumes it.
    """
    try:
        import matplotlib  # noqa: F401
        import optuna  # noqa: F401
    except ImportError as error:
        raise UserError(f"Searching needs Optuna: run `{command('search')}`.") from error
    from tftpu.launch.search import plan as plans
    from tftpu.launch.search import report, space
    from tftpu.launch.search.trials import Trials

    workdir = _resolve_workdir(options)
    if options.report:
        _check_alone(options)
    given = options.join or options.report
    plan, experiment = _load_plan(options, workdir) if given else _build_plan(options)
    dimensions = space.parse(plan.space, experiment)
    if options.report:
        _show(plan, plan.open_study(workdir), dimensions, workdir)
        return
    _check(options, plan, experiment, dimensions)
    replaced = plans.record(plan, workdir)
    if replaced:
        print(f"Removed from {workdir}: {replaced}.", flush=True)
    study = plan.open_study(workdir)
    trials, stopped = Trials(plan, workdir, study, dimensions), ""
    try:
        stopped = _run_trials(options.parallel or 1, plan, workdir, study, trials)
    finally:  # a search that failed may have complete trials
        if not _is_replaced(plan, workdir):
            report.write_result(plan, study, workdir)
            _show(plan, study, dimensions, workdir)
    if stopped:
        print(f"tftpu: Stopped by {stopped}: the same command resumes.", file=sys.stderr)
        sys.exit(ExitCode.PREEMPTED)
    if not report.rank_complete(plan, study.get_trials(deepcopy=False)):
        raise UserError("No trial is complete, so nothing was found: the reason is above.")


def _is_replaced(plan: "Plan", workdir: str) -> bool:
    """Returns whether the workdir has another search now, whose files must stay as they are."""
    from tftpu.launch.search import plan as plans

    try:
        plans.check_recorded(plan, workdir)
    except plans.ReplacedError:
        return True
    except (UserError, OSError):  # the report, or the error that ended the search, says more
        pass
    return False


def _show(plan: "Plan", study: Any, dimensions: "list[Dimension]", workdir: str) -> None:
    from tftpu.launch.search import pictures, report

    drawn = pictures.write(plan, study, dimensions, workdir)
    print(report.format_result(plan, study, workdir, drawn), flush=True)


def _resolve_workdir(options: Options) -> str:
    if options.workdir:
        return options.workdir
    if not options.config or options.join:
        raise UserError(
            "tftpu search needs the --workdir=DIR of the search that it joins."
            if options.join
            else "tftpu search needs CONFIG, or --report and the --workdir=DIR of a search."
        )
    return f"{options.default_workdir}-search"


def _check_alone(options: Options) -> None:
    """Raises `UserError` for flags that --report cannot use, because it runs no trials."""
    if options.join or options.parallel is not None:
        raise UserError("--report runs no trials: leave out --join and --parallel.")


def _load_plan(options: Options, workdir: str) -> "tuple[Plan, Experiment]":
    """Returns the plan in the workdir, and its config; rejects flags that the plan sets."""
    from tftpu.launch.search import plan as plans

    for name in ("overrides", *plans.GIVEN):
        if getattr(options, name) not in (None, "", ()):
            given = options.overrides[0] if name == "overrides" else f"--{name}"
            raise UserError(
                f"The search in {workdir!r} has its own plan, which {given} cannot change: leave "
                "it out."
            )
    plan = plans.read_recorded(workdir)
    if plan is None:
        raise UserError(f"There is no search in {workdir!r}: its {plans.FILE} is missing.")
    if (
        not options.config
        and plan.config.endswith(".py")
        and not own_code.has_been_named(plan.config)
    ):
        raise UserError(
            f"The search in {workdir!r} was made with the config {plan.config}, which is code. If "
            "you trust it, give the path of that file on this machine with --config=FILE.py."
        )
    # The user's own config may have another path on another machine.
    plan = dataclasses.replace(plan, config=options.config or plan.config)
    experiment = config_flags.load(plan.config, list(plan.overrides))
    if options.join and not options.config and isinstance(experiment.data, examples.Examples):
        raise UserError(
            f"The search in {workdir!r} trains on examples of a TFX pipeline. Its files may name "
            "any transform graph, which is a program. If you trust them, give the config with "
            f"--config={plan.config}."
        )
    changed = plans.describe_differences(plan.fields, plans.extract_fields(experiment))
    if changed and options.join:
        raise UserError(
            f"--join: {plan.config} is not the config of the search in {workdir!r}: {changed}. "
            "Give the same one with --config=FILE."
        )
    if changed:
        print(f"tftpu: The config is not that of the search any more: {changed}.", file=sys.stderr)
    return plan, experiment


def _build_plan(options: Options) -> "tuple[Plan, Experiment]":
    """Returns the plan that the flags describe, and its config, after checks that need no data."""
    from tftpu.launch.search import checks
    from tftpu.launch.search import plan as plans
    from tftpu.tpu.slices import parse_slice

    if not options.config:
        raise UserError("tftpu search needs CONFIG, or --join and --workdir=DIR.")
    experiment = options.load_experiment()
    if options.slice:
        parse_slice(options.slice)
    elif options.budget_usd is not None:
        raise UserError(
            "--budget_usd needs --slice=NAME, the slice that the trials are priced for."
        )
    given = {name: getattr(options, name) for name in plans.GIVEN}
    given["space"] = options.space or config_flags.load_space(options.config)
    given["metric"] = checks.choose_metric(options.metric, options.overrides, experiment)
    plan = plans.Plan(
        config=experiment.config_file or options.config,
        overrides=options.overrides,
        fields=plans.extract_fields(experiment),
        **{name: value for name, value in given.items() if value is not None},
    )
    return plan, experiment


def _check(
    options: Options, plan: "Plan", experiment: "Experiment", dimensions: "list[Dimension]"
) -> None:
    """Raises `UserError` for mistakes that would make trials fail."""
    from tftpu.launch.search import checks, pricing

    _check_devices(experiment.cluster, options.parallel or 1)
    checks.check_space(dimensions, plan.overrides, experiment)
    if plan.slice:
        pricing.check()


def _run_trials(parallel: int, plan: "Plan", workdir: str, study: Any, trials: "Trials") -> str:
    """Runs trials until all have ended; returns the name of the signal that stopped them, or ""."""
    from tftpu.launch.search import child
    from tftpu.launch.search.logs import Logs
    from tftpu.launch.search.worker import Workers

    stopped: list[str] = []

    def stop(number: int, _: Any) -> None:
        stopped.append(signal.Signals(number).name)
        if len(stopped) > 1:
            print(f"{stopped[-1]}: the running trials end at once.", flush=True)
        else:
            says = "the running trials save, and are resumed later. A second signal ends them"
            print(f"{stopped[-1]}: {says} at once.", flush=True)
        workers.stop()

    with Logs(workdir) as logs:
        workers = Workers(plan, study, trials, logs, lambda text: print(text, flush=True))
        before = {n: signal.signal(n, stop) for n in (signal.SIGTERM, signal.SIGINT)}
        try:
            child.start_server()
            workers.run(parallel)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
    return stopped[0] if stopped else ""


def _check_devices(cluster: Any, parallel: int) -> None:
    """Chooses Keras's backend; raises `UserError` on a pod, or for parallel trials on a TPU."""
    from tftpu.engines import selection
    from tftpu.tpu import environment

    selection.choose_backend(cluster)
    if selection.find_task(cluster).count > 1:
        raise UserError(
            "tftpu search trains each trial on one host. Run it on one host of the pod, or on "
            "several machines with --join."
        )
    if parallel > 1 and environment.has_tpu() and cluster.tpu != "none":
        raise UserError("The TPU of this machine trains one trial at a time: leave out --parallel.")
