"""Converts the data of `fit`, `evaluate` and `predict` from Keras's forms to those of an engine."""

import math
from typing import Any

import keras

from tftpu.engines import keras_internals
from tftpu.engines.data.arrays import as_arrays
from tftpu.engines.data.preprocessed import (
    Preprocess,
    PreprocessedBatches,
    slice_arrays,
    to_arrays,
)
from tftpu.engines.data.py_dataset import PyBatches
from tftpu.engines.data.streams import (
    ReadOnce,
    SlicedArrays,
    Stream,
    has_unknown_length,
    is_stream,
)
from tftpu.engines.engine import Dataset
from tftpu.errors import UserError
from tftpu.tensors import Nest
from tftpu.training.arguments import check_whole_number

BATCH_SIZE = 32  # Keras's own default


def prepare_training_data(
    x: Any,
    y: Any,
    sample_weight: Any,
    *,
    batch_size: int | None,
    steps_per_epoch: int | None,
    shuffle: bool,
    seed: int,
    preprocess: Preprocess | None = None,
    once: ReadOnce | None = None,
) -> Dataset:
    """Returns the data to train on, in the form that an engine takes.

    Args:
        x, y, sample_weight, batch_size, steps_per_epoch, shuffle: as for `fit`.
        seed: the seed of the shuffled order.
        preprocess: see `preprocessed.find_preprocess`.
        once: `x`, if it can be read only once and an earlier call of `fit` may have read from it.

    Raises:
        UserError: the data are neither arrays nor a data set, or other arguments do not fit them.
    """
    if shuffle not in (True, False):
        raise UserError(f"shuffle is {shuffle!r}: it must be True or False.")
    if preprocess is not None:
        return _preprocess_data(
            *(preprocess, (x, y, sample_weight), batch_size, steps_per_epoch, "fit"),
            shuffle=shuffle,
            seed=seed,
            once=once,
        )
    if _has_sparse((x, y, sample_weight)):
        if batch_size is None and steps_per_epoch is not None:
            batch_size = math.ceil(_count_sparse(x) / steps_per_epoch)
        return _slice_sparse(x, y, sample_weight, batch_size, shuffle, seed)
    if not _is_arrays(x):
        _check_dataset(x, y, sample_weight, batch_size, "fit")
        if isinstance(x, keras.utils.PyDataset):
            return PyBatches(x, shuffle, seed)
        if is_stream(x) or (steps_per_epoch is not None and has_unknown_length(x)):
            return Stream(x if once is None else once)
        return x
    if y is None and sample_weight is None and _is_like_pair(x):
        raise UserError(
            "The arrays were passed as one tuple. Write fit(x, y, ...), with features and labels "
            "as two arguments, and several features as a list."
        )
    if batch_size is None and steps_per_epoch is not None:
        batch_size = math.ceil(_count(x) / steps_per_epoch)
    check_whole_number("batch_size", batch_size, 1)
    size = batch_size or BATCH_SIZE
    return as_arrays(x, y, sample_weight, batch_size=size, shuffle=shuffle, seed=seed)


def prepare_evaluation_data(
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    *,
    batch_size: int | None = None,
    steps: int | None = None,
    name: str = "evaluate",
    preprocess: Preprocess | None = None,
) -> Dataset:
    """Returns the data of an evaluation or a prediction as a data set of batches.

    Args:
        x, y, sample_weight, batch_size, steps: as for `evaluate`.
        name: the name of the method that was called, for messages.
        preprocess: see `preprocessed.find_preprocess`.

    Raises:
        UserError: the data are neither arrays nor a data set, or other arguments do not fit them.
    """
    check_whole_number("steps", steps, 1)
    if preprocess is not None:
        given = (x, y, sample_weight)
        dataset = _preprocess_data(preprocess, given, batch_size, steps, name)
        return dataset if steps is None else dataset.take(steps)
    if _has_sparse((x, y, sample_weight)):
        if batch_size is None and steps is not None:  # all examples in `steps` batches, as in Keras
            batch_size, steps = math.ceil(_count_sparse(x) / steps), None
        dataset = _slice_sparse(x, y, sample_weight, batch_size)
    elif _is_arrays(x):
        check_whole_number("batch_size", batch_size, 1)
        if batch_size is None and steps is not None:  # all examples in `steps` batches, as in Keras
            batch_size, steps = math.ceil(_count(x) / steps), None
        dataset = as_arrays(x, y, sample_weight, batch_size=batch_size or BATCH_SIZE)
    else:
        _check_dataset(x, y, sample_weight, batch_size, name)
        dataset = x
        if isinstance(x, keras.utils.PyDataset):
            dataset = PyBatches(x)
        elif is_stream(x):
            dataset = Stream(x)
    if steps is None:
        return dataset
    if not hasattr(dataset, "take"):
        raise UserError(f"steps= cannot be used with a {type(x).__name__}: leave it out.")
    return dataset.take(steps)


