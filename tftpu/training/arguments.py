"""Checks the arguments of a trainer and of its methods, which have Keras's meanings."""

import dataclasses
import functools
import inspect
import math
import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import keras
import numpy as np

from tftpu.config import TrainConfig
from tftpu.engines.own_steps import count_execution_steps
from tftpu.errors import UserError
from tftpu.storage.files import StrPath, check_folder
from tftpu.training.batch_methods import watches_batches

LOOP_STEPS = 50  # steps of a device loop, if no argument sets them

P = ParamSpec("P")
R = TypeVar("R")

CallbackArgument = keras.callbacks.Callback | Sequence[keras.callbacks.Callback] | None


_OF_PY_DATASET = "pass it to the keras.utils.PyDataset, PyDataset(...)"
# Arguments of Keras's methods that tftpu's methods do not have, and what to use instead.
_INSTEAD = {
    "nb_epoch": "write epochs=",
    "workers": _OF_PY_DATASET,
    "use_multiprocessing": _OF_PY_DATASET,
    "max_queue_size": _OF_PY_DATASET,
}


def check_keras_arguments(method: Callable[P, R]) -> Callable[P, R]:
    """Decorates a method so that older Keras arguments raise `UserError` with a replacement."""

    @functools.wraps(method)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        known = inspect.signature(method).parameters
        for name in kwargs:
            if name in _INSTEAD and name not in known:
                raise UserError(f"{method.__name__} has no {name}: {_INSTEAD[name]}.")
        return method(*args, **kwargs)

    return checked


def validate_options(options: TrainConfig | None) -> TrainConfig:
    """Returns a validated copy of a trainer's options; None gives the defaults.

    Raises:
        UserError: the options are not a `TrainConfig`, or a value is not allowed.
    """
    if not isinstance(options, TrainConfig | None):
        raise UserError(
            f"options is {type(options).__name__} {options!r}: pass "
            "tftpu.TrainConfig(steps_per_loop=…)."
        )
    options = TrainConfig() if options is None else dataclasses.replace(options)
    options.validate()
    return options


def check_length(options: TrainConfig, epochs: int | None, steps: int | None) -> None:
    """Raises `UserError` if a run's length is set in the options, but not in the call of `fit`."""
    given = {"epochs": options.epochs, "steps": options.steps}
    if epochs is None and steps is None and given != {"epochs": None, "steps": TrainConfig().steps}:
        shown = ", ".join(f"{name}={value}" for name, value in given.items() if value is not None)
        raise UserError(
            f"The options say {shown}, but a Trainer takes the length of a run from fit() only: "
            f"pass fit(…, {shown})."
        )


def choose_loop_length(
    options: TrainConfig, model: Any, callbacks: Sequence[keras.callbacks.Callback]
) -> int:
    """Returns the number of steps of a device loop.

    It is the model's `steps_per_execution` or the options' `steps_per_loop`, whichever is set;
    otherwise it is 1 if a callback has batch methods, and `LOOP_STEPS` if none has.

    Raises:
        UserError: the options and the model set different numbers.
    """
    execution, loop = count_execution_steps(model), options.steps_per_loop
    if execution > 1 and loop not in (None, execution):
        raise UserError(
            f"The model was compiled with steps_per_execution={execution}, but the options have "
            f"steps_per_loop={loop}, which means the same: leave one of them out."
        )
    if execution > 1 or (loop is None and watches_batches(callbacks, "train")):
        return execution
    return loop or LOOP_STEPS


def validate_workdir(workdir: StrPath | None) -> str | None:
    """Returns a workdir as a string, or None; raises `UserError` if it cannot name a folder."""
    if workdir is None:
        return None
    if not isinstance(workdir, str | os.PathLike):  # such as an engine in the place of the workdir
        raise UserError(
            f"The workdir is a {type(workdir).__name__}: give the path of a folder, or name the "
            "argument that you mean, as in Trainer(model, engine=engine)."
        )
    check_folder("workdir", str(workdir))
    return str(workdir)


def list_callbacks(callbacks: Any) -> list[keras.callbacks.Callback]:
    """Returns callbacks as a list, without `History` callbacks.

    Args:
        callbacks: one callback, several, Keras's `CallbackList`, or None.

    Raises:
        UserError: an item is not a callback.
    """
    if isinstance(callbacks, keras.callbacks.CallbackList):
        callbacks = callbacks.callbacks
    if callbacks is None:
        return []
    listed = [callbacks] if not isinstance(callbacks, list | tuple) else list(callbacks)
    for callback in listed:
        if not isinstance(callback, keras.callbacks.Callback):
            what = "a class" if isinstance(callback, type) else f"a {type(callback).__name__}"
            raise UserError(
                f"callbacks holds {what}: pass keras.callbacks.Callback objects, such as "
                "[keras.callbacks.EarlyStopping(patience=3)]."
            )
    # Keras adds a new `History` to the callbacks of each run.
    return [callback for callback in listed if type(callback) is not keras.callbacks.History]


def check_labels_and_weights(y: Any, sample_weight: Any, class_weight: Any, own_loss: bool) -> None:
    """Raises `UserError` for a number instead of labels, and for weights that are not allowed.

    Args:
        y, sample_weight, class_weight: the arguments of `fit`.
        own_loss: whether a `loss_fn` computes the loss, to which tftpu cannot apply weights.
    """
    if isinstance(y, int | float):
        raise UserError(
            f"The length of a run must be a keyword argument: write fit(data, steps={y})."
        )
    if sample_weight is not None and class_weight is not None:
        raise UserError(
            "sample_weight and class_weight exclude each other: pass their product as "
            "sample_weight."
        )
    if sample_weight is not None and own_loss:
        warnings.warn(
            "sample_weight is passed to the loss function as batch[2]. The loss function must "
            "apply it itself.",
            stacklevel=4,
        )
    if class_weight is None:
        return
    if own_loss:
        raise UserError(
            "class_weight works only with a compiled loss. A loss function must weight its "
            "examples itself, as in loss * weights_of(labels)."
        )
    if not isinstance(class_weight, dict):
        raise UserError(
            f"class_weight is {class_weight!r}: it must be a dict, such as {{0: 1.0, 1: 5.0}}."
        )
    for label, weight in class_weight.items():
        is_number = isinstance(label, int | float | np.number)
        if not is_number or not 0 <= label < math.inf or np.floor(label) != label:
            raise UserError(
                f"class_weight has the label {label!r}: labels must be whole numbers of 0 or more."
            )
        if not isinstance(weight, int | float | np.number) or not 0 <= weight < math.inf:
            raise UserError(
                f"class_weight has the weight {weight!r} for the label {label}: it must be a "
                "finite number, 0 or more."
            )


def parse_verbosity(verbose: Any) -> int:
    """Returns Keras's `verbose` as 0, 1 or 2; "auto" is 1.

    Raises:
        UserError: the value is not one that Keras allows.
    """
    if verbose not in ("auto", 0, 1, 2):  # False equals 0, and True equals 1
        raise UserError(f"verbose is {verbose!r}: it must be 'auto', 0, 1 or 2.")
    return 1 if verbose == "auto" else int(verbose)


def check_whole_number(name: str, value: Any, least: int) -> None:
    """Raises `UserError` unless a value is None or a whole number, `least` or more."""
    if value is None:
        return
    if isinstance(value, bool) or not hasattr(value, "__index__") or value < least:
        raise UserError(
            f"{name} is {value!r}: it must be a whole number, {least} or more, or None."
        )
