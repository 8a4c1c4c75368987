"""Checks the arguments of `tftpu.preflight.check`, before the check takes minutes."""

import inspect
import math
from collections.abc import Iterable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tftpu.config import PRECISIONS, TrainConfig
from tftpu.engines import checks
from tftpu.errors import UserError, did_you_mean
from tftpu.preflight.options import PreflightOptions
from tftpu.tensors import Nest
from tftpu.tpu.slices import GENERATIONS, Slice, parse_slice

_BATCH = (
    "give the number of examples of the global batch, such as 1024; or (x, y) or (x, y, "
    "sample_weight), of arrays or tf.TensorSpecs"
)


def parse_slices(names: Iterable[str]) -> list[Slice]:
    """Returns the slices with the given names, each once.

    Raises:
        UserError: `names` is not a list of names, is empty, or names a slice that does not exist.
    """
    given: list[Any] = [None]
    if isinstance(names, Iterable) and not isinstance(names, str):
        given = list(names)
    if not all(isinstance(name, str) for name in given):
        raise UserError(f"slices={names!r}: give a list of names, such as ['v3-8', 'v5e-8'].")
    found = {target.name: target for target in map(parse_slice, given)}
    if not found:
        raise UserError("No slice was given: name at least one, such as v3-8 or v5e-8.")
    return list(found.values())


def refuse_model_fn(model_fn: Any) -> None:
    """Raises `UserError` unless the argument is a function that builds a model."""
    kind = f"a {type(model_fn).__name__}"
    if isinstance(model_fn, type):
        kind = f"the class {model_fn.__name__}"
    elif callable(model_fn):
        _refuse_parameters(model_fn)
        return
    raise UserError(
        f"The model is {kind}: give a compiled keras.Model, or a function that builds, compiles "
        "and returns one. It is called for each number of devices and each batch size."
    )


def _refuse_parameters(model_fn: Any) -> None:
    """Raises `UserError` if a function cannot be called without arguments."""
    try:
        signature = inspect.signature(model_fn)
    except ValueError:  # some functions written in C have no signature
        return
    try:
        signature.bind()
    except TypeError:
        raise UserError(
            f"The function that builds the model takes {signature}, but is called without "
            "arguments: give `lambda: build(...)`."
        ) from None


def refuse_batch_argument(batch: Any) -> None:
    """Raises `UserError` unless the argument is a number of examples, arrays or specs."""
    number = isinstance(batch, int | np.integer) and not isinstance(batch, bool)
    if isinstance(batch, tf.data.Dataset):
        raise UserError(
            "The batch is a tf.data.Dataset: give one batch of it, next(iter(dataset)), or its "
            "element_spec if that is of static shape."
        )
    leaves = [] if number else keras.tree.flatten(batch)
    if not leaves and not (number and batch >= 1):
        raise UserError(f"batch={batch!r}: {_BATCH}.")
    for leaf in leaves:
        if not hasattr(leaf, "shape"):  # arrays and `tf.TensorSpec`s have one
            given = f"batch={batch!r}" if len(repr(batch)) < 40 else f"The batch has {leaf!r} in it"
            raise UserError(f"{given}: {_BATCH}. np.asarray makes arrays of lists.")
        if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "OSU":
            raise UserError(
                f"The batch has an array of {leaf.dtype} objects or texts, which no TPU takes: "
                "give numbers."
            )


def refuse_model(model: Any) -> None:
    """Raises `UserError` unless the value that a function returned is a Keras model."""
    if not isinstance(model, keras.Model):
        raise UserError(
            f"model_fn returned {'None' if model is None else f'a {type(model).__name__}'}: it "
            "must return the compiled keras.Model."
        )


def refuse_batch(batch_spec: Nest, options: PreflightOptions) -> None:
    """Raises `UserError` unless specs describe a batch with a known number of examples.

    Args:
        batch_spec: `tf.TensorSpec`s of the global batch.
        options: the options; without objectives, the batch must be (x, y[, sample_weight]).
    """
    specs = keras.tree.flatten(batch_spec)
    for spec in specs:
        checks.refuse_spec(spec)
        if not spec.shape.rank:
            raise UserError(
                "A spec of the batch has no dimension, but the first dimension must count the "
                "examples."
            )
    pair = isinstance(batch_spec, tuple | list) and len(batch_spec) in (2, 3)
    if not specs or (options.objectives is None and not pair):
        raise UserError(
            "Give the batch as (x, y) or (x, y, sample_weight), where each is a tf.TensorSpec or "
            "a nest of them, as the model takes it."
        )
    sizes = sorted({spec.shape[0] for spec in specs})
    if len(sizes) > 1 or sizes[0] < 1:
        raise UserError(
            f"The specs of the batch have {' and '.join(map(str, sizes))} examples: all must have "
            "the same number of examples, the size of the global batch."
        )


def refuse_options(options: PreflightOptions) -> None:
    """Raises `UserError` for invalid options."""
    if not isinstance(options, PreflightOptions):
        train = "train=..." if isinstance(options, TrainConfig) else "..."
        raise UserError(
            f"options is a {type(options).__name__}: give "
            f"tftpu.preflight.PreflightOptions({train})."
        )
    if options.precision not in (None, *PRECISIONS):
        raise UserError(
            f"There is no precision {options.precision!r}."
            f"{did_you_mean(str(options.precision), PRECISIONS)}"
        )
    if not isinstance(options.train, TrainConfig):
        raise UserError(f"train is {options.train!r}: give tftpu.TrainConfig.")
    options.train.validate()
    for name in ("steps", "examples_per_epoch", "batch_unit"):
        value = getattr(options, name)
        if value is not None and (type(value) is not int or value < 1):
            raise UserError(f"{name} is {value!r}: give a whole number of 1 or more, or None.")
    if not _is_number(options.time_limit) or options.time_limit <= 0:
        raise UserError(f"time_limit is {options.time_limit!r}: give seconds, more than 0.")
    if not isinstance(options.prices, dict):
        raise UserError(f"prices is {options.prices!r}: give dollars, such as {{'v5e': 1.10}}.")
    for generation, dollars in options.prices.items():
        if generation not in GENERATIONS:
            raise UserError(
                f"prices: there is no generation {generation!r}."
                f"{did_you_mean(str(generation), GENERATIONS)}"
            )
        if not _is_number(dollars) or dollars < 0:
            raise UserError(f"prices[{generation!r}] is {dollars!r}: give dollars per chip-hour.")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and type(value) is not bool and math.isfinite(value)
