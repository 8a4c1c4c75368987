"""Data whose batches go through the preprocessor of a KerasHub task.

Tried with KerasHub 0.32, whose preprocessors run in Python unless tensorflow-text is installed.
"""

import contextlib
import dataclasses
import functools
import random
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import tensorflow as tf

from tftpu.config import DataConfig, DataContext
from tftpu.config.data import ExportInputs
from tftpu.errors import UserError, counted
from tftpu.models.keras_hub import presets
from tftpu.tensors import Nest

if TYPE_CHECKING:
    from tftpu.models.keras_hub.config import KerasHub

_LONGEST = 8192  # tokens; the length of a text is counted at least up to this
_FEW = 64  # number of texts whose lengths are checked
_DTYPES = {"float64": "float32", "int64": "int32"}  # conversions to dtypes that devices use
_DRAWING = threading.Lock()  # held while Python's random numbers are seeded


@dataclasses.dataclass
class PreparedData(DataConfig):
    """A data set whose batches go through the preprocessor of a model.

    Args:
        source: the data set that is preprocessed.
        model: the model, whose task has the preprocessor.
    """

    source: DataConfig = dataclasses.field(kw_only=True)
    model: "KerasHub" = dataclasses.field(kw_only=True)

    def training(self, context: DataContext) -> Any:
        found = self.source.training(context)
        preparation = self._build()
        if preparation.length:
            whose = "" if self.model.sequence_length else ", the preset's"
            text = f"Texts are cut at model.sequence_length{whose}: {preparation.length:,} tokens"
            if preparation.weighs_tokens(self.source.batch_spec(1)):
                text += "; the task's own loss is a mean over them, padding included"
            print(text, flush=True)
        if hasattr(found, "starting_at"):
            if preparation.length and preparation.ends_texts:
                batch = next(found.starting_at(0).take(1).as_numpy_iterator())
                print(_describe_cut(self.model, batch, preparation.length), end="", flush=True)
            return _PreparedPipeline(found, preparation, context.seed)
        # Its batches are not numbered from the beginning of the run, so masks are drawn anew.
        return preparation.map(found, seed=None)

    def evaluation(self, context: DataContext) -> Any:
        found = self.source.evaluation(context)
        return None if found is None else self._build().map(found)

    def batch_spec(self, examples: int) -> Any:
        raw = self.source.batch_spec(examples)
        return None if raw is None else self._build().describe(raw)

    def prediction(self, address: str, context: DataContext) -> Any:
        found = self.source.prediction(address, context)
        if found is None:
            return None
        prepare = self._build().map

        def read_features(ranges: Any) -> tf.data.Dataset:
            return prepare(found.features(ranges)).map(lambda x, *labels: x)

        return dataclasses.replace(found, features=read_features)

    def export_inputs(self) -> ExportInputs | None:
        given, preprocessor = self.source.export_inputs(), presets.load_preprocessor(self.model)
        if given is None or preprocessor is None:
            return given

        def prepare(*values: Any) -> Any:
            return preprocessor(given.prepare(*values))

        return dataclasses.replace(given, prepare=prepare)

    def class_names(self) -> list[str] | None:
        return self.source.class_names()

    def _build(self) -> "_Preparation":
        found = _Preparation(presets.load_preprocessor(self.model))
        if found.length:
            presets.check_length(self.model, found.length)
        return found


def count_tokens(model: "KerasHub", raw: Nest) -> np.ndarray:
    """Returns the number of tokens of each text of a raw batch before it is cut, (texts,) int.

    Start and end tokens are counted. Counts are limited to `_LONGEST`, or to twice the model's
    sequence length if that is more. The result is empty if the preprocessor returns no padding
    mask.
    """
    longest = max(_LONGEST, 2 * model.sequence_length)
    longer = dataclasses.replace(model, sequence_length=longest)
    made = _Preparation(presets.load_preprocessor(longer)).prepare(raw)
    x = keras.utils.unpack_x_y_sample_weight(made)[0]
    mask = x.get("padding_mask") if isinstance(x, dict) else None
    return np.zeros(0, int) if mask is None else np.asarray(mask).sum(-1)


