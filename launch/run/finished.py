"""Loads the run in a workdir: its experiment, and its trainer with the best checkpoint."""

import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from tftpu.checkpoint import manifest
from tftpu.config import Experiment, ModelConfig, from_json
from tftpu.engines import selection
from tftpu.errors import UserError
from tftpu.input_pipelines import sources  # noqa: F401 (which a config.json may name)
from tftpu.launch.correction import suggest_folder
from tftpu.launch.run import recorded_start, result
from tftpu.launch.settings import config_flags, own_code
from tftpu.launch.settings.options import ConfigOptions, Overrides, flag, require_config
from tftpu.launch.startup import import_tensorflow
from tftpu.launch.tfx import examples
from tftpu.models import sizes  # noqa: F401
from tftpu.models.keras_hub import config as keras_hub  # noqa: F401
from tftpu.storage import files, side_files
from tftpu.tpu.compiler_options import AUTO

if TYPE_CHECKING:
    from collections.abc import Callable

    import keras
    import tensorflow as tf

    from tftpu.engines.engine import Engine
    from tftpu.training.trainer import Trainer

_T = TypeVar("_T")
DATA = "data.json"  # file in the workdir that identifies the training data
_LENGTH = 1 << 30  # steps; an arbitrary number, because no learning-rate schedule is used


