"""From a source's records to batches for a device: parsed, prepared, batched, from any step on.

What makes a run that stopped at step k see, when it goes on, what it would have seen: the source
draws records by position (`order`); all that follows keeps their order (every parallel stage is
deterministic), works on one example at a time with a seed of its own, or on a batch's neighbours.
Nothing carries state from one batch to the next, so nothing has to be saved.

A record that cannot be read or prepared (bad checksum, truncated JPEG, wrong feature, class id out
of range) stops the run with its file and number. With `on_bad_record="skip"` it keeps its position
in the stream and gets the weight 0, so the stream of all others is as it was, on any number of
hosts and after any stop; it is logged, and the run stops above `max_bad_records` of them.
"""

import dataclasses
import logging
import re
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from tftpu.errors import UserError, did_you_mean
from tftpu.input_pipelines import service
from tftpu.input_pipelines.reading.epochs import share_of_host
from tftpu.input_pipelines.sources import ON_BAD_RECORD, Streamed

_CHUNK = 16  # examples that one call prepares; how it begins and ends costs as much as a small one

_log = logging.getLogger(__name__)


def options_of(data: Streamed) -> dict[str, Any]:
    """The arguments of a `Pipeline` that every streamed data set has."""
    return {
        "on_bad_record": data.on_bad_record,
        "max_bad_records": data.max_bad_records,
        "services": data.service.split(",") if data.service else [],
    }


class Source(Protocol):
    """Where records come from: `shards.Shards`, `indexed.Indexed`."""

    count: int

    def drawn(
        self, global_batch_size: int, seed: int, step: int, host: int, hosts: int
    ) -> tf.data.Dataset:
        """Endless: records (share,), numbers (share,), int64, and seeds (share, 2), int32."""

    def once(self) -> tf.data.Dataset:
        """Every record once, with its number."""

    def names(self, numbers: tf.Tensor) -> tf.Tensor:
        """What to call records in an error, (n,), string."""


