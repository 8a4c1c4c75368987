"""TFRecord shards as a source of training examples: read in parallel, from any step on."""

import dataclasses
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tftpu.amounts import format_size
from tftpu.errors import UserError
from tftpu.input_pipelines.formats import tfrecord
from tftpu.input_pipelines.formats.manifest import INDEX_EVERY, Manifest
from tftpu.input_pipelines.reading import damage, order, remote
from tftpu.input_pipelines.reading.cache import Cache
from tftpu.input_pipelines.reading.order import Tracks
from tftpu.input_pipelines.tensors import Tensor
from tftpu.storage import files
from tftpu.storage.buckets import Stored

AT_MOST = 64  # maximum number of tracks; with more hosts, several read the same records
SHUFFLE = 16_384  # examples in the shuffle windows of all tracks together
# Shards that one pass reads at a time. tf.data opens at most three times as many before it
# finishes the first, so open shards have different reader numbers (shard number % AT_MOST).
AT_ONCE = 16
READ_AHEAD = 1 << 20  # bytes of a file that are read ahead

Local = Callable[[bytes, int], bytes]


@dataclasses.dataclass
class Piece:
    """Consecutive records of one file: all of them or a part.

    Args:
        path: the path of the file, local or `gs://`.
        examples: number of records in the piece.
        first: number of its first record in the file.
        offsets: as in `manifest.Shard`; empty: the file is read from its beginning.
        bytes: size of the file; None: unknown.
    """

    path: str
    examples: int
    first: int = 0
    offsets: tuple[int, ...] = ()
    bytes: int | None = None


