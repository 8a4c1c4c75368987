"""Converts a user's data set to batches of static shape, for any engine."""

from typing import Any, Protocol, runtime_checkable

import keras
import tensorflow as tf

from tftpu.config import PerReplicaBatch
from tftpu.engines import checks
from tftpu.engines.data.arrays import unwrap_features
from tftpu.engines.data.batches import (
    build_complete_batches,
    build_epoch_batches,
    build_finite_dataset,
    check_dataset,
    infer_batch_size,
    measure_epoch,
    narrow,
    pad,
    weigh,
)
from tftpu.engines.data.gate import Gate
from tftpu.engines.data.py_dataset import PyBatches
from tftpu.engines.data.streams import Stream, to_arrays
from tftpu.engines.engine import Epoch
from tftpu.engines.objectives.losses import count_examples
from tftpu.errors import UserError
from tftpu.tensors import Nest


@runtime_checkable
class Pipeline(Protocol):
    """A data set that can start at any step, such as a pipeline of `tftpu.input_pipelines`."""

    global_batch_size: int

    def starting_at(self, step: int, host: int = 0, hosts: int = 1) -> tf.data.Dataset:
        """Returns an endless data set of global batches, or of one host's shard of each."""
        ...


@runtime_checkable
class Epochs(Protocol):
    """Data in epochs that can start at any step, such as arrays in memory."""

    def epoch(self) -> Epoch:
        """Returns the length of an epoch."""
        ...

    def from_step(self, step: int) -> tf.data.Dataset:
        """Returns an endless data set; the last batch of an epoch may be smaller."""
        ...


def find_gate(dataset: Any) -> Gate | None:
    """Returns a gate for a data set that a callback may change in a run; otherwise None.

    Copied arrays and a pipeline's files do not change, and a stream is not read ahead. But a
    `tf.data.Dataset` may read anything, such as a generator, a variable or a file.
    """
    return None if isinstance(dataset, Pipeline | Stream) else Gate()