def prepare_validation_data(
    given: Any,
    *,
    batch_size: int | None,
    steps: int | None,
    repeats: bool,
    preprocess: Preprocess | None = None,
) -> Dataset:
    """Returns the data of `validation_data=` as a data set of batches; None for None.

    Args:
        given: `(x, y)`, `(x, y, sample_weight)`, or a data set.
        batch_size: the batch size, for arrays.
        steps: the number of batches; None: all.
        repeats: whether the data are evaluated more than once.
        preprocess: see `preprocessed.find_preprocess`.

    Raises:
        UserError: the data cannot be used, or can be read only once although `repeats` is True.
    """
    if given is None:
        if steps is not None:
            raise UserError("validation_steps needs validation_data=.")
        return None
    if preprocess is not None and isinstance(given, list | tuple) and isinstance(given[0], str):
        given = (given,)  # texts, from which the preprocessor makes the labels, too
    if isinstance(given, list | tuple):
        if len(given) not in ((2, 3) if preprocess is None else (1, 2, 3)):
            raise UserError(
                f"validation_data has {len(given)} parts: pass (x, y) or "
                "(x, y, sample_weight), or a data set."
            )
        return prepare_evaluation_data(
            *given, batch_size=batch_size, steps=steps, preprocess=preprocess
        )
    if _is_arrays(given):
        raise UserError(
            "validation_data holds features without labels: pass (x, y) or (x, y, sample_weight)."
        )
    dataset = prepare_evaluation_data(given, steps=steps, preprocess=preprocess)
    if repeats and steps is None and isinstance(dataset, Stream) and not dataset.again:
        raise UserError(
            f"validation_data is a {dataset.kind}, which can be read only once, but every epoch "
            "is evaluated: pass arrays, a keras.utils.PyDataset or a tf.data.Dataset; or a "
            "generator that never ends, with validation_steps=."
        )
    return dataset


def split_arrays(
    x: Any, y: Any, sample_weight: Any, fraction: float, preprocess: Preprocess | None = None
) -> tuple[tuple, tuple]:
    """Splits arrays; returns `(x, y, sample_weight)` to train on, and the rest to validate on.

    Args:
        x, y, sample_weight: as for `fit`.
        fraction: the share of the examples, taken from their end, to validate on.
        preprocess: see `preprocessed.find_preprocess`.

    Raises:
        UserError: the data are not arrays, or one of the two results would have no examples.
    """
    if not 0 < fraction < 1:
        raise UserError(f"validation_split is {fraction}: it must be between 0 and 1.")
    if not _is_arrays(x):
        raise UserError(
            f"validation_split works only with arrays, but the data is a {type(x).__name__}: pass "
            "validation_data=, such as dataset.take(n), and train on dataset.skip(n)."
        )
    given = (x, y, sample_weight)
    if preprocess is None:
        count = as_arrays(*given, batch_size=1).count
    else:
        given = tuple(None if part is None else to_arrays(part) for part in given)
        count = len(keras.tree.flatten(given)[0])
    at = math.floor(count * (1.0 - fraction))
    if not 0 < at < count:
        raise UserError(
            f"validation_split={fraction} of {count} examples leaves one part empty: choose "
            "another fraction."
        )

    def slice_all(start: int, end: int) -> tuple:
        return tuple(None if p is None else _slice_part(p, start, end) for p in given)

    return slice_all(0, at), slice_all(at, count)


