"""Training of an experiment, as `tftpu train` runs it once its options are checked."""

import dataclasses
import functools
import json
import os
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import keras

import tftpu
from tftpu import input_pipelines
from tftpu.amounts import format_metric
from tftpu.config import Experiment, OptimizerConfig, to_json
from tftpu.engines import selection
from tftpu.errors import UserError
from tftpu.input_pipelines.sources import StreamedImages, Texts
from tftpu.launch.run import another_run, finished, recorded_start, result, summary
from tftpu.launch.run import experiment as build
from tftpu.launch.settings import keras_objects, own_code
from tftpu.optim import schedules
from tftpu.runtime import goodput, slow
from tftpu.storage import files, side_files
from tftpu.storage.own_files import OwnFile
from tftpu.tpu.compiler_options import as_text
from tftpu.training import batch_values
from tftpu.training.trainer import Trainer


def train(
    experiment: Experiment,
    workdir: str,
    initialise: Callable[[Experiment, Trainer], str] = build.load_initial_weights,
    callbacks: Sequence[keras.callbacks.Callback] = (),
    flags: Sequence[str] = (),
) -> None:
    """Trains an experiment to the end of its steps, and prints the summary.

    Args:
        experiment: a validated experiment, which is checked here against the available devices.
        workdir: folder of the run, local or `gs://`, claimed by this process.
        initialise: a function that sets the initial weights of a new run; returns a message or "".
        callbacks: callbacks in addition to those of the experiment.
        flags: the command's flags, which are recorded to show how the run is resumed.
    """
    engine = build.connect(experiment)
    own_code.validate(experiment, engine.data_shards)
    for name in experiment.model.base_fields:
        base = getattr(experiment.model, name)
        if base and os.path.exists(base):
            # An absolute path, because every process that opens the run loads these weights again.
            setattr(experiment.model, name, os.path.abspath(base))
    precision = tftpu.set_precision(experiment.train.precision)
    chief = engine.hosts.chief
    if chief:
        reason = selection.find_reason_for_jax(experiment.cluster)
        why = f" ({reason})" if reason and experiment.cluster.engine == "auto" else ""
        print(f"{engine.description}{why}, {precision}", flush=True)
    with slow.reporting_if_slow("Opening the data and building the model"):
        data = build.build_training_data(experiment)
        state = input_pipelines.describe_state(data)
        evaluation = build.build_evaluation_data(experiment)
        experiment = build.resolve_length(experiment, data)
        with engine.scope():
            trainer = build.build_trainer(experiment, workdir)
            loaded = initialise(experiment, trainer)
    trainer.account.add_earlier(goodput.process_age() - trainer.account.clock.measure_wall())
    if loaded and chief:
        print(loaded, flush=True)
    text = to_json(
        _add_compiler_options(keras_objects.describe_callbacks(experiment), engine.compiler_options)
    )
    # The config is written last, because a run that fails its checks must not claim the workdir. A
    # run that has trained all its steps keeps the config that it was trained with.
    trained = max(trainer.checkpoints.list_steps(), default=0) if trainer.checkpoints else 0
    if trained < experiment.train.length:
        _check_same_data(experiment, state, trained, workdir)
    else:
        _check_not_shortened(experiment.train.length, trained, workdir)
    if chief and trained:
        _warn_of_changes(workdir, resumes=trained < experiment.train.length)
    if chief and trained < experiment.train.length:
        if state:
            state = {**state, **_find_classes(experiment.data, workdir if trained else "")}
            OwnFile(workdir, finished.DATA).write(json.dumps(state).encode())
        recorded_start.write(workdir, flags)
        if trained:
            _report_longer_schedule(experiment, trained, workdir)
            _report_other_metric(experiment, workdir)
        config = OwnFile(workdir, "config.json")
        config.take()  # a damaged config.json is kept under another name
        config.write(text.encode())
    # The outputs' losses, which the check of the classes needs, are known once training begins.
    check = _AtBegin(functools.partial(_check_classes, experiment, trainer))
    history = trainer.fit(
        data,
        steps=experiment.train.length,
        validation_data=evaluation,
        eval_every=experiment.train.eval_every or None,
        callbacks=[check, *experiment.callbacks, *callbacks],
    )
    if chief:
        evaluated = trainer.executor.eval_sums.result_names
        if trained >= experiment.train.length:
            ended = result.read(workdir)
            evaluated = ended["evaluation"] if ended and ended["steps"] == trained else None
        results = _find_last_evaluation(history, evaluated)
        result.write(trainer, results, workdir)
        text = summary.format_summary(experiment, trainer, results, workdir)
        print(text, flush=True)


class _AtBegin(keras.callbacks.Callback):
    """A callback that calls a function when training begins."""

    def __init__(self, call: Callable[[], object]):
        super().__init__()
        self._call = call

    def on_train_begin(self, logs: Any = None) -> None:
        self._call()


def _check_classes(experiment: Experiment, trainer: Trainer) -> None:
    """Raises `UserError` if the config's data have more classes than its model has outputs."""
    classes = getattr(experiment.data, "num_classes", 0)
    spec = experiment.data.batch_spec(experiment.data.global_batch_size) if classes else None
    if spec is not None:
        batch_values.check_classes(trainer.model, spec, classes)