@dataclasses.dataclass(frozen=True, kw_only=True)
class FinishedRunOptions(Overrides):
    """The config of a finished run, and overrides of its fields."""

    OVERRIDES_HELP = (
        "field of the config that --config names; if the run has a config.json, only the path of "
        "its base weights: --config.model.init_from, or with KerasHub --config.model.preset"
    )

    config: str | None = flag(
        None,
        "config of the run, if its config.json is missing or its code has moved",
        metavar="FILE",
        shown="config.json of the run",
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConfigOrRunOptions(ConfigOptions):
    """The options of a command that takes a config, or the folder of a run with a config.json."""

    config: str = require_config(
        "name of a config (`tftpu configs`), path of your own, or folder of a run"
    )

    @property
    def default_workdir(self) -> str:
        return self.config if is_run(self.config) else super().default_workdir

    def load_experiment(self) -> Experiment:
        """Loads the config, or the config that the run was trained with, and applies overrides.

        Raises:
            UserError: there is no such config or run, or a value in it is wrong.
        """
        if not is_run(self.config):
            return super().load_experiment()
        experiment = read_recorded(self.config, how="in place of the run")
        _warn_of_changes(self.config, experiment)
        config_flags.apply_overrides(experiment, self.overrides)
        _check_transform_graph(experiment, how="in place of the run")
        own_code.validate_recorded(experiment)
        return experiment


class RestoredRun(NamedTuple):
    """A run with its best checkpoint.

    Attributes:
        trainer: the trainer with the weights of the checkpoint.
        step: the step of the checkpoint.
        evaluation: the evaluation split; None if the data have none, or were not opened.
    """

    trainer: "Trainer"
    step: int
    evaluation: "tf.data.Dataset | Any"


def load_experiment(workdir: str, options: FinishedRunOptions | None = None) -> Experiment:
    """Loads the experiment of a workdir, with the devices of this machine instead of the run's.

    Args:
        workdir: folder of the run.
        options: options with the config, for a run that a script made or whose code has moved.

    Raises:
        UserError: there is no run in the workdir, its code is not found, or its config.json
            names a program that the command would run.
    """
    config = options.config if options else None
    overrides = list(options.overrides) if options else []
    path = files.join(workdir, "config.json")
    check_exists(workdir)
    if files.exists(path):
        experiment = read_recorded(workdir, config)
        _warn_of_changes(workdir, experiment)
        if classes := read_classes(workdir):
            data: Any = experiment.data  # `StreamedImages` or `Texts`
            data.classes = tuple(classes)
        for change in overrides:
            # Base weights may have moved to another path; a digest shows if they are the same.
            if not (
                experiment.model.lora and change.startswith(_list_base_flags(experiment.model))
            ):
                allowed = " and ".join(_list_base_flags(experiment.model))
                only = f" Only {allowed} may be given." if experiment.model.lora else ""
                raise UserError(
                    f"The run in {workdir!r} has a config.json, so {change} cannot change it.{only}"
                )
            config_flags.apply_override(experiment, change)
    elif config is None:
        raise UserError(
            f"Give a config with the model and the data of the run in {workdir!r}, "
            "--config=FILE.py: it was made by a script with tftpu.Trainer, so no config.json "
            "describes them (docs/gallery/text.md has such a script and its config).\n"
            f"Without a config, `tftpu status {workdir}` and `tftpu plot {workdir}` work, and in "
            "the script, after trainer.restore_for_evaluation(x): trainer.evaluate(x, y), "
            "trainer.predict(x), tftpu.generate(model, prompts), trainer.export_weights(FILE) and, "
            "for adapters, tftpu.models.save_adapters(model, FILE)."
        )
    else:
        experiment = config_flags.load(config, overrides)
    if config is None:
        _check_transform_graph(experiment)
    cluster = experiment.cluster
    cluster.tpu, cluster.virtual_devices, cluster.mesh = "auto", None, None
    cluster.compiler_options = AUTO
    own_code.validate_recorded(experiment)
    return experiment


def read_classes(workdir: str) -> list[str]:
    """Returns the names of classes that a run recorded when it numbered them; [] without any."""
    return (side_files.read(files.join(workdir, DATA)) or {}).get("classes") or []


def is_run(path: str) -> bool:
    """Returns whether a path, given in place of a config, is the folder of a run."""
    named = path.endswith(".py") or path in config_flags.list_names()
    wanted = [files.join(path, name) for name in ("config.json", "goodput.json")]
    return not named and all(map(files.exists, wanted))


def _warn_of_changes(workdir: str, experiment: Experiment) -> None:
    """Warns if code of the run has changed, or its relative paths start in another folder."""
    recorded_start.warn_of_folder(workdir, experiment)
    changes = recorded_start.describe_changes(workdir)
    if changes:
        print(
            f"tftpu: warning: {changes} since the run was trained: its model and data are "
            "built by the current code, so results may differ from those in training.",
            file=sys.stderr,
        )


def _list_base_flags(model: ModelConfig) -> tuple[str, ...]:
    return tuple(f"--config.model.{name}=" for name in model.base_fields)


def check_exists(workdir: str) -> None:
    """Raises `UserError` if there is no run in a folder."""
    has_config = files.exists(files.join(workdir, "config.json"))
    is_preset = files.exists(files.join(workdir, "task.json"))
    if has_config and not is_preset:
        return
    if not manifest.list_steps(files.join(workdir, "checkpoints")):
        if files.exists(files.join(workdir, "goodput.json")):
            raise UserError(
                f"The run in {workdir!r} was stopped before it saved anything: repeat the command "
                "that started it."
            )
        if is_preset:
            raise UserError(
                f"{workdir!r} is a preset of KerasHub, not a run: name it in a config, "
                "tftpu.KerasHub(preset). To use a run without its adapters, add --base to it."
            )
        why = "it has no config.json" if files.exists(workdir) else "there is no such folder"
        raise UserError(f"There is no run in {workdir!r}: {why}.{suggest_folder(workdir)}")


def check_unused(output: str, ending: str = "") -> None:
    """Raises `UserError` if a path exists; the error suggests another one that ends in `ending`."""
    if files.exists(output):
        other = files.suggest_path(output, ending)
        raise UserError(f"{output} exists already: choose another place, such as {other}.")


def is_export(path: str) -> bool:
    """Returns whether a path ends in .onnx (the file may be missing) or holds a SavedModel."""
    is_onnx = path.endswith(".onnx") and not os.path.isdir(path)
    return is_onnx or files.exists(files.join(path, "saved_model.pb"))


def check_adapters(experiment: Experiment, workdir: str) -> None:
    """Raises `UserError` if a run has no adapters that --base would switch off."""
    if not experiment.model.lora:
        raise UserError(
            f"--base: the run in {workdir!r} has no adapters (model.lora is 0): leave it out."
        )


def switch_adapters_off(experiment: Experiment, trainer: "Trainer") -> "Trainer":
    """Switches off the adapters of a restored run's model; returns a new trainer of the model."""
    from tftpu import models
    from tftpu.launch.run import experiment as build

    models.switch_adapters_off(trainer.model)
    # Without `ema_momentum`, evaluations use the changed weights instead of moving averages.
    plain = dataclasses.replace(experiment.train, ema_momentum=None)
    return build.wrap_model(dataclasses.replace(experiment, train=plain), trainer.model, None)


def check_no_export(workdir: str) -> None:
    """Raises `UserError` if a path that should be a run is an exported model."""
    if workdir.endswith((".keras", ".tflite")) and files.exists(workdir):
        raise UserError(
            f"{workdir!r} is an export that cannot be served. Serve its run (tftpu serve RUN) "
            "or an export of it: `tftpu export RUN --output=NAME.onnx` (or a folder, for a "
            "SavedModel), then `tftpu serve NAME.onnx`."
        )
    if is_export(workdir):
        raise UserError(
            f"{workdir!r} is an exported model, not a run. Did you mean '--model={workdir}'?"
        )


def restore_run(experiment: Experiment, workdir: str) -> RestoredRun:
    """Restores the best checkpoint of a run, or the newest if none is best; opens its data.

    Raises:
        UserError: the run has no complete checkpoint.
    """
    build, engine, experiment = _prepare_engine(experiment)
    from tftpu import input_pipelines

    seen = evaluation = build.build_evaluation_data(experiment)
    if evaluation is None:  # a training batch gives the inputs' shapes instead
        training = build.build_training_data(experiment)
        seen = input_pipelines.starting_at(training, 0).take(1)
    return _restore(build, engine, experiment, workdir, seen, evaluation)


def restore_without_data(experiment: Experiment, workdir: str) -> RestoredRun:
    """Restores a run on a machine that may not have the data; a batch of zeros builds its model.

    Raises:
        UserError: the run has no complete checkpoint.
    """
    build, engine, experiment = _prepare_engine(experiment)
    import keras
    import tensorflow as tf

    from tftpu import input_pipelines

    with own_code.failures_of_class(experiment.data, "batch_spec"):
        spec = input_pipelines.batch_spec(
            experiment.prepared_data, experiment.data.global_batch_size
        )
    zeros = keras.tree.map_structure(lambda item: tf.zeros(item.shape, item.dtype), spec)
    return _restore(build, engine, experiment, workdir, tf.data.Dataset.from_tensors(zeros), None)


def restore_for_records(
    experiment: Experiment,
    workdir: str,
    read: "Callable[[], tuple[_T, Any]]",
    change: "Callable[[keras.Model], keras.Model]" = lambda model: model,
) -> "tuple[RestoredRun, _T]":
    """Restores a run to predict records that this machine reads.

    Args:
        experiment: the experiment of the run.
        workdir: folder of the run.
        read: a function that returns records, and a data set with a batch of their features. It is
            called after TensorFlow is imported.
        change: see `launch.run.experiment.build_trainer`.

    Raises:
        UserError: the run has no complete checkpoint.
    """
    build, engine, experiment = _prepare_engine(experiment)
    records, seen = read()
    return _restore(build, engine, experiment, workdir, seen, None, change), records


def read_class_names(experiment: Experiment) -> list[str] | None:
    """Returns the class names by class id, or None; warns if the data needed are missing."""
    from tftpu import input_pipelines

    try:
        with own_code.failures_of_class(experiment.data, "class_names"):
            return input_pipelines.class_names(experiment.data)
    except UserError as error:
        print(f"tftpu: warning: there are no class names here: {error}", file=sys.stderr)
        return None


def _prepare_engine(experiment: Experiment) -> tuple[Any, "Engine", Experiment]:
    """Returns the module `run.experiment`, the engine, and an experiment of arbitrary length."""
    selection.choose_backend(experiment.cluster)
    import_tensorflow()
    import tftpu
    from tftpu.launch.run import experiment as build

    engine = build.connect(experiment)
    tftpu.set_precision(experiment.train.precision)
    return build, engine, set_placeholder_length(experiment)


def set_placeholder_length(experiment: Experiment) -> Experiment:
    """Returns the experiment with an arbitrary length, so the data need not be opened for it."""
    train = dataclasses.replace(experiment.train, steps=_LENGTH, epochs=None)
    return dataclasses.replace(experiment, train=train)


def _restore(
    build: Any,
    engine: "Engine",
    experiment: Experiment,
    workdir: str,
    seen: Any,
    evaluation: Any,
    change: "Callable[[keras.Model], keras.Model]" = lambda model: model,
) -> RestoredRun:
    with engine.scope():
        begin = build.load_base(experiment)
        trainer = build.build_trainer(experiment, workdir, lambda model: change(begin(model)))
    found = trainer.restore_for_evaluation(seen)
    if found is None:
        raise UserError(
            f"The run in {workdir!r} has no complete checkpoint: `tftpu status {workdir}` shows "
            "its state, and the command that started it resumes it."
        )
    _report_best(found.step, workdir)
    return RestoredRun(trainer, found.step, evaluation)


def _report_best(step: int, workdir: str) -> None:
    """Prints to stderr why the checkpoint that is used is not the newest one."""
    best = result.read_best(workdir)
    newest = max(manifest.list_steps(files.join(workdir, "checkpoints")), default=step)
    if best is not None and best.step == step < newest:
        print(
            f"Step {step:,} of {newest:,} is the best by {best.metric} (train.best_metric), so it "
            "is used.",
            file=sys.stderr,
        )


def _check_transform_graph(experiment: Experiment, how: str = "with --config=FILE.py") -> None:
    """Checks that the experiment of a config.json names no transform graph.

    A graph is a program that can read and write files, and anybody may have changed its path. If
    the user names the config file, callers skip this check. `how` is as for `read_recorded`.

    Raises:
        UserError: the experiment names a transform graph.
    """
    data = experiment.data
    if isinstance(data, examples.Examples) and data.transform_graph:
        raise UserError(
            f"config.json names the transform graph {data.transform_graph!r}, a program that the "
            f"command would run. If you trust it, give the path of the run's config file {how}."
        )


def read_recorded(
    workdir: str, config: str | None = None, how: str = "with --config=FILE.py"
) -> Experiment:
    """Returns the experiment of a run's config.json, after importing the user's code.

    Args:
        workdir: folder of the run.
        config: the config file that the user names; None uses the file that config.json names, if
            the user has named it in an earlier command.
        how: text for the error: how to name the file on the command line.

    Raises:
        UserError: config.json cannot be read, or its code is not found.
    """
    text = files.read(files.join(workdir, "config.json"))
    try:
        recorded = json.loads(text).get("config_file", "")
    except (ValueError, AttributeError, RecursionError) as error:
        raise UserError(f"config.json in {workdir!r} cannot be read: {error}.") from error
    recorded = recorded if isinstance(recorded, str) else ""
    known = recorded.endswith(".py") and own_code.has_been_named(recorded)
    own: set[str] = set()
    imported: set[str] = set()
    written: set[str] = set()
    if config or (known and Path(recorded).is_file()):
        file = config or recorded
        code = own_code.find_code(file)
        if code is None:
            raise UserError(f"--config={config} must be a file, such as path/to/{config}.py.")
        with own_code.failures_of(f"The config {file!r}", code.folder):
            own_code.import_config(code)
        own, imported, written = own_code.list_modules(code)
    try:
        return from_json(text, own, imported, written)
    except UserError as error:
        if not recorded or config:
            raise
        raise UserError(
            f"{error} The run in {workdir!r} was made with the config {recorded}, which is code. "
            f"If you trust it, give the path of that file on this machine {how}."
        ) from error