def measure_length(dataset: Any) -> Epoch:
    """Returns the length of one pass over a data set.

    Raises:
        UserError: the argument is not a data set, or its length is unknown.
    """
    if isinstance(dataset, Epochs):
        return dataset.epoch()
    if isinstance(dataset, Pipeline):
        count, size = getattr(dataset, "count", None), dataset.global_batch_size
        if count is None:
            raise UserError(
                f"{type(dataset).__name__} does not say how many examples an epoch has: pass "
                "steps_per_epoch= with epochs=, or steps=."
            )
        # The next epoch's first examples fill up the last batch.
        return Epoch(-(-count // size), size)
    return measure_epoch(dataset)


def build_training(
    dataset: Any,
    start: int,
    class_weight: dict[int, float] | None = None,
    host: int = 0,
    hosts: int = 1,
    gate: Gate | None = None,
) -> tf.data.Dataset:
    """Returns an endless data set of complete global batches, from step `start`.

    Args:
        dataset: a data set of global batches. A finite `tf.data.Dataset` is repeated; its order
            must be deterministic for a resumed run to see the same batches, because earlier batches
            are skipped. Of a `Stream`, only the first batch is returned, again and again.
        start: number of batches to skip. A `Pipeline` does not decode their examples.
        class_weight: weight of each label, which becomes the sample weight.
        host, hosts: for a pipeline, the index of this host, and the number of hosts, each of which
            reads its shard of a batch.
        gate: the gate that holds the data set back; None for unlimited reading ahead.

    Raises:
        UserError: the argument is not a data set, is empty, or is not batched.
    """
    if isinstance(dataset, Stream):  # one batch, repeated: more would use up the stream
        return _build_sample(dataset).repeat()
    if isinstance(dataset, Pipeline):
        batches = dataset.starting_at(start, host, hosts)
    elif isinstance(dataset, Epochs):
        batches = build_complete_batches(dataset.from_step(0)).skip(start)
    else:
        batches = build_complete_batches(dataset).skip(start)
    batches = gate.guard(batches) if gate is not None else batches
    return narrow(_weigh_batches(batches, class_weight))


def build_epochs(
    dataset: Any,
    start: int,
    epoch: Epoch,
    shards: int,
    class_weight: dict[int, float] | None = None,
    gate: Gate | None = None,
) -> tf.data.Dataset:
    """Returns an endless data set from step `start`; an epoch's last batch may be smaller.

    Args:
        dataset, start, class_weight, gate: as for `build_training`.
        epoch: the length of an epoch; `build_epoch_batches` pads its smaller last batch.
        shards: number of shards that a batch is divided into.
    """
    if isinstance(dataset, Epochs):
        batches = dataset.from_step(start)
    else:
        batches = check_dataset(dataset).repeat().skip(start)
    batches = gate.guard(batches) if gate is not None else batches
    batches = _weigh_batches(batches, class_weight)
    return narrow(build_epoch_batches(batches, epoch, start, shards))


def build_whole(
    dataset: Any,
    start: int,
    epoch: Epoch | None,
    class_weight: dict[int, float] | None = None,
    gate: Gate | None = None,
) -> tf.data.Dataset:
    """Returns an endless data set of the user's batches from step `start`, without padding.

    Args:
        dataset, start, class_weight, gate: as for `build_training`.
        epoch: the length of an epoch; None fills up all batches, so that they may span two epochs.
    """
    if epoch is None or (isinstance(dataset, Pipeline) and not isinstance(dataset, Epochs)):
        return build_training(dataset, start, class_weight, gate=gate)
    if isinstance(dataset, Epochs):
        batches = dataset.from_step(start)
    else:
        batches = check_dataset(dataset).repeat().skip(start)
    batches = gate.guard(batches) if gate is not None else batches
    return narrow(_weigh_batches(batches, class_weight))


def build_whole_evaluation(dataset: Any) -> tf.data.Dataset:
    """Returns a finite data set of the user's batches, unpadded; of a stream, only its first batch.

    Raises:
        UserError: the argument is not a data set, or never ends.
    """
    if isinstance(dataset, Stream):
        return _build_sample(dataset)
    return narrow(build_finite_dataset(dataset))


def _build_sample(stream: Stream) -> tf.data.Dataset:
    return narrow(tf.data.Dataset.from_tensors(to_arrays(stream.first)))


def build_evaluation(dataset: Any, replicas: int) -> tf.data.Dataset:
    """Returns a data set of `(batch, valid)` with every example once; `valid` is 0.0 for padding.

    Args:
        dataset: a finite data set. Its batch size is rounded up to a multiple of `replicas`.
        replicas: number of shards that a batch is divided into.

    Raises:
        UserError: the argument is not a data set, or never ends.
    """
    batches, size = _build_evaluated(dataset, replicas)
    known = {spec.shape[0] for spec in keras.tree.flatten(batches.element_spec)}

    # Skips AutoGraph, which takes time and has nothing to convert here.
    @tf.autograph.experimental.do_not_convert
    def padded(*batch):
        # If the size of all batches is known to be `size`, they are complete.
        return (unwrap_features(batch), tf.ones(size)) if known == {size} else pad(batch, size)

    return batches.map(padded)


def build_evaluation_spec(dataset: Any, replicas: int) -> Nest:
    """Returns the spec of a padded batch of an evaluation, without tracing the padding.

    Args:
        dataset, replicas: as for `build_evaluation`, which raises the same errors.
    """
    batches, size = _build_evaluated(dataset, replicas)
    spec: Any = batches.element_spec
    return replace_examples(unwrap_features(spec) if isinstance(spec, tuple) else spec, size)


def _build_evaluated(dataset: Any, replicas: int) -> tuple[tf.data.Dataset, int]:
    """Returns the batches of an evaluation, without padding, and their padded size."""
    batches_of_any_size = isinstance(dataset, PyBatches)
    dataset = build_finite_dataset(dataset)
    size = -(-infer_batch_size(dataset) // replicas) * replicas
    known = {spec.shape[0] for spec in keras.tree.flatten(dataset.element_spec)}
    batches_of_any_size |= dataset.cardinality() == tf.data.UNKNOWN_CARDINALITY
    if None in known and batches_of_any_size:
        dataset = dataset.rebatch(size)  # some batches may be larger than the first one
    return narrow(dataset), size


def round_up(spec: Nest, replicas: int) -> Nest:
    """Returns a batch spec with its number of examples rounded up to a multiple of `replicas`."""
    return replace_examples(spec, -(-count_examples(spec) // replicas) * replicas)


def is_endless(dataset: Any) -> bool:
    """Returns whether a data set is known to be endless, as every pipeline without epochs is."""
    if isinstance(dataset, PyBatches):
        return dataset.dataset.num_batches is None
    if isinstance(dataset, Pipeline) and not isinstance(dataset, Epochs):
        return True  # a pipeline without epochs repeats its examples
    return isinstance(dataset, tf.data.Dataset) and (
        dataset.cardinality() == tf.data.INFINITE_CARDINALITY
    )


def build_shard_spec(spec: Nest, replicas: int, microbatches: int = 1) -> Nest:
    """Returns the spec of one replica's shard of a batch, as `tf.TensorSpec`s.

    Args:
        spec: the spec of global batches of static shape.
        replicas: number of replicas that share a batch.
        microbatches: number of microbatches that each shard is divided into.

    Raises:
        UserError: the replicas and microbatches do not divide the global batch.
    """
    size = count_examples(spec)
    shard = PerReplicaBatch(size, replicas, microbatches).examples * microbatches
    keras.tree.map_structure(checks.refuse_spec, spec)
    return replace_examples(spec, shard)


def build_padded_shard_spec(spec: Nest, replicas: int) -> Nest:
    """Returns the spec of one replica's shard of a padded batch.

    Args:
        spec: the spec of a batch whose size `replicas` divides.
        replicas: number of shards.
    """
    return replace_examples(spec, count_examples(spec) // replicas)


def replace_examples(spec: Nest, examples: int) -> Nest:
    """Returns a batch spec with another number of examples, the first dimension of each tensor."""
    return keras.tree.map_structure(
        lambda s: tf.TensorSpec((examples, *s.shape[1:]), s.dtype), spec
    )


def extract_features(batch: Nest) -> Nest:
    """Returns the features of a batch.

    Raises:
        UserError: the batch has more than x, y and sample_weight.
    """
    if isinstance(batch, tuple) and len(batch) > 3:
        raise UserError(
            f"A batch has {len(batch)} parts, but predict takes x, (x, y) or (x, y, "
            "sample_weight): give it only the features, as in data.map(lambda x, *rest: x)."
        )
    x, _, _ = keras.utils.unpack_x_y_sample_weight(batch)
    return x


def _weigh_batches(
    batches: tf.data.Dataset, class_weight: dict[int, float] | None
) -> tf.data.Dataset:
    if not class_weight:
        return batches
    return batches.map(lambda *batch: weigh(batch, class_weight))