def _find_classes(data: Any, workdir: str) -> dict[str, Any]:
    """Returns the names of classes that folders or a table number, as {"classes": ...}, or {}.

    `finished.load_experiment` gives them to the data: later files may number them otherwise.

    Args:
        data: the data of the config.
        workdir: the workdir of a run that resumes, which has recorded them; "": the run begins.
    """
    in_files = type(data) is StreamedImages and data.format in ("folder", "index")
    if not (in_files or type(data) is Texts) or data.classes:
        return {}
    names = (workdir and finished.read_classes(workdir)) or data.class_names()
    return {"classes": names} if names else {}


def _warn_of_changes(workdir: str, *, resumes: bool) -> None:
    """Prints to stderr which files of the run's code have changed since it was started, if any."""
    changes = recorded_start.describe_changes(workdir)
    if changes:
        follows = "it resumes with the current code"
        if not resumes:
            follows = "nothing is trained now, and the results are those of the earlier code"
        print(
            f"tftpu: warning: {changes} since the run was started: {follows}.",
            file=sys.stderr,
            flush=True,
        )


def _check_same_data(
    experiment: Experiment, state: Mapping[str, Any], step: int, workdir: str
) -> None:
    """Raises `UserError` if a run would resume on other data than it began with.

    Args:
        experiment: the experiment that resumes.
        state: the present description of the data; see `input_pipelines.describe_state`.
        step: the step at which the run resumes; 0 for a new one.
        workdir: folder of the run.
    """
    before = (step and side_files.read(files.join(workdir, finished.DATA))) or {}
    if all(state.get(name, value) == value for name, value in before.items()):
        return
    differ = "their number is the same, but the files have other names or sizes"
    if before.get("content") != state.get("content"):
        differ = "their number is the same, but not the examples (fields of `data` may select them)"
    for unit in ("examples", "batches"):
        was, now = before.get(unit), state.get(unit)
        if was != now:
            differ = f"there were {was} {unit} when it began, and there are {now} now"
    raise UserError(
        f"The training data of the run in {workdir!r} have changed: {differ}. A run resumes only "
        "on the data that it began with: restore them, or begin another run, such as "
        f"{another_run.suggest_run(experiment, workdir)}."
    )


def _read_length(workdir: str) -> int | None:
    """Returns the steps of the run according to its config.json; None if it does not say."""
    recorded = side_files.read(files.join(workdir, "config.json"), train=dict)
    length = recorded and recorded["train"].get("steps")
    return length if isinstance(length, int) else None


def _check_not_shortened(asked: int, step: int, workdir: str) -> None:
    """Raises `UserError` if fewer steps are requested than an unfinished run has trained.

    Args:
        asked: the requested number of steps.
        step: the step of the run's newest checkpoint.
        workdir: folder of the run.
    """
    length = _read_length(workdir)
    if length is not None and asked < step < length:
        raise UserError(
            f"This command asks for {asked:,} steps, but the run in {workdir!r} is at step "
            f"{step:,} of {length:,}. The same command with --config.train.steps={length}, and "
            "without --config.train.epochs, continues it; "
            f"--workdir={files.suggest_path(workdir)} begins another run."
        )


def _report_longer_schedule(experiment: Experiment, step: int, workdir: str) -> None:
    """Prints the change of the learning rate if its schedule ends at another step than before.

    Args:
        experiment: the experiment that resumes.
        step: the step at which it resumes.
        workdir: folder of the run.
    """
    before, now = _read_length(workdir), experiment.train.length
    optimizer = experiment.optimizer
    if before is None or before == now or not isinstance(optimizer, OptimizerConfig):
        return
    was, is_now = (
        float(schedules.build_schedule(optimizer, experiment.data.global_batch_size, steps)(step))
        for steps in (before, now)
    )
    if was != is_now:
        print(
            f"The {optimizer.decay} schedule of the learning rate now ends at step {now:,}, not at "
            f"{before:,}: at step {step:,} the rate is {format_metric(is_now)}, where it was "
            f"{format_metric(was)}.",
            flush=True,
        )


def _report_other_metric(experiment: Experiment, workdir: str) -> None:
    """Prints a note if a resumed run chose its best checkpoint by another metric before."""
    best, now = result.read_best(workdir), experiment.best_metric or "loss"
    if best and best.metric != now:
        print(
            f"Step {best.step:,} is the best so far by {best.metric}. The next evaluation replaces "
            f"it, because {now} decides now; --config.train.best_metric={best.metric} keeps it.",
            flush=True,
        )


def _add_compiler_options(experiment: Experiment, chosen: Mapping[str, str]) -> Experiment:
    """Returns the experiment with the compiler options that were chosen for it."""
    if not chosen:
        return experiment
    cluster = dataclasses.replace(experiment.cluster, compiler_options=as_text(chosen))
    return dataclasses.replace(experiment, cluster=cluster)


def _find_last_evaluation(
    history: keras.callbacks.History, known: Collection[str] | None
) -> dict[str, float]:
    """Returns the metrics of the last evaluation, the loss first; {} if there was none.

    Args:
        history: the history of the run.
        known: the metrics that the run evaluates now, as those of earlier starts may have been
            others; None: all in the history.
    """
    found = {
        name.removeprefix("val_"): values[-1]
        for name, values in history.history.items()
        if name.startswith("val_") and (known is None or name.removeprefix("val_") in known)
    }
    return dict(sorted(found.items(), key=lambda item: item[0] != "loss"))