def _describe_cut(model: "KerasHub", raw: Nest, length: int) -> str:
    """Returns a warning if some of the first texts of a raw batch are cut; "" if none is."""
    counts = count_tokens(model, tf.nest.map_structure(lambda part: part[:_FEW], raw))
    cut = int((counts > length + 1).sum())  # the token after `length` is a label
    if not cut:
        return ""
    return (
        f"{cut} of the first {counted(counts.size, 'text')} are cut there, and the model learns "
        f"to end in the middle of a text. {describe_longest(model, counts.max() - 1, length)}\n"
    )


def describe_longest(model: "KerasHub", longest: int, length: int) -> str:
    """Returns advice on the sequence length for data whose longest text is cut.

    Args:
        model: the model.
        longest: the number of tokens that the model would read of the longest text without a cut.
        length: the number of tokens at which texts are cut.
    """
    limit, flag = presets.find_limit(model), "set --config.model.sequence_length="
    if limit is None or longest <= limit:
        return f"The longest needs {longest:,} tokens: {flag}{longest} or more."
    text = f"The longest needs {longest:,} tokens, and the model reads {limit:,} at most: "
    return f"{text}{f'{flag}{limit} and ' if length < limit else ''}shorten the texts."


class _PreparedPipeline:
    """A pipeline that can start at any step, whose batches are preprocessed."""

    def __init__(self, pipeline: Any, preparation: "_Preparation", seed: int):
        self._pipeline, self._preparation, self._seed = pipeline, preparation, seed
        self.global_batch_size, self.count = pipeline.global_batch_size, pipeline.count
        self.source = pipeline.source if hasattr(pipeline, "source") else pipeline

    def starting_at(self, step: int, host: int = 0, hosts: int = 1) -> tf.data.Dataset:
        """Returns the global batches from a step on, or one host's shard of each."""
        batches = self._pipeline.starting_at(step, host, hosts)
        return self._preparation.map(batches, step, f"{self._seed} {host}")

    def describe_files(self) -> dict[str, str]:
        """Returns the hashes of the pipeline's files or examples; empty if it has none."""
        known = hasattr(self._pipeline, "describe_files")
        return self._pipeline.describe_files() if known else {}