def _preprocess_data(
    preprocess: Preprocess,
    given: tuple[Any, Any, Any],
    batch_size: int | None,
    steps: int | None,
    name: str,
    shuffle: bool = False,
    seed: int = 0,
    once: ReadOnce | None = None,
) -> Stream:
    """Returns data that a model's preprocessor turns into batches when they are read.

    Args:
        preprocess: see `preprocessed.find_preprocess`.
        given: x, y and sample_weight.
        batch_size, shuffle: as for `fit`.
        steps: the number of batches of a pass, if the batch size is not given.
        name: the name of the method that was called, for messages.
        seed: the seed of the shuffled order.
        once: as for `prepare_training_data`.
    """
    check_whole_number("batch_size", batch_size, 1)
    if _is_arrays(given[0]):
        parts = tuple(to_arrays(part) for part in given if part is not None)
        if batch_size is None and steps is not None:
            batch_size = math.ceil(len(keras.tree.flatten(parts)[0]) / steps)
        return slice_arrays(preprocess, parts, batch_size or BATCH_SIZE, shuffle, seed)
    _check_dataset(*given, batch_size, name)
    return PreprocessedBatches(preprocess, given[0], once)


def _has_sparse(parts: Any) -> bool:
    """Returns whether the data contain sparse or ragged tensors, or None for an optional input."""
    x = parts[0]
    if isinstance(x, dict | list | tuple) and any(p is None for p in keras.tree.flatten(x)):
        return True
    return any(map(keras_internals.is_sparse_or_ragged, keras.tree.flatten(parts)))


def _count_sparse(x: Any) -> int:
    return next(int(part.shape[0]) for part in keras.tree.flatten(x) if part is not None)


def _slice_sparse(
    x: Any, y: Any, sample_weight: Any, batch_size: int | None, shuffle: bool = False, seed: int = 0
) -> SlicedArrays:
    check_whole_number("batch_size", batch_size, 1)
    parts = tuple(part for part in (x, y, sample_weight) if part is not None)
    return SlicedArrays(parts, batch_size or BATCH_SIZE, shuffle, seed)


def _is_arrays(x: Any) -> bool:
    """Returns whether data are arrays or nests of arrays, and not a data set."""
    return isinstance(x, list | tuple | dict) or (hasattr(x, "shape") and hasattr(x, "__array__"))


def _is_like_pair(x: Any) -> bool:
    return isinstance(x, tuple) and len(x) in (2, 3)


def _count(x: Nest) -> int:
    return as_arrays(x, batch_size=1).count


def _slice_part(part: Nest, start: int, end: int) -> Nest:
    if isinstance(part, list | tuple):
        return [_slice_part(item, start, end) for item in part]
    if isinstance(part, dict):
        return {key: _slice_part(item, start, end) for key, item in part.items()}
    return part[start:end]  # the slice takes rows, also those of a pandas frame


def _check_dataset(x: Any, y: Any, sample_weight: Any, batch_size: Any, name: str) -> None:
    """Raises `UserError` unless x may be a data set and the other arguments are None."""
    kind = type(x).__name__
    if isinstance(x, type) or x is None or isinstance(x, str | bytes | int | float):
        raise UserError(f"The data is {x!r}: pass arrays or a data set, {name}(x, y).")
    for argument, value in (("y", y), ("sample_weight", sample_weight)):
        if value is not None:
            raise UserError(
                f"{argument} works only with arrays, but the data is a {kind}: its batches must "
                "themselves be (x, y) or (x, y, sample_weight)."
            )
    if batch_size is not None:
        raise UserError(
            f"batch_size works only with arrays, but the data is a {kind}, which is already "
            "batched: leave batch_size out."
        )
