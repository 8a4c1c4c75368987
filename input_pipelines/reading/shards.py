"""TFRecord shards as a source of training examples: read in parallel, entered anywhere."""

import dataclasses
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from tftpu.errors import UserError
from tftpu.input_pipelines.formats.manifest import INDEX_EVERY, Manifest
from tftpu.input_pipelines.reading import order
from tftpu.input_pipelines.reading.cache import Cache
from tftpu.storage import files
from tftpu.storage.buckets import Stored

AT_MOST = 64  # lanes: as many hosts as this read nothing that another reads
SHUFFLE = 16_384  # examples in the windows of all lanes together
# Shards of one pass. tf.data opens at most three times as many before the first is done with, so
# that those at once have different numbers modulo AT_MOST.
AT_ONCE = 16
READ_AHEAD = 1 << 20  # bytes of a file


@dataclasses.dataclass
class Piece:
    """Consecutive records of one file: (path, all its records or a part of them).

    Args:
        path: of the file, local or `gs://`.
        examples: records that are meant.
        first: record of the file that they begin with.
        offsets: as of `manifest.Shard`; empty: the file is read from its beginning.
        bytes: size of the file; None: not known.
    """

    path: str
    examples: int
    first: int = 0
    offsets: tuple[int, ...] = ()
    bytes: int | None = None


