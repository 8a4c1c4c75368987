"""Parses and prepares the records of a source, and batches them for a device, from any step on.

A run that resumes at step k sees exactly the examples that it would have seen without a stop. The
source draws records by position (`reading.order`). Every later stage keeps their order (each
parallel stage is deterministic), and works on one example with its own seed or on neighbours in a
batch. No state passes from one batch to the next, so nothing has to be saved.

A record that cannot be read or prepared (bad checksum, truncated JPEG, wrong feature, class id out
of range) stops the run with an error that names its file and number. With `on_bad_record="skip"` it
keeps its position in the stream and gets weight 0, so all other examples stay in their places, on
any number of hosts and after any restart. The record is logged, and the run stops after more than
`max_bad_records` of them. A bucket or disk that cannot be read for a while does not make a record
bad: the run retries for a while, then stops with an error.
"""

import dataclasses
import hashlib
import json
import logging
import re
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from tftpu.config import DataContext
from tftpu.errors import UserError
from tftpu.input_pipelines import service
from tftpu.input_pipelines.formats import pillow
from tftpu.input_pipelines.reading.epochs import compute_host_batch_size
from tftpu.input_pipelines.reading.streamed import Streamed
from tftpu.input_pipelines.tensors import Batch, Tensor
from tftpu.storage import retry

_SMALL = 2**26  # largest evaluation split that is kept in memory, in bytes
_CHUNK = 16  # examples prepared per call: a call's overhead costs as much as a small example

_log = logging.getLogger(__name__)

Parse = Callable[[Tensor], Batch]
Prepare = Callable[[Any, Tensor], Any]
Finish = Callable[[Batch, Tensor], Any]
Attempt = Any  # the traced function `Pipeline._try_records`


class RecordSource(Protocol):
    """A source of records, such as `shards.Shards` or `indexed.IndexedRecords`."""

    count: int

    @property
    def state(self) -> Any:
        """A JSON value that changes with the files: names, sizes, numbers of records or labels."""
        ...

    def draw_records(
        self, global_batch_size: int, seed: int, step: int, host: int, hosts: int
    ) -> tf.data.Dataset:
        """Returns endless batches of one host: records (n,), their numbers (n,), seeds (n, 2)."""
        ...

    def iterate_once(self) -> tf.data.Dataset:
        """Returns a dataset of all records, each once, with their record numbers."""
        ...

    def read_range(self, first: Tensor, last: Tensor, size: int) -> tf.data.Dataset:
        """Returns batches of the records `first` to `last` - 1, with their numbers, in order.

        Each batch has `size` records. The last one is padded with copies of the last record.
        """
        ...

    def describe_records(self, numbers: Tensor) -> Tensor:
        """Returns the records' names for error messages, (n,), string, given their numbers (n,)."""
        ...

    def explain_loss(self, number: int) -> str:
        """Returns why an empty record could not be read, or "" if it can be read now.

        Raises:
            OSError: the bucket still cannot be reached.
        """
        ...


