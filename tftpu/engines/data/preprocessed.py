"""Texts, images and other data that a model's own preprocessor turns into batches.

Keras's models take arrays of numbers. KerasHub's tasks have a `preprocessor`, which their own `fit`
maps over the data.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tftpu.engines import keras_internals
from tftpu.engines.data.streams import ReadOnce, SlicedArrays, Stream, is_stream, read_once
from tftpu.errors import UserError
from tftpu.tensors import Nest

# Maps x, y and sample_weight of examples, of which the last two may be None, to a batch.
Preprocess = Callable[[Any, Any, Any], Nest]


def find_preprocess(model: keras.Model) -> Preprocess | None:
    """Returns the function that a model's own `fit` maps over its data, or None.

    Such a model has KerasHub's interface: its own `fit`, a `preprocessor` that is not None, and
    `preprocess_samples(x, y, sample_weight)`.
    """
    preprocess = getattr(model, "preprocess_samples", None)
    is_used = getattr(model, "preprocessor", None) is not None
    if preprocess is None or not is_used or not keras_internals.overrides(model, "fit"):
        return None

    def explained(x: Any, y: Any, sample_weight: Any) -> Nest:
        try:
            return preprocess(*map(_to_lists, (x, y, sample_weight)))
        except Exception as error:  # the user's data may be anything
            raise UserError(
                f"The preprocessor of {type(model).__name__}, which is mapped over the data as in "
                f"its own fit, fails: {_summarize(error)} Pass the data in its form; or, if "
                "they are preprocessed already, set model.preprocessor = None."
            ) from error

    return explained


def slice_arrays(
    preprocess: Preprocess,
    parts: tuple[Nest, ...],
    batch_size: int,
    shuffle: bool = False,
    seed: int = 0,
) -> SlicedArrays:
    """Returns texts and arrays that are preprocessed when they are read, batch by batch.

    Args:
        preprocess: the function that converts examples to a batch.
        parts: `(x,)`, `(x, y)` or `(x, y, sample_weight)`, as `to_arrays` returns them.
        batch_size, shuffle, seed: as for `SlicedArrays`.

    Raises:
        UserError: the arrays hold different numbers of examples, or none.
    """
    if not len(keras.tree.flatten(parts)[0]):
        raise UserError("The arrays hold no examples.")

    def take(numbers: np.ndarray) -> Nest:
        batch = keras.tree.map_structure(lambda part: part[numbers], parts)
        return preprocess(*keras.utils.unpack_x_y_sample_weight(batch))

    return SlicedArrays(parts, batch_size, shuffle, seed, take)


class PreprocessedBatches(Stream):
    """Batches of a data set that are preprocessed when they are read.

    Args:
        preprocess: the function that converts examples to a batch.
        source: a `tf.data.Dataset`, or another iterable of batches.
        once: the source, if it can be read only once and another pass may have read from it.

    Raises:
        UserError: the source is a pipeline of tftpu or a `keras.utils.PyDataset`.
    """

    def __init__(self, preprocess: Preprocess, source: Any, once: ReadOnce | None = None):
        if not (isinstance(source, tf.data.Dataset) or is_stream(source)):
            raise UserError(
                f"The model's preprocessor cannot be mapped over a {type(source).__name__}: pass "
                "arrays, texts, a tf.data.Dataset or a generator; or batches that are "
                "preprocessed already, with model.preprocessor = None."
            )
        once = read_once(source, once)
        super().__init__(_Mapped(preprocess, source if once is None else once), once=once)
        self._kind = type(source).__name__

    @property
    def kind(self) -> str:
        """The class name of the source, for messages."""
        return self._kind


class _Mapped:
    def __init__(self, preprocess: Preprocess, source: Iterable[Any]):
        self._preprocess, self._source = preprocess, source

    def __iter__(self) -> Iterator[Nest]:
        for batch in self._source:
            yield self._preprocess(*keras.utils.unpack_x_y_sample_weight(batch))


def to_arrays(part: Nest) -> Nest:
    """Returns texts and arrays as NumPy arrays; a list is one array, as for KerasHub."""
    if isinstance(part, tuple):
        return tuple(map(to_arrays, part))
    if isinstance(part, dict):
        return {key: to_arrays(value) for key, value in part.items()}
    array = np.asarray(part)
    if array.ndim == 0:
        raise UserError(f"The data is {array.item()!r}: pass a list of examples, [...].")
    return array


def _to_lists(part: Nest) -> Nest:
    """Returns texts as lists of `str`, which preprocessors take, and other arrays as they are."""
    if isinstance(part, tuple):
        return tuple(map(_to_lists, part))
    if isinstance(part, dict):
        return {key: _to_lists(value) for key, value in part.items()}
    if isinstance(part, tf.Tensor) and part.dtype == tf.string:
        part = part.numpy()
    if not isinstance(part, np.ndarray) or part.dtype.kind not in "OSU":
        return part
    return np.vectorize(_decode, otypes=[object])(part).tolist() if part.size else part.tolist()


def _decode(text: Any) -> Any:
    return text.decode(errors="replace") if isinstance(text, bytes) else text


def _summarize(error: Exception) -> str:
    """Returns the first line of a Keras layer's error message, without its colour codes."""
    text = str(error).replace("\x1b[1m", "").replace("\x1b[0m", "")
    said = [line for line in text.splitlines() if line.strip()]
    said = [line for line in said if not line.startswith("Exception encountered")]
    first = said[0].strip()[:300] if said else repr(error)
    return first if first.endswith((".", "!", "?")) else f"{first}."