class Shards:
    """The records of TFRecord shards, in an order that depends on seed, epoch and place alone.

    `order` says how. A record that cannot be read (missing file, bad checksum, cut off) comes as an
    empty string in its place.

    Args:
        pieces: the files, in their order.
        compression: "" or "GZIP". A compressed file is read through to get to a place in it.
        shuffle: examples that the windows of all lanes hold together; 1 keeps each file's order.
        lanes: at most so many files are read side by side.
        local: from a file's path, as bytes, and the number of its reader, below `AT_MOST`, to the
            path to read until the reader asks for another; None: the same.
    """

    def __init__(
        self,
        pieces: list[Piece],
        compression: str = "",
        shuffle: int = SHUFFLE,
        lanes: int = AT_MOST,
        local: Callable[[bytes, int], bytes] | None = None,
    ):
        self.pieces = [piece for piece in pieces if piece.examples]
        self.compression = compression
        self.shuffle = shuffle
        self.at_most = lanes
        self.local = local
        self.count = sum(piece.examples for piece in self.pieces)
        if not self.count:
            raise UserError("The shards hold no example.")
        counts = np.array([piece.examples for piece in self.pieces])
        index = np.cumsum([0, *(len(piece.offsets) for piece in self.pieces)])
        # Tensors that the graphs below share: a graph's own constants are copied with it.
        self._tables = _Tables(
            paths=tf.constant([piece.path for piece in self.pieces]),
            counts=tf.constant(counts, tf.int64),
            firsts=tf.constant(np.cumsum(counts) - counts, tf.int64),
            skips=tf.constant([piece.first for piece in self.pieces], tf.int64),
            index=tf.constant(index, tf.int64),
            offsets=tf.constant([o for p in self.pieces for o in p.offsets] or [0], tf.int64),
        )

    def names(self, numbers: tf.Tensor) -> tf.Tensor:
        """What to call records in an error: their place in their file, and the file."""
        tables = self._tables
        shard = tf.searchsorted(tables.firsts, numbers, side="right") - 1
        place = numbers - tf.gather(tables.firsts - tables.skips, shard)
        path = tf.gather(tables.paths, shard)
        return tf.strings.join(["record ", tf.strings.as_string(place), " of ", path])

    def lanes(self, global_batch_size: int) -> order.Lanes:
        """How an epoch is cut for batches of this size."""
        number = order.lanes_of(global_batch_size, len(self.pieces), self.at_most)
        return order.Lanes(self.count, global_batch_size, number)

    def window(self, global_batch_size: int) -> int:
        """Examples that one lane shuffles at a time."""
        return max(1, self.shuffle // self.lanes(global_batch_size).lanes)

    def memory(self, global_batch_size: int, hosts: int = 1) -> int:
        """Bytes of records that a host holds, about: two windows of a lane, and what it reads."""
        lanes = self.lanes(global_batch_size)
        own = -(-lanes.lanes // hosts)
        record = sum(piece.bytes or 0 for piece in self.pieces) / self.count
        return int(own * (2 * self.window(global_batch_size) * record + READ_AHEAD))

    def drawn(
        self, global_batch_size: int, seed: int, step: int, host: int = 0, hosts: int = 1
    ) -> tf.data.Dataset:
        """One host's part of each global batch from a step on.

        Returns:
            Endless: records (share,), string, their numbers in the data set (share,), int64, and
            seeds (share, 2), int32.
        """
        lanes = self.lanes(global_batch_size)
        share = global_batch_size // hosts
        first = host * share // lanes.width
        last = -(-(host + 1) * share // lanes.width)
        skipped = host * share - first * lanes.width  # where hosts share a lane

        def lane(number: tf.Tensor) -> tf.data.Dataset:
            return self._lane(lanes, number, seed, step)

        examples = tf.data.Dataset.range(first, last).interleave(
            lane,
            cycle_length=last - first,
            block_length=lanes.width,
            num_parallel_calls=last - first,
            deterministic=True,
        )
        whole = examples.batch((last - first) * lanes.width, drop_remainder=True)
        if whole.element_spec[0].shape[0] == share:
            return whole
        return whole.map(lambda *parts: tuple(part[skipped : skipped + share] for part in parts))

    def once(self) -> tf.data.Dataset:
        """Every record once, in an order of its own, with its number; several files at a time."""
        firsts = self._tables.firsts
        ends = firsts + self._tables.counts

        def read(shard: tf.Tensor) -> tf.data.Dataset:
            numbers = tf.data.Dataset.range(firsts[shard], ends[shard])
            records = self._read(shard, 0, ends[shard] - firsts[shard], shard % AT_MOST)
            return tf.data.Dataset.zip(records, numbers).map(lambda read, number: (read[0], number))

        shards = tf.data.Dataset.range(len(self.pieces))
        width = min(len(self.pieces), AT_ONCE)
        return shards.interleave(read, width, 16, num_parallel_calls=width, deterministic=True)

    def _lane(self, lanes: order.Lanes, lane: tf.Tensor, seed: int, step: int) -> tf.data.Dataset:
        """A lane from a step on, without end."""
        window = self.window(lanes.global_batch_size)
        start, behind = lanes.at(lane, tf.convert_to_tensor(step, tf.int64))

        def of_epoch(epoch: tf.Tensor) -> tf.data.Dataset:
            skipped = tf.where(epoch == start, behind, tf.constant(0, tf.int64))
            return self._run(lanes, lane, epoch, skipped, window, seed)

        # start, start + 1, ...: a range that begins at a tensor.
        return tf.data.Dataset.range(start, tf.int64.max).flat_map(of_epoch)

    def _run(self, lanes, lane, epoch, skipped, window: int, seed: int) -> tf.data.Dataset:
        """What a lane reads in an epoch, but for the first `skipped` examples."""
        run = tf.constant(seed, tf.int64)
        shards = tf.range(len(self.pieces), dtype=tf.int64)
        # The second word tells the order of the shards from that of any window.
        row = order.shuffled(shards, len(self.pieces), _key(run, epoch, tf.constant(-1, tf.int64)))
        counts = tf.gather(self._tables.counts, row)
        ends = tf.cumsum(counts)
        begins = ends - counts
        borders = lanes.runs(epoch)
        begin, end = borders[lane], borders[lane + 1]
        first = skipped // window
        start = tf.minimum(begin + first * window, end)
        low = tf.searchsorted(ends, start[None], side="right")[0]
        high = tf.searchsorted(begins, end[None], side="left")[0]
        here = slice(low, tf.maximum(low, high))
        skips = tf.maximum(start - begins[here], 0)
        takes = tf.maximum(tf.minimum(end, ends[here]) - begins[here] - skips, 0)
        parts = tf.data.Dataset.from_tensor_slices((row[here], skips, takes))
        windows = parts.flat_map(lambda *part: self._read(*part, lane)).batch(window)
        firsts = tf.gather(self._tables.firsts, row)

        def shuffle(number: tf.Tensor, read: tuple) -> tuple:
            records, _ = read
            size = tf.size(records, tf.int64)
            place = order.shuffled(
                tf.range(size), size, _key(run, epoch, number * lanes.lanes + lane)
            )
            in_row = begin + number * window + place
            shard = tf.searchsorted(ends, in_row, side="right")
            example = in_row - tf.gather(begins, shard) + tf.gather(firsts, shard)
            seeds = order.seeds(tf.fill([size], run), tf.fill([size], epoch), example)
            return tf.gather(records, place), example, seeds

        numbers = tf.data.Dataset.range(first, tf.int64.max)
        examples = tf.data.Dataset.zip(numbers, windows).map(shuffle).unbatch()
        return examples.skip(skipped - first * window)

    def _read(
        self, shard: tf.Tensor, skip: tf.Tensor, take: tf.Tensor, reader: tf.Tensor
    ) -> tf.data.Dataset:
        """So many records of a shard, "" for each that cannot be read, as of `_whatever_fails`."""
        tables = self._tables
        place = tables.skips[shard] + skip
        indexed = tables.index[shard + 1] > tables.index[shard]
        entry = tf.where(indexed, place // INDEX_EVERY, 0)
        found = tables.offsets[tf.where(indexed, tables.index[shard] + entry, 0)]
        offset = tf.where(indexed, found, 0)
        path = tables.paths[shard]
        if self.local:
            path = tf.ensure_shape(tf.numpy_function(self.local, [path, reader], tf.string), ())
        records = tf.data.experimental.from_variant(
            tf.raw_ops.TFRecordDatasetV2(
                filenames=path[None],
                compression_type=self.compression,
                buffer_size=tf.constant(READ_AHEAD, tf.int64),
                byte_offsets=offset[None],
            ),
            tf.TensorSpec((), tf.string),
        )
        records = records.skip(place - entry * INDEX_EVERY).take(take)
        return _readable(path).flat_map(lambda _: _whatever_fails(records, take))


class _Tables(NamedTuple):
    """What is known of the shards, each (shards,) but for index (shards + 1,) and offsets."""

    paths: tf.Tensor
    counts: tf.Tensor
    firsts: tf.Tensor  # number of the first record in the data set
    skips: tf.Tensor  # records of the file before it
    index: tf.Tensor  # where the offsets of a shard begin
    offsets: tf.Tensor


def of_manifest(data: Manifest, split: str, cache: Cache | None = None, **options) -> Shards:
    """The shards of a split.

    Args:
        cache: where shards of a bucket are kept once they were read; None: nowhere.

    Raises:
        UserError: no such split, an empty one, or a shard that is missing or of another size than
            the manifest says.
    """
    pieces = [
        Piece(data.path(shard), shard.examples, 0, shard.offsets, shard.bytes)
        for shard in data.shards(split)
    ]
    pieces = checked(pieces)
    if not cache:
        return Shards(pieces, data.compression, **options)
    expected = {data.path(s): Stored(s.bytes, s.crc32c) for s in data.shards(split)}
    if not all(stored.crc32c for stored in expected.values()):
        raise UserError(
            f"The manifest in {data.folder} has no checksums, which data.cache_dir needs."
        )

    needed = sum(sorted(stored.bytes for stored in expected.values())[-AT_MOST:])
    if cache.limit < needed:
        raise UserError(
            f"data.cache_gb is {cache.limit / 2**30:g}, and the {min(AT_MOST, len(pieces))} shards "
            f"that may be read at once have {needed / 2**30:.3g} GiB: give the cache that much, "
            "or leave data.cache_dir out."
        )

    def local(path: bytes, reader: int) -> bytes:
        return str(cache.hold(path.decode(), expected[path.decode()], int(reader))).encode()

    return Shards(pieces, data.compression, local=local, **options)


def _whatever_fails(records: tf.data.Dataset, count: tf.Tensor) -> tf.data.Dataset:
    """So many records, "" for those that are missing, each with a number that means nothing.

    An attempt that fails takes a number, too, and none is left after one more than there are
    records: `ignore_errors` alone tries a file that cannot be opened again without end.
    """
    attempts = tf.data.Dataset.zip(records, tf.data.Dataset.range(count + 1))
    lost = tf.data.Dataset.from_tensors(("", tf.constant(-1, tf.int64))).repeat()
    return attempts.ignore_errors(log_warning=False).concatenate(lost).take(count)


def _readable(path: tf.Tensor) -> tf.data.Dataset:
    """One element, or the error of a file that cannot be opened: so it is known by its name."""
    first = tf.data.FixedLengthRecordDataset(path, record_bytes=1, buffer_size=1)
    return first.concatenate(tf.data.Dataset.from_tensors("")).take(1)


def checked(pieces: list[Piece]) -> list[Piece]:
    """The pieces with the sizes of their files.

    Raises:
        UserError: a file is missing or of another size than expected.
    """
    with ThreadPoolExecutor(32) as pool:
        sizes = list(pool.map(lambda piece: files.size(piece.path), pieces))
    for piece, size in zip(pieces, sizes):
        if size is None:
            raise UserError(f"The shard {piece.path} is missing: the manifest names it.")
        if piece.bytes is not None and size != piece.bytes:
            raise UserError(
                f"The shard {piece.path} has {size:,} bytes, and had {piece.bytes:,} when its "
                "manifest was written: convert the data set again, or restore the file."
            )
    return [dataclasses.replace(piece, bytes=size) for piece, size in zip(pieces, sizes)]


def _key(run: tf.Tensor, epoch: tf.Tensor, which: tf.Tensor) -> tf.Tensor:
    """(3,), int32: the key of one permutation of a run."""
    words = order.seeds(run[None], epoch[None], which[None])[0]
    return tf.concat([words, tf.cast(epoch % (1 << 30), tf.int32)[None]], 0)