class Shards:
    """The records of TFRecord shards, in an order that depends only on seed, epoch and position.

    `order` explains how. A record that cannot be read (missing file, bad checksum, truncated) is
    replaced by an empty string.

    Args:
        pieces: the pieces of the files, in order.
        compression: "" or "GZIP". A compressed file is always read from its beginning.
        shuffle: the number of examples in the windows of all tracks together; 1 keeps each file's
            order.
        tracks: the largest number of tracks of an epoch, each of which reads one file at a time.
        local: a function that maps a file's path (bytes) and the number of its reader (below
            `AT_MOST`) to a local path, which is valid until the same reader requests another file;
            None: files are read where they are.

    Raises:
        UserError: there are no examples.
    """

    def __init__(
        self,
        pieces: list[Piece],
        compression: str = "",
        shuffle: int = SHUFFLE,
        tracks: int = AT_MOST,
        local: Local | None = None,
    ):
        self.pieces = [piece for piece in pieces if piece.examples]
        self.compression = compression
        self.shuffle = shuffle
        self.at_most = tracks
        self.local = local
        self._lost: dict[str, damage.Damage] = {}
        self._on_disk = bool(local) or not any(files.is_remote(p.path) for p in self.pieces)
        self.count = sum(piece.examples for piece in self.pieces)
        if not self.count:
            raise UserError("The shards have no examples.")
        counts = np.array([piece.examples for piece in self.pieces])
        index = np.cumsum([0, *(len(piece.offsets) for piece in self.pieces)])
        # As tensors, all graphs share these tables; constants would be copied with each graph.
        self._tables = _ShardTensors(
            paths=tf.constant([piece.path for piece in self.pieces]),
            counts=tf.constant(counts, tf.int64),
            firsts=tf.constant(np.cumsum(counts) - counts, tf.int64),
            skips=tf.constant([piece.first for piece in self.pieces], tf.int64),
            index=tf.constant(index, tf.int64),
            offsets=tf.constant([o for p in self.pieces for o in p.offsets] or [0], tf.int64),
        )

    @property
    def state(self) -> list[tuple[str, int, int, int | None]]:
        """For each piece: FOLDER/FILE, number of records, first record, and size of the file."""
        return [
            ("/".join(piece.path.split("/")[-2:]), piece.examples, piece.first, piece.bytes)
            for piece in self.pieces
        ]

    def describe_records(self, numbers: Tensor) -> Tensor:
        """Returns the names of records for error messages: "record NUMBER of FILE"."""
        shard = tf.searchsorted(self._tables.firsts, numbers, side="right") - 1
        place = numbers - tf.gather(self._tables.firsts - self._tables.skips, shard)
        path = tf.gather(self._tables.paths, shard)
        return tf.strings.join(["record ", tf.strings.as_string(place), " of ", path])

    def locate_records(self, numbers: range) -> tuple[list[str], list[int]]:
        """Returns the path of each record's file, and the record's number in that file."""
        firsts = self._tables.firsts.numpy()
        shards = np.searchsorted(firsts, np.arange(numbers.start, numbers.stop), side="right") - 1
        found = [(self.pieces[shard], n - int(firsts[shard])) for shard, n in zip(shards, numbers)]
        return [piece.path for piece, _ in found], [piece.first + n for piece, n in found]

    def explain_loss(self, number: int) -> str:
        """Returns why a record could not be read, or "" if it can be read now.

        Records after a corrupt one are lost as well, because TensorFlow reads no further.

        Raises:
            OSError: the bucket still cannot be reached.
        """
        firsts = self._tables.firsts.numpy()
        shard = int(np.searchsorted(firsts, number, side="right")) - 1
        piece = self.pieces[shard]
        if piece.path not in self._lost:
            self._lost[piece.path] = damage.scan_file(piece.path, self.compression)
        return self._lost[piece.path].describe_record(int(piece.first + number - firsts[shard]))

    def plan_tracks(self, global_batch_size: int) -> Tracks:
        """Returns the division of an epoch into tracks, for a global batch size."""
        number = order.choose_track_count(global_batch_size, len(self.pieces), self.at_most)
        return Tracks(self.count, global_batch_size, number)

    def compute_window(self, global_batch_size: int) -> int:
        """Returns the number of examples that one track shuffles at a time."""
        return max(1, self.shuffle // self.plan_tracks(global_batch_size).number)

    def estimate_memory(self, global_batch_size: int, hosts: int = 1) -> int:
        """Estimates how many bytes of records a host keeps in memory.

        Each of its tracks keeps two shuffle windows and the bytes that were read ahead.
        """
        tracks = self.plan_tracks(global_batch_size)
        own = -(-tracks.number // hosts)
        record = sum(piece.bytes or 0 for piece in self.pieces) / self.count
        window = min(self.compute_window(global_batch_size), -(-self.count // tracks.number))
        return int(own * (2 * window * record + READ_AHEAD))

    def draw_records(
        self, global_batch_size: int, seed: int, step: int, host: int = 0, hosts: int = 1
    ) -> tf.data.Dataset:
        """Returns one host's examples of each global batch, from a step on.

        Returns:
            An endless dataset of records (n,), string, their numbers in the data set (n,), int64,
            and seeds (n, 2), int32, with n = `global_batch_size` // `hosts`.
        """
        tracks = self.plan_tracks(global_batch_size)
        share = global_batch_size // hosts
        first = host * share // tracks.width
        last = -(-(host + 1) * share // tracks.width)
        skipped = host * share - first * tracks.width  # 0 unless hosts share a track

        def read_track(number: Tensor) -> tf.data.Dataset:
            return self._read_track(tracks, number, seed, step)

        examples = tf.data.Dataset.range(first, last).interleave(
            read_track,
            cycle_length=last - first,
            block_length=tracks.width,
            num_parallel_calls=last - first,
            deterministic=True,
        )
        read = (last - first) * tracks.width
        whole = examples.batch(read, drop_remainder=True)
        if read == share:
            return whole
        return whole.map(lambda *parts: tuple(part[skipped : skipped + share] for part in parts))

    def iterate_once(self) -> tf.data.Dataset:
        """Returns every record once, with its number, in a fixed order; reads files in parallel."""
        shards = tf.data.Dataset.range(len(self.pieces))
        width = min(len(self.pieces), AT_ONCE)
        read = functools.partial(self._read_between, first=np.int64(0), last=np.int64(self.count))
        return shards.interleave(read, width, 16, width, deterministic=True)

    def read_range(self, first: Tensor, last: Tensor, size: int) -> tf.data.Dataset:
        """Returns batches of the records `first` to `last` - 1; see `pipeline.RecordSource`."""
        firsts = self._tables.firsts
        low = tf.searchsorted(firsts, first[None], side="right", out_type=tf.int64)[0] - 1
        high = tf.searchsorted(firsts, last[None], side="left", out_type=tf.int64)[0]

        def fill_batch(*batch: Tensor) -> tuple[Tensor, ...]:
            places = tf.minimum(tf.range(size), tf.size(batch[0]) - 1)
            return tuple(tf.gather(part, places) for part in batch)

        shards = tf.data.Dataset.range(low, high)
        return (
            shards.flat_map(lambda n: self._read_between(n, first, last))
            .batch(size)
            .map(fill_batch)
        )

    def _read_between(self, shard: Tensor, first: Any, last: Any) -> tf.data.Dataset:
        """Returns a shard's records with numbers in [`first`, `last`), and their numbers."""
        begin = self._tables.firsts[shard]
        first = tf.maximum(first, begin)
        last = tf.minimum(last, begin + self._tables.counts[shard])
        records = self._read(shard, first - begin, last - first, shard % AT_MOST)
        numbered = tf.data.Dataset.zip(records, tf.data.Dataset.range(first, last))
        return numbered.map(lambda read, number: (read[0], number))

    def _read_track(self, tracks: Tracks, track: Tensor, seed: int, step: int) -> tf.data.Dataset:
        """Returns an endless dataset of a track's examples, from a step on."""
        window = self.compute_window(tracks.global_batch_size)
        start, behind = tracks.locate_step(track, tf.convert_to_tensor(step, tf.int64))

        def read_epoch(epoch: Tensor) -> tf.data.Dataset:
            skipped = tf.where(epoch == start, behind, tf.constant(0, tf.int64))
            return self._read_epoch(tracks, track, epoch, skipped, window, seed)

        # The epochs start, start + 1, ... without end.
        return tf.data.Dataset.range(start, tf.int64.max).flat_map(read_epoch)

    def _read_epoch(
        self, tracks: Tracks, track: Tensor, epoch: Tensor, skipped: Tensor, window: int, seed: int
    ) -> tf.data.Dataset:
        """Returns a track's examples in one epoch, shuffled, without the first `skipped`."""
        run = tf.constant(seed, tf.int64)
        shards = tf.range(len(self.pieces), dtype=tf.int64)
        # The -1 keeps the order of the shards independent of the order in any window.
        row = order.permute_places(
            shards, len(self.pieces), _derive_key(run, epoch, tf.constant(-1, tf.int64))
        )
        counts: Tensor = tf.gather(self._tables.counts, row)
        ends: Tensor = tf.cumsum(counts)
        begins = ends - counts
        borders = tracks.compute_borders(epoch)
        begin, end = borders[track], borders[track + 1]
        first = skipped // window
        start = tf.minimum(begin + first * window, end)
        low: Tensor = tf.searchsorted(ends, start[None], side="right")[0]
        high: Tensor = tf.searchsorted(begins, end[None], side="left")[0]
        here = slice(low, tf.maximum(low, high))
        skips = tf.maximum(start - begins[here], 0)
        takes = tf.maximum(tf.minimum(end, ends[here]) - begins[here] - skips, 0)
        parts = tf.data.Dataset.from_tensor_slices((row[here], skips, takes))

        def read(*part: Tensor) -> tf.data.Dataset:
            shard, skip, take = part
            return self._read(shard, skip, take, track)

        windows = parts.flat_map(read).batch(window)
        firsts = tf.gather(self._tables.firsts, row)

        def shuffle(number: Tensor, found: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
            records, _ = found
            size = tf.size(records, tf.int64)
            place = order.permute_places(
                tf.range(size), size, _derive_key(run, epoch, number * tracks.number + track)
            )
            in_row = begin + number * window + place
            shard = tf.searchsorted(ends, in_row, side="right")
            example = in_row - tf.gather(begins, shard) + tf.gather(firsts, shard)
            seeds = order.derive_seeds(tf.fill([size], run), tf.fill([size], epoch), example)
            return tf.gather(records, place), example, seeds

        numbers = tf.data.Dataset.range(first, tf.int64.max)
        examples = tf.data.Dataset.zip(numbers, windows).map(shuffle).unbatch()
        return examples.skip(skipped - first * window)

    def _read(
        self, shard: Tensor, skip: Tensor | int, take: Tensor, reader: Tensor
    ) -> tf.data.Dataset:
        """Returns `take` records of a shard, with "" for each record that cannot be read.

        Elements are as in `damage.ignore_failures`.
        """
        tables = self._tables
        place = tables.skips[shard] + skip
        indexed = tables.index[shard + 1] > tables.index[shard]
        entry = tf.where(indexed, place // INDEX_EVERY, 0)
        found = tables.offsets[tf.where(indexed, tables.index[shard] + entry, 0)]
        offset: Tensor = tf.where(indexed, found, 0)
        path = tables.paths[shard]
        if self.local:
            path = tf.ensure_shape(tf.numpy_function(self.local, [path, reader], tf.string), ())
        skipped = place - entry * INDEX_EVERY
        records = self._read_from(path, offset, skipped + take).skip(skipped)
        return damage.probe_file(path).flat_map(lambda _: damage.ignore_failures(records, take))

    def _read_from(self, path: Tensor, offset: Tensor, count: Tensor) -> tf.data.Dataset:
        """Returns at most `count` records of a file from an offset on.

        TensorFlow never reads a record whose stated length is beyond the end of the file.
        """
        if not self.compression and not self._on_disk:
            return remote.read_records(path, offset, count)
        records = tf.data.experimental.from_variant(
            tf.raw_ops.TFRecordDatasetV2(
                filenames=path[None],
                compression_type=self.compression,
                buffer_size=tf.constant(READ_AHEAD, tf.int64),
                byte_offsets=offset[None],
            ),
            tf.TensorSpec((), tf.string),
        )
        # A compressed file is inflated in pieces, whatever length a record states.
        if self.compression:
            return records.take(count)
        return records.take(damage.count_readable(path, offset, count))


class _ShardTensors(NamedTuple):
    """Tables of the shards, (shards,), except `index`, (shards + 1,), and `offsets`, (entries,)."""

    paths: Tensor
    counts: Tensor
    firsts: Tensor  # each shard's first record, by its number in the data set
    skips: Tensor  # records of the shard's file that are before the shard
    index: Tensor  # the place in `offsets` of each shard's first entry
    offsets: Tensor


def from_manifest(
    data: Manifest,
    split: str,
    cache: Cache | None = None,
    shuffle: int = SHUFFLE,
) -> Shards:
    """Returns the shards of a split.

    Args:
        data: the data set.
        split: name of the split.
        cache: a cache that keeps a bucket's shards on a local disk after their first use; None: no
            cache.
        shuffle: as in `Shards`.

    Raises:
        UserError: there is no such split, it is empty, or a shard is missing or has another size
            than the manifest states; or `cache` is too small, or the manifest has no checksums.
    """
    pieces = [
        Piece(data.build_path(shard), shard.examples, 0, shard.offsets, shard.bytes)
        for shard in data.list_shards(split)
    ]
    pieces = check_pieces(pieces)
    local = _build_cached_reader(cache, data, split) if cache else None
    return Shards(pieces, data.compression, shuffle, local=local)


def _build_cached_reader(cache: Cache, data: Manifest, split: str) -> Local:
    """Returns a function that maps a shard's path to its copy in a cache.

    Raises:
        UserError: the manifest has no checksums, or the cache is too small.
    """
    expected = {data.build_path(s): Stored(s.bytes, s.crc32c) for s in data.list_shards(split)}
    if not all(stored.crc32c for stored in expected.values()):
        raise UserError(
            f"The manifest in {data.folder} has no checksums, but data.cache_dir needs them: "
            f"convert the data set again (--source=tfrecord:{data.folder}), or leave "
            "data.cache_dir out."
        )
    at_once = sorted(stored.bytes for stored in expected.values())[-AT_MOST:]
    if cache.limit < sum(at_once):
        raise UserError(
            f"data.cache_gb is {cache.limit / 2**30:g}, but the {len(at_once)} shards that may be "
            f"read at once have {format_size(sum(at_once))}: raise data.cache_gb to that size, or "
            "leave data.cache_dir out."
        )

    def fetch_path(path: bytes, reader: int) -> bytes:
        return str(cache.hold(path.decode(), expected[path.decode()], int(reader))).encode()

    return fetch_path


def check_pieces(pieces: list[Piece]) -> list[Piece]:
    """Checks that the files exist and have the expected sizes; returns the pieces with sizes.

    Raises:
        UserError: a file is missing, has another size, or is too small for its records.
    """
    with ThreadPoolExecutor(32) as pool:
        sizes = list(pool.map(lambda piece: files.find_size(piece.path), pieces))
    for piece, size in zip(pieces, sizes):
        if size is None:
            raise UserError(f"The manifest names the shard {piece.path}, but that file is missing.")
        if piece.bytes is not None and size != piece.bytes:
            raise UserError(
                f"The shard {piece.path} has {size:,} bytes, but it had {piece.bytes:,} bytes "
                "when its manifest was written. Convert the data set again, or restore the file."
            )
        if piece.examples > tfrecord.compute_max_records(size):
            raise UserError(
                f"The shard {piece.path} has {size:,} bytes, which cannot be {piece.examples:,} "
                "records: its manifest is damaged."
            )
    return [dataclasses.replace(piece, bytes=size) for piece, size in zip(pieces, sizes)]


def _derive_key(run: Tensor, epoch: Tensor, which: Tensor) -> Tensor:
    """Returns the key, (3,), int32, of the permutation number `which` of an epoch of a run."""
    words = order.derive_seeds(run[None], epoch[None], which[None])[0]
    return tf.concat([words, tf.cast(epoch % (1 << 30), tf.int32)[None]], 0)