@dataclasses.dataclass
class Pipeline:
    """Batches of a source's examples: an endless, shuffled stream, or each example once.

    Args:
        source: the source of records.
        data: the options of the data set, for bad records and data services.
        context: the seed of the shuffle and the augmentation, and the global batch size.
        parse: a function that maps records (n,) to examples, nested tensors (n, ...).
        finish: a function that maps a batch of examples and seeds (batch, 2) to (features, labels[,
            weights]), or for prediction to the features alone.
        example: a function that maps an example and its seed (2,), int32, to an example of static
            shapes; None: examples stay as parsed.
        pairs: whether `finish` mixes each example with its neighbour; a bad record then gives both
            examples weight 0.

    Attributes:
        skipped: the reasons why records were skipped, by record number.
    """

    source: RecordSource
    data: Streamed
    context: DataContext
    parse: Parse
    finish: Finish
    example: Prepare | None = None
    pairs: bool = False

    def __post_init__(self):
        self.skipped: dict[int, str] = {}
        self._judging = threading.Lock()  # tf.data may prepare a record in two threads at once

    @property
    def global_batch_size(self) -> int:
        """The number of examples per step."""
        return self.context.global_batch_size

    @property
    def count(self) -> int:
        """The number of examples of an epoch."""
        return self.source.count

    def describe_files(self) -> dict[str, str]:
        """Returns a hash of the files' names, sizes, and numbers of records or labels."""
        text = json.dumps(self.source.state).encode()
        return {"files": hashlib.blake2b(text, digest_size=16).hexdigest()}

    def starting_at(
        self, step: int, host: int = 0, hosts: int = 1, machine: int = 0, machines: int = 1
    ) -> tf.data.Dataset:
        """Returns endless global batches from a step on, or one host's shard of each.

        Args:
            step: the number of the first batch.
            host, hosts: index of this host, and number of hosts. The hosts' shards of a batch are
                equal in size and consecutive, in the order of the hosts.
            machine, machines: index of this data service, and number of services. Each yields
                every `machines`-th batch, beginning with batch `step` + `machine`.

        Raises:
            UserError: the number of hosts does not divide the global batch size, a host's shard
                cannot be mixed in pairs, or a data service cannot be used.
        """
        share = self._compute_host_batch_size(hosts)
        drawn = self.source.draw_records(
            self.global_batch_size, self.context.seed, step, host, hosts
        )

        if machines > 1:
            drawn = drawn.shard(machines, machine)
        batches = self._prepare_records(drawn, share, True, self._finish_batch)
        if not self.data.services:
            return batches
        return service.fetch_batches(
            self.data, self.data.services, self.context, batches.element_spec, step, host, hosts
        )

    def iterate_once(self) -> tf.data.Dataset:
        """Returns every example once, in batches; the last batch may be smaller.

        A small split is read here, and then stays in memory: tf.data needs most of a second to
        begin a pass over images, which is longer than many a small evaluation.
        """
        records = self.source.iterate_once().batch(self.global_batch_size)
        seeded = records.map(lambda record, number: (record, number, _make_no_seeds(number)))
        size = self.global_batch_size
        batches = self._prepare_records(seeded, size, False, self._finish_batch)
        sizes = [_measure_example(spec) for spec in tf.nest.flatten(batches.element_spec)]
        if None in sizes or not 0 < self.count * sum(filter(None, sizes)) <= _SMALL:
            return batches
        options = tf.data.Options()
        options.autotune.enabled = False  # deleting a tuned iterator may take as long as it lived
        parts = list(batches.with_options(options).as_numpy_iterator())
        whole = tf.nest.map_structure(lambda *arrays: np.concatenate(arrays), *parts)
        return tf.data.Dataset.from_tensor_slices(whole).batch(size)

    def read_ranges(self, ranges: Sequence[range]) -> tf.data.Dataset:
        """Returns the examples of ranges of records, in order, in complete batches.

        Each range begins with a new batch, and its last batch is padded with copies of its last
        record. The batches of a range therefore depend only on the range and the batch size.
        """
        size = self.global_batch_size

        def read_records(*borders: Tensor) -> tf.data.Dataset:
            first, last = borders
            found = self.source.read_range(first, last, size)
            return found.map(lambda record, number: (record, number, _make_no_seeds(number)))

        firsts = tf.constant([numbers.start for numbers in ranges], tf.int64)
        lasts = tf.constant([numbers.stop for numbers in ranges], tf.int64)
        drawn = tf.data.Dataset.from_tensor_slices((firsts, lasts)).flat_map(read_records)

        # All batches are complete, but `rebatch` loses their static size.
        def finish_range(batch: Batch, _: Tensor, seeds: Tensor) -> Any:
            shaped = [tf.ensure_shape(p, (size, *p.shape[1:])) for p in tf.nest.flatten(batch)]
            return self.finish(tf.nest.pack_sequence_as(batch, shaped), seeds)

        batches = self._prepare_records(drawn, size, False, finish_range)
        count = sum(-(-len(numbers) // size) for numbers in ranges)
        return batches.apply(tf.data.experimental.assert_cardinality(count))

    def _compute_host_batch_size(self, hosts: int) -> int:
        share = compute_host_batch_size(self.global_batch_size, hosts)
        if self.pairs and share % 2:
            raise UserError(
                f"Each host has {share} examples of the batch, but MixUp and CutMix mix pairs: "
                f"make the global batch a multiple of {2 * hosts}."
            )
        return share

    def _prepare_records(
        self,
        records: tf.data.Dataset,
        share: int,
        drop_remainder: bool,
        finished: Callable[[Batch, Tensor, Tensor], Any],
    ) -> tf.data.Dataset:
        size = _CHUNK if self.example else share
        if size != share:
            records = records.rebatch(size, drop_remainder=drop_remainder)
        spec: Any = records.element_spec
        record, _, seed = spec
        # Traced once, because its large graph (all of the preparation) is called in several places.
        signature = (_widen_spec(record), _widen_spec(seed))
        attempt = tf.function(self._try_records, input_signature=signature)

        def parse_chunk(*drawn: Tensor) -> tuple[Batch, Tensor, Tensor]:
            return self._parse_chunk(attempt, *drawn)

        chunks = records.map(parse_chunk, tf.data.AUTOTUNE, deterministic=True)
        if size != share:
            chunks = chunks.rebatch(share, drop_remainder=drop_remainder)
        return chunks.map(finished, tf.data.AUTOTUNE, deterministic=True)

    def _parse_chunk(
        self, attempt: Attempt, records: Tensor, numbers: Tensor, seeds: Tensor
    ) -> tuple[Batch, Tensor, Tensor]:
        """Returns the examples of n records, a mask (n,) of the good records, and the seeds."""
        size = tf.shape(records)[0]

        def parse_together() -> tuple[Batch, Tensor]:
            together = attempt(records, seeds)
            return tf.cond(
                tf.shape(tf.nest.flatten(together)[0])[0] == size,
                lambda: (together, tf.fill([size], True)),
                lambda: self._parse_each(attempt, records, numbers, seeds),
            )

        if self.data.on_bad_record == "raise":
            examples, found = parse_together()
        else:  # never decodes a known bad image again: libjpeg would print a line each time
            examples, found = tf.cond(
                tf.reduce_any(self._find_skipped(numbers)),
                lambda: self._parse_each(attempt, records, numbers, seeds),
                parse_together,
            )
        static = records.shape[:1]
        examples = tf.nest.map_structure(
            lambda part: tf.ensure_shape(part, static + part.shape[1:]), examples
        )
        # `gather` copies: TensorFlow complains on stderr if slices of a batch are batched again.
        return examples, tf.ensure_shape(found, static), tf.gather(seeds, tf.range(size))

    def _parse_each(
        self, attempt: Attempt, records: Tensor, numbers: Tensor, seeds: Tensor
    ) -> tuple[Batch, Tensor]:
        """Parses records singly; returns examples (zeros for bad records), and which are good."""

        def parse_one(record: Tensor, number: Tensor, seed: Tensor) -> tuple[Any, Tensor]:
            def try_once() -> Batch:
                return attempt(record[None], seed[None])

            spec = attempt.get_concrete_function().structured_outputs

            def give_none() -> Batch:
                return tf.nest.map_structure(lambda p: _make_zeros((0, *p.shape[1:]), p), spec)

            known = self._find_skipped(number[None])[0]
            first = tf.cond(known, give_none, try_once)

            def try_again() -> tuple[Batch, Tensor]:
                # `_judge` returns whether the record is bad; it waits for an unreachable bucket.
                bad = tf.ensure_shape(
                    tf.numpy_function(self._judge, [record, number, seed], tf.bool), ()
                )
                return tf.cond(bad, give_none, try_once), bad

            example, bad = tf.cond(_is_one(first), lambda: (first, tf.constant(False)), try_again)
            what = [self.source.describe_records(number[None]), "can be prepared only sometimes."]
            with tf.control_dependencies([tf.debugging.Assert(_is_one(example) | bad, what)]):
                example = tf.nest.map_structure(tf.identity, example)
            filled = tf.cond(
                _is_one(example),
                lambda: tf.nest.map_structure(lambda part: part[0], example),
                lambda: tf.nest.map_structure(
                    lambda part: _make_zeros(part.shape[1:], part), example
                ),
            )
            return filled, _is_one(example)

        each = tf.data.Dataset.from_tensor_slices((records, numbers, seeds)).map(parse_one)
        return each.batch(tf.size(records, tf.int64)).get_single_element()

    def _try_records(self, records: Tensor, seeds: Tensor) -> Batch:
        """Returns the examples of n records; fewer than n, or none, if a record is bad."""

        def parse_records(records: Tensor, seeds: Tensor) -> tuple[Batch, Tensor]:
            if records.dtype == tf.string:  # "" stands for a record that no reader could read
                tf.debugging.Assert(tf.reduce_all(tf.strings.length(records) > 0), [records])
            return self.parse(records), seeds

        examples: Any = tf.data.Dataset.from_tensors((records, seeds)).map(parse_records)
        if self.example:
            examples = examples.unbatch().map(self.example)
            examples = examples.ignore_errors(log_warning=False).batch(tf.size(records, tf.int64))
        else:
            examples = examples.map(lambda batch, _: batch).ignore_errors(log_warning=False)
        spec = examples.element_spec
        none = tf.nest.map_structure(lambda part: _make_zeros((0, *part.shape[1:]), part), spec)
        none = tf.data.Dataset.from_tensors(none)
        return examples.concatenate(none).take(1).get_single_element()

    def _find_skipped(self, numbers: Tensor) -> Tensor:
        """Returns a mask (n,), bool, of the records that are known to be bad."""

        def are_skipped(numbers: np.ndarray) -> np.ndarray:
            return np.array([int(number) in self.skipped for number in numbers], bool)

        found = tf.numpy_function(are_skipped, [numbers], tf.bool)
        return tf.ensure_shape(found, numbers.shape)

    def _judge(self, record: Any, drawn: np.int64, seed: np.ndarray) -> bool:
        with self._judging:
            return self._judge_once(record, int(drawn), seed)

    def _judge_once(self, record: Any, number: int, seed: np.ndarray) -> bool:
        """Returns whether a record is bad, and counts it; waits for an unreachable bucket.

        Raises:
            UserError: the record is bad and may not be skipped, too many were skipped, or the
                bucket or the disk failed.
        """
        if number in self.skipped:
            return True
        reason = self._find_reason(record, number, seed)
        name = self._describe_record(number)
        if not reason and _is_lost(record):
            raise UserError(
                f"{name} could not be read at first, but can be read now, so the disk or the "
                "bucket failed for a while. Run the same command again."
            )
        if not reason:
            return False
        if self.data.on_bad_record == "raise":
            raise UserError(
                f"{name} {reason}. Fix the data, or leave such records out: with "
                "--config.data.on_bad_record=skip, or for `tftpu predict` with --skip_bad."
            )
        self.skipped[number] = reason
        _log.warning("Skipped %s, which %s (%d so far)", name, reason, len(self.skipped))
        if len(self.skipped) > self.data.max_bad_records:
            raise UserError(
                f"{len(self.skipped)} bad records were skipped, more than "
                f"max_bad_records={self.data.max_bad_records}. The last is {name}, which {reason}."
            )
        return True

    def _describe_record(self, number: int) -> str:
        return self.source.describe_records(tf.constant([number], tf.int64))[0].numpy().decode()

    def _find_reason(self, record: Any, number: int, seed: Any) -> str:
        """Tries to prepare a record; returns why that fails, or "".

        The reason completes a sentence that begins with the name of the record.

        Raises:
            UserError: the record's bucket cannot be reached.
        """

        def prepare() -> None:
            examples = self.parse(tf.constant([record]))
            if self.example:
                self.example(tf.nest.map_structure(lambda part: part[0], examples), seed)

        away = (
            tf.errors.AbortedError,
            tf.errors.DeadlineExceededError,
            tf.errors.UnavailableError,
        )
        try:
            if _is_lost(record):
                return self.source.explain_loss(number)
            retry.call(prepare, away, self._describe_record(number))
        except (OSError, *away, tf.errors.PermissionDeniedError) as error:
            raise UserError(
                f"{self._describe_record(number)} cannot be reached ({_strip_node_names(error)}). "
                "Run the same command again once it can be reached: the run resumes."
            ) from error
        except pillow.ImageError as error:
            return _strip_node_names(error)
        except (tf.errors.OpError, UserError, ValueError, TypeError) as error:
            return f"cannot be prepared: {_strip_node_names(error)}"
        return ""

    def _finish_batch(self, examples: Batch, found: Tensor, seeds: Tensor) -> Any:
        batch = self.finish(examples, seeds)
        if self.data.on_bad_record == "raise":
            return batch
        weights: Tensor = tf.cast(found, tf.float32)
        if self.pairs:
            weights *= tf.reshape(tf.reverse(tf.reshape(weights, (-1, 2)), [1]), (-1,))
        features, labels, *given = batch
        if not given:
            return features, labels, weights
        weights = tf.reshape(weights, (-1, *[1] * (given[0].shape.rank - 1)))
        return features, labels, given[0] * weights


def _widen_spec(spec: tf.TensorSpec) -> tf.TensorSpec:
    return tf.TensorSpec((None, *spec.shape[1:]), spec.dtype)


def _measure_example(spec: tf.TensorSpec) -> int | None:
    """Returns the bytes per example in a batch of this spec; None if the examples' sizes differ."""
    size = spec.shape[1:].num_elements()
    return None if size is None or spec.dtype == tf.string else size * spec.dtype.size


def _is_lost(record: Any) -> bool:
    """Returns whether a record is empty, which stands for one that no reader could read."""
    return isinstance(record, bytes) and not record


def _is_one(examples: Batch) -> Tensor:
    """Returns whether there is exactly one example."""
    return tf.shape(tf.nest.flatten(examples)[0])[0] == 1


def _strip_node_names(error: Exception) -> str:
    """Returns an error's message without TensorFlow's names of nodes."""
    text = str(error).partition("\nTraceback")[0]  # removes the traceback of a function in Python
    text = re.sub(r"\{\{.*?\}\}|\[Op:\w+\]|name:\s*$", " ", text)
    return " ".join(text.split()).rstrip(". ")


def _make_zeros(shape: tuple[int | None, ...], like: Any) -> Tensor:
    """Returns zeros of a shape, whose unknown dimensions become 0, with the dtype of `like`."""
    return tf.zeros([size or 0 for size in shape], like.dtype)


def _make_no_seeds(numbers: Tensor) -> Tensor:
    """Returns zeros (batch, 2), int32, as seeds for evaluation, which uses no random numbers."""
    return tf.zeros((tf.shape(numbers)[0], 2), tf.int32)
