"""`run_fn`, which TFX's Trainer component calls."""

import dataclasses
import difflib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from tftpu.config import Experiment
from tftpu.engines import selection
from tftpu.errors import UserError, did_you_mean
from tftpu.launch import startup
from tftpu.launch.settings import config_flags, own_code
from tftpu.launch.tfx.examples import Examples
from tftpu.storage import locks

_OURS = ("config", "overrides")  # keys of custom_config that run_fn reads
_LENGTHS = ("train.steps", "train.epochs")
# Fields of `Examples` that the pipeline sets.
_SET = ("train_files", "eval_files", "eval_steps", "schema", "transform_graph")


class FnArgs(Protocol):
    """The attributes of TFX's `FnArgs` that `run_fn` reads."""

    train_files: Sequence[str]
    eval_files: Sequence[str]
    train_steps: int | None
    eval_steps: int | None
    schema_path: str | None
    transform_graph_path: str | None
    data_accessor: Any
    serving_model_dir: str
    model_run_dir: str
    base_model: str | None
    hyperparameters: Mapping[str, Any] | None
    custom_config: Mapping[str, Any] | None


def run_fn(fn_args: FnArgs, get_config: Callable[[], Experiment] | None = None) -> None:
    """Trains a config on the examples of a pipeline, and writes the model for serving.

    Args:
        fn_args: the arguments of TFX's Trainer. `custom_config["config"]` names a config of tftpu
            or the file of your own; `custom_config["overrides"]` sets its fields by their paths,
            such as `{"model.width": 64}`, and so do the hyperparameters of TFX's Tuner.
        get_config: a function that returns the config; None: `custom_config` names it.

    Raises:
        UserError: the config, the examples or an argument cannot be used.
        Preempted: the run was asked to stop, and has saved a checkpoint.
    """
    experiment = _build_experiment(fn_args, get_config)
    _set_inputs(experiment, fn_args)
    own_code.validate(experiment)
    startup.import_tensorflow()
    if selection.choose_engine(experiment.cluster) == "jax":
        reason = selection.find_reason_for_jax(experiment.cluster) or "the config asks for it"
        raise UserError(
            f"The run would use the JAX engine ({reason}), but run_fn trains on the TensorFlow "
            "engine, because it writes a SavedModel in the same process. Set cluster.engine to "
            "tensorflow, and set neither a mesh nor KERAS_BACKEND."
        )
    selection.choose_backend(experiment.cluster)
    if selection.find_task(experiment.cluster).count > 1:
        raise UserError(
            "run_fn trains on one host, but TF_CONFIG names several: give the Trainer component "
            "one machine."
        )
    from tftpu.launch.run import training
    from tftpu.launch.tfx import base, export

    begin = base.choose_initializer(fn_args.base_model)
    with locks.locked(fn_args.model_run_dir):
        training.train(experiment, fn_args.model_run_dir, begin)
        export.write(experiment, fn_args.model_run_dir, fn_args.serving_model_dir)


def _build_experiment(fn_args: FnArgs, get_config: Callable[[], Experiment] | None) -> Experiment:
    """Returns the config with the values that the pipeline sets in it."""
    given = fn_args.custom_config or {}
    for key in given:  # unknown keys may be for the program that runs the component
        if key not in _OURS and difflib.get_close_matches(key, _OURS):
            raise UserError(f"custom_config has {key!r}.{did_you_mean(key, _OURS)}")
    if (get_config is None) == ("config" not in given):
        both = "both a config in custom_config and a get_config" if get_config else "no config"
        raise UserError(
            f"run_fn got {both}. Write Trainer(run_fn='tftpu.launch.tfx.run_fn', "
            "custom_config={'config': 'FILE.py'}), or define run_fn(fn_args) in the module file, "
            "which calls tftpu.launch.tfx.run_fn(fn_args, get_config)."
        )
    if get_config is None:
        experiment = config_flags.load(given["config"], [])
    else:
        experiment = config_flags.describe_experiment(get_config(), "the module file")
    overrides = given.get("overrides") or {}
    if not isinstance(overrides, Mapping):
        raise UserError(
            f"custom_config['overrides'] is {overrides!r}: give a dictionary of fields by their "
            "paths, such as {'model.width': 64}."
        )
    _apply_overrides(experiment, overrides, "custom_config['overrides']", fn_args)
    _apply_overrides(
        experiment, _read_tuned(fn_args.hyperparameters), "The hyperparameters", fn_args
    )
    return experiment


def _read_tuned(hyperparameters: Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns the values of a `keras_tuner.HyperParameters` config, by hyperparameter name.

    Raises:
        UserError: they have another form.
    """
    if not hyperparameters:
        return {}
    values = hyperparameters.get("values") if isinstance(hyperparameters, Mapping) else None
    if not isinstance(values, Mapping):
        raise UserError(
            f"The hyperparameters are {hyperparameters!r}, without the dictionary 'values' that "
            "TFX's Tuner writes. To give your own hyperparameters, use "
            "custom_config['overrides']."
        )
    # A tuner writes "tuner/epochs" and the like for its own search.
    return {name: value for name, value in values.items() if not name.startswith("tuner/")}


def _apply_overrides(
    experiment: Experiment, values: Mapping[str, Any], source: str, fn_args: FnArgs
) -> None:
    for path, value in values.items():
        if path in _LENGTHS and fn_args.train_steps:
            raise UserError(
                f"{source} sets {path}, and train_args sets num_steps={fn_args.train_steps}: leave "
                "one of them out."
            )
        if path.removeprefix("data.") in _SET and path.startswith("data."):
            raise UserError(f"{source} sets {path}, but the pipeline sets it: leave it out.")
        try:
            config_flags.apply_override(experiment, f"--config.{path}={value}")
        except UserError as error:
            raise UserError(f"{source}: {error}") from error


def _set_inputs(experiment: Experiment, fn_args: FnArgs) -> None:
    """Sets the fields of a config that the pipeline's artifacts decide."""
    data = experiment.data
    if not isinstance(data, Examples):
        raise UserError(
            f"The config has data={type(data).__name__}(…), but run_fn reads the examples of the "
            'pipeline: give data=tftpu.launch.tfx.Examples(label="…").'
        )
    for name in _SET:
        if getattr(data, name):
            raise UserError(
                f"The config sets Examples.{name}, but the pipeline sets it: leave it out."
            )
    if getattr(fn_args.data_accessor, "data_view_decode_fn", None) is not None:
        raise UserError(
            "The examples need a DataView to decode them, but run_fn reads only tf.Examples: let "
            "ExampleGen write those."
        )
    if not data.transformed and not fn_args.transform_graph_path:
        raise UserError(
            "Examples(transformed=False) needs a transform graph, but the pipeline has "
            'none: give Trainer(transform_graph=transform.outputs["transform_graph"]), or leave '
            "transformed out."
        )
    experiment.data = dataclasses.replace(
        data,
        train_files=tuple(fn_args.train_files),
        eval_files=tuple(fn_args.eval_files),
        eval_steps=fn_args.eval_steps,
        schema=fn_args.schema_path or "",
        transform_graph=fn_args.transform_graph_path or "",
    )
    if fn_args.train_steps:
        experiment.train.steps, experiment.train.epochs = fn_args.train_steps, None