@dataclasses.dataclass
class Pipeline:
    """Batches of a source's examples, endless and shuffled, or each once.

    Args:
        source: of records.
        global_batch_size: examples a step.
        parse: records (n,) -> examples, tensors (n, ...), nested at will.
        example: (example, seed (2,), int32) -> example of static shapes; None: it stays as parsed.
        finish: (batch of examples, seeds (batch, 2)) -> (features, labels[, weights]).
        seed: of order and augmentation.
        on_bad_record: "raise" or "skip".
        max_bad_records: different ones that a run skips before it stops.
        pairs: `finish` mixes each example with its neighbour, so they are bad together.
        services: addresses of tf.data services that prepare the batches; none: this process does.
    """

    source: Source
    global_batch_size: int
    parse: Callable
    finish: Callable
    example: Callable | None = None
    seed: int = 0
    on_bad_record: str = "raise"
    max_bad_records: int = 100
    pairs: bool = False
    services: list[str] = dataclasses.field(default_factory=list)

    def __post_init__(self):
        if self.on_bad_record not in ON_BAD_RECORD:
            raise UserError(
                f"on_bad_record is {self.on_bad_record!r}."
                f"{did_you_mean(self.on_bad_record, ON_BAD_RECORD)}"
            )
        self._skipped: set[int] = set()

    @property
    def count(self) -> int:
        """Examples of an epoch."""
        return self.source.count

    def starting_at(self, step: int, host: int = 0, hosts: int = 1) -> tf.data.Dataset:
        """The global batches from a step on, or one host's part of each.

        Args:
            step: the first batch.
            host, hosts: which of how many equal, consecutive parts; the parts together are the
                whole batch, in its order.

        Raises:
            UserError: the hosts do not divide the global batch.
        """
        share = self._share(hosts)
        drawn = self.source.drawn(self.global_batch_size, self.seed, step, host, hosts)

        def prepare(drawn: tf.data.Dataset) -> tf.data.Dataset:
            return self._prepared(drawn, share, drop_remainder=True)

        if self.services:
            return service.distributed(drawn, prepare, self.services, step)
        return prepare(drawn)

    def once(self) -> tf.data.Dataset:
        """Every example once, in batches of `global_batch_size`; the last may be smaller."""
        records = self.source.once().batch(self.global_batch_size)
        seeded = records.map(lambda record, number: (record, number, _no_seeds(number)))
        return self._prepared(seeded, self.global_batch_size, drop_remainder=False)

    def _share(self, hosts: int) -> int:
        share = share_of_host(self.global_batch_size, hosts)
        if self.pairs and share % 2:
            raise UserError(
                f"A host's share of the batch is {share} examples, and mixing works in pairs: make "
                f"the global batch a multiple of {2 * hosts}."
            )
        return share

    def _prepared(self, records: tf.data.Dataset, share: int, drop_remainder: bool):
        size = _CHUNK if self.example else share
        if size != share:
            records = records.rebatch(size, drop_remainder=drop_remainder)
        chunks = records.map(self._chunk, tf.data.AUTOTUNE, deterministic=True)
        if size != share:
            chunks = chunks.rebatch(share, drop_remainder=drop_remainder)
        return chunks.map(self._finished, tf.data.AUTOTUNE, deterministic=True)

    def _chunk(self, records: tf.Tensor, numbers: tf.Tensor, seeds: tf.Tensor) -> tuple:
        """(examples, whether each is fine, seeds) of some records."""
        together = self._attempt(records, seeds)
        size = tf.shape(records)[0]
        fine = tf.shape(tf.nest.flatten(together)[0])[0] == size

        def stop():
            with tf.control_dependencies([self._stop(records, numbers, seeds)]):
                return tf.nest.map_structure(tf.identity, (together, tf.fill([size], False)))

        examples, found = tf.cond(
            fine,
            lambda: (together, tf.fill([size], True)),
            stop if self.on_bad_record == "raise" else lambda: self._apart(records, numbers, seeds),
        )
        static = records.shape[:1]
        examples = tf.nest.map_structure(
            lambda part: tf.ensure_shape(part, static + part.shape[1:]), examples
        )
        # A copy: TensorFlow complains on stderr of slices of a batch that are batched again.
        return examples, tf.ensure_shape(found, static), tf.gather(seeds, tf.range(size))

    def _apart(self, records: tf.Tensor, numbers: tf.Tensor, seeds: tf.Tensor) -> tuple:
        """The examples of some records, zeros for those that are bad; and which are not."""

        def one(record, seed):
            example = self._attempt(record[None], seed[None])
            found = tf.shape(tf.nest.flatten(example)[0])[0] == 1
            filled = tf.cond(
                found,
                lambda: tf.nest.map_structure(lambda part: part[0], example),
                lambda: tf.nest.map_structure(lambda part: _zeros(part.shape[1:], part), example),
            )
            return filled, found

        each = tf.data.Dataset.from_tensor_slices((records, seeds)).map(one)
        examples, found = each.batch(tf.size(records, tf.int64)).get_single_element()
        bad = [tf.boolean_mask(part, ~found) for part in (records, numbers, seeds)]
        with tf.control_dependencies([tf.numpy_function(self._skip, bad, tf.bool)]):
            return tf.nest.map_structure(tf.identity, (examples, found))

    def _attempt(self, records: tf.Tensor, seeds: tf.Tensor) -> Any:
        """The examples of some records; fewer of them, or none, where one of them is bad."""

        def parsed(records, seeds):
            if records.dtype == tf.string:  # what no reader could read
                tf.debugging.Assert(tf.reduce_all(tf.strings.length(records) > 0), [records])
            return self.parse(records), seeds

        examples = tf.data.Dataset.from_tensors((records, seeds)).map(parsed)
        if self.example:
            examples = examples.unbatch().map(self.example)
            examples = examples.ignore_errors(log_warning=False).batch(tf.size(records, tf.int64))
        else:
            examples = examples.map(lambda batch, _: batch).ignore_errors(log_warning=False)
        spec = examples.element_spec
        none = tf.nest.map_structure(lambda part: _zeros((0, *part.shape[1:]), part), spec)
        none = tf.data.Dataset.from_tensors(none)
        return examples.concatenate(none).take(1).get_single_element()

    def _stop(self, records: tf.Tensor, numbers: tf.Tensor, seeds: tf.Tensor) -> tf.Operation:
        """Raises for records of which one is bad; a worker of a service names them all."""
        if self.services:
            what = ["One of these cannot be read or prepared:", self.source.names(numbers)]
            return tf.debugging.Assert(False, what, summarize=-1)

        def tell(*records_numbers_seeds):
            for record, number, seed in zip(*records_numbers_seeds):
                if reason := self._reason(record, seed):
                    raise UserError(
                        f"{self._name(number)}: {reason}. Mend the data, or leave out such records "
                        "with on_bad_record=skip."
                    )
            first = self._name(records_numbers_seeds[1][0])
            raise UserError(
                f"{first} or one after it could not be prepared once, and could be now: try again."
            )

        return tf.numpy_function(tell, [records, numbers, seeds], tf.bool)

    def _skip(self, *records_numbers_seeds: np.ndarray) -> bool:
        """Logs and counts bad records that are new."""
        for record, number, seed in zip(*records_numbers_seeds):
            if number in self._skipped:
                continue
            self._skipped.add(int(number))
            what = f"{self._name(number)}: {self._reason(record, seed)}"
            _log.warning("Skipped %s (%d so far)", what, len(self._skipped))
            if len(self._skipped) > self.max_bad_records:
                raise UserError(
                    f"{len(self._skipped)} bad records, the last {what}: more than "
                    f"max_bad_records={self.max_bad_records}."
                )
        return True

    def _name(self, number: np.int64) -> str:
        return self.source.names(tf.constant([number], tf.int64))[0].numpy().decode()

    def _reason(self, record: Any, seed: Any) -> str:
        """Why a record cannot be prepared, found by doing it; "" if it can."""
        if record == b"":
            return "cannot be read: missing, cut off or with a wrong checksum"
        try:
            examples = self.parse(tf.constant([record]))
            if self.example:
                self.example(tf.nest.map_structure(lambda part: part[0], examples), seed)
        except (tf.errors.OpError, UserError, ValueError, TypeError) as error:
            text = re.sub(r"\{\{.*?\}\}|\[Op:\w+\]|name:\s*$", " ", str(error))
            return " ".join(text.split()).rstrip(". ")
        return ""

    def _finished(self, examples: Any, found: tf.Tensor, seeds: tf.Tensor) -> tuple:
        batch = self.finish(examples, seeds)
        if self.on_bad_record == "raise":
            return batch
        weights = tf.cast(found, tf.float32)
        if self.pairs:
            weights *= tf.reshape(tf.reverse(tf.reshape(weights, (-1, 2)), [1]), (-1,))
        features, labels, *given = batch
        if not given:
            return features, labels, weights
        weights = tf.reshape(weights, (-1, *[1] * (given[0].shape.rank - 1)))
        return features, labels, given[0] * weights


def _zeros(shape: tuple, like: tf.TensorSpec | tf.Tensor) -> tf.Tensor:
    return tf.zeros([size or 0 for size in shape], like.dtype)


def _no_seeds(numbers: tf.Tensor) -> tf.Tensor:
    """(batch, 2): evaluation draws nothing."""
    return tf.zeros((tf.shape(numbers)[0], 2), tf.int32)