class _Preparation:
    """Converts raw batches, `x`, `(x, y)` or `(x, y, sample_weight)`, to batches for a model.

    Args:
        preprocessor: the preprocessor of a task; None leaves batches as they are.
    """

    def __init__(self, preprocessor: Any):
        self._preprocessor = preprocessor
        # Number of tokens to which texts are cut or padded; None without texts.
        self.length: int | None = getattr(preprocessor, "sequence_length", None)
        # Whether texts get an end token, also where they are cut.
        self.ends_texts: bool = getattr(preprocessor, "add_end_token", False)
        # Whether the preprocessor draws random numbers, as that of a masked language model does.
        self._draws = hasattr(preprocessor, "masker")

    def map(
        self, dataset: tf.data.Dataset, first: int = 0, seed: str | None = ""
    ) -> tf.data.Dataset:
        """Returns the batches of a data set as the preprocessor makes them.

        Args:
            dataset: the raw batches.
            first: the number of the first batch. The random numbers of a batch depend only on its
                number and `seed`, so that a resumed run and each evaluation draw the same again.
            seed: any text; None: random numbers are not seeded.
        """
        if self._preprocessor is None:
            return dataset
        raw: Any = dataset.element_spec
        specs = self.describe(raw)
        flat = tf.nest.flatten(specs)

        def prepare(number: np.ndarray, *parts: np.ndarray) -> list[np.ndarray]:
            seeds = self._draws and seed is not None
            with _seeding(f"{seed} {number}") if seeds else contextlib.nullcontext():
                found = self._compute(tf.nest.pack_sequence_as(raw, parts))
            return [np.asarray(a, s.dtype.as_numpy_dtype) for a, s in zip(found, flat)]

        def call(number: Any, batch: Any) -> Any:
            given = [number, *tf.nest.flatten(batch)]
            dtypes = [spec.dtype for spec in flat]
            found = tf.numpy_function(prepare, given, dtypes, stateful=False)
            for tensor, spec in zip(found, flat):
                tensor.set_shape(spec.shape)
            return tf.nest.pack_sequence_as(specs, found)

        numbered = tf.data.Dataset.zip(tf.data.Dataset.counter(first), dataset)
        return numbered.map(call, tf.data.AUTOTUNE, deterministic=True)

    def describe(self, raw: Any) -> Any:
        """Returns the specs of a batch, from those of a raw batch of the same size."""
        if self._preprocessor is None:
            return raw
        size = tf.nest.flatten(raw)[0].shape[0]

        def describe_part(part: Any) -> tf.TensorSpec:
            array = np.asarray(part)
            dtype = _DTYPES.get(array.dtype.name, array.dtype)
            return tf.TensorSpec((size, *array.shape[1:]), dtype)

        made = self.prepare(tf.nest.map_structure(_build_example, raw))
        specs = tf.nest.map_structure(describe_part, made)
        if isinstance(specs, tuple) and len(specs) == 3:  # a mask of Booleans becomes a weight
            specs = *specs[:2], tf.TensorSpec(specs[2].shape, tf.float32)
        return specs

    def weighs_tokens(self, raw: Any) -> bool:
        """Returns whether batches have a weight for each token, which excludes padding.

        Args:
            raw: the specs of a raw batch; None if they are not known.
        """
        specs = () if raw is None else self.describe(raw)
        return len(specs) == 3 and specs[2].shape.rank == 2

    def _compute(self, raw: Nest) -> list[np.ndarray]:
        return [np.asarray(part) for part in tf.nest.flatten(self.prepare(raw))]

    def prepare(self, raw: Nest) -> Nest:
        """Returns a batch as the preprocessor makes it.

        Raises:
            UserError: the preprocessor does not take such data.
        """
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(raw)
        x = tf.nest.map_structure(_to_texts, x)
        if isinstance(x, list) and x and isinstance(x[0], str) and self._takes_pairs:
            x = {"prompts": [""] * len(x), "responses": x}
        try:
            return self._preprocessor(x, y=y, sample_weight=sample_weight)
        except Exception as error:  # any preprocessor may raise any exception
            kind = type(self._preprocessor).__name__
            if isinstance(x, dict) and "prompts" in x and not self._takes_pairs:
                raise UserError(
                    f"The preprocessor {kind} takes texts, not prompts and responses. Join both in "
                    "one field of the data, set data.field to its name, and leave data.prompt out. "
                    "Loss and accuracy then count the prompts as well."
                ) from error
            text = str(error).replace("\x1b[1m", "").replace("\x1b[0m", "")
            raise UserError(f"The data do not fit the preprocessor {kind}: {text}") from error

    @functools.cached_property
    def _takes_pairs(self) -> bool:
        """True if the preprocessor takes prompts and responses, as Gemma 3's does."""
        try:
            self._preprocessor(["a"])
        except (TypeError, KeyError):
            return True
        return False


@contextlib.contextmanager
def _seeding(seed: str) -> Iterator[None]:
    """Seeds Python's random numbers, which KerasHub draws masks with, and then restores them."""
    with _DRAWING:
        before = random.getstate()
        random.seed(seed)
        try:
            yield
        finally:
            random.setstate(before)


def _build_example(spec: tf.TensorSpec) -> Any:
    """Returns a placeholder array for a raw batch of one example with this spec."""
    shape: Any = [1, *spec.shape[1:]]
    if spec.dtype == tf.string:
        return np.full(shape, b"a", object)
    return np.zeros(shape, spec.dtype.as_numpy_dtype)


def _to_texts(part: np.ndarray) -> Any:
    """Converts an array of texts to a list of `str` for preprocessors; returns others unchanged."""
    if part.dtype.kind not in "OS":
        return part
    return [text.decode(errors="replace") for text in part.tolist()]
