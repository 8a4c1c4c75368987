"""Reads and writes TFRecord files without TensorFlow, byte for byte as TensorFlow does.

A record is its length (8 bytes, little-endian), the masked CRC32C of the length, the data, and the
masked CRC32C of the data.
"""

import contextlib
import functools
import gzip
import io
import logging
import os
import struct
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import BinaryIO

import google_crc32c

from tftpu.amounts import format_size
from tftpu.errors import UserError
from tftpu.input_pipelines.formats.manifest import INDEX_EVERY, Shard
from tftpu.storage import buckets, files
from tftpu.storage.buckets import BucketError, MissingError

_MASK = 0xA282EAD8
OVERHEAD = 16  # bytes that a record takes in addition to its data
_HEADER = 12  # bytes of a record's length and its checksum
_PIECE = 1 << 20  # bytes read or written at a time
_DEFLATE = 1032  # the most bytes that one byte of a GZIP file can become
# A record of a GZIP file counts as corrupt if it is larger than _SMALL, and larger than the whole
# file by more than a factor of _RECORD_DEFLATE.
_RECORD_DEFLATE = 100
_SMALL = 64 * 2**20
_LONG = 10.0  # seconds of counting records after which a message is logged

_log = logging.getLogger(__name__)


def frame_record(record: bytes) -> bytes:
    """Returns a record as files store it, with its length and both checksums."""
    return b"".join(
        (_encode_header(len(record)), record, struct.pack("<I", _compute_masked_crc(record)))
    )


def frame_records(begin: Callable[[int], bytes], rests: Iterable[bytes]) -> bytes:
    """Returns many records as files store them, from the two parts of each; see `frame_record`.

    Args:
        begin: a function that returns the first part of a record, given the size of the second.
        rests: the second part of each record.
    """

    @functools.lru_cache(maxsize=4096)
    def encode_head(size: int) -> tuple[bytes, int]:
        first = begin(size)
        return _encode_header(len(first) + size) + first, google_crc32c.value(first)

    parts, checksum, pack = [], google_crc32c.extend, struct.Struct("<I").pack
    for rest in rests:
        before, crc = encode_head(len(rest))
        parts += (before, rest, pack(_mask_crc(checksum(crc, rest))))
    return b"".join(parts)


@functools.lru_cache(maxsize=4096)  # the records of one data set have few different lengths
def _encode_header(size: int) -> bytes:
    length = struct.pack("<Q", size)
    return length + struct.pack("<I", _compute_masked_crc(length))


def unframe_record(framed: bytes) -> bytes:
    """Returns the record inside the result of `frame_record`.

    Raises:
        ValueError: `framed` is not complete, or a checksum does not match.
    """
    file = io.BytesIO(framed)
    record = _read_next(file, len(framed), len(framed))
    if record is None or file.read(1):
        raise ValueError("its length does not match")
    return record


def write(path: str, records: Iterable[bytes], compression: str = "") -> Shard:
    """Writes a local file of records atomically; equal records give equal bytes.

    Args:
        path: the path of the file.
        records: the records, in order.
        compression: "" or "GZIP".

    Returns:
        The shard, named after the file, with its size, checksum and index.

    Raises:
        OSError: the file could not be written. An earlier file of that name is unchanged.
    """
    written = _RecordPieces(records, compression)
    files.write_whole(path, written)
    offsets = () if compression else tuple(written.offsets)
    return Shard(
        os.path.basename(path), written.examples, written.size, f"{written.crc32c:08x}", offsets
    )


class _RecordPieces:
    """The content of a TFRecord file, in pieces; iterating updates size, checksum and index."""

    def __init__(self, records: Iterable[bytes], compression: str):
        self._records, self._compression = records, compression
        self.examples = self.size = self.crc32c = 0
        self.offsets: list[int] = []

    def __iter__(self) -> Iterator[bytes]:
        for piece in self._encode_pieces():
            self.size += len(piece)
            self.crc32c = google_crc32c.extend(self.crc32c, piece)
            yield piece

    def _encode_pieces(self) -> Iterator[bytes]:
        pending, position = io.BytesIO(), 0
        with _compress(pending, self._compression) as target:
            for record in self._records:
                if self.examples % INDEX_EVERY == 0:
                    self.offsets.append(position)
                framed = frame_record(record)
                target.write(framed)
                position += len(framed)
                self.examples += 1
                if pending.tell() >= _PIECE:
                    yield _take_written(pending)
        yield _take_written(pending)


def _take_written(pending: io.BytesIO) -> bytes:
    """Returns the bytes written so far, and empties the buffer."""
    piece = pending.getvalue()
    pending.seek(0)
    pending.truncate()
    return piece


def compute_checksum(path: str) -> str:
    """Returns the CRC32C of a file's bytes as eight hexadecimal digits."""
    with open_file(path) as file:
        return buckets.compute_crc32c(file)


def scan_shard(path: str, compression: str = "") -> Shard:
    """Reads every record of a file, checks the checksums, and returns the shard, named `path`.

    Raises:
        UserError: the file is missing, or a record is corrupt; the message names the file and the
            record.
    """
    examples, offsets, size = 0, [], files.find_size(path) or 0
    started, due = time.monotonic(), _LONG
    for number, (position, _) in enumerate(read_records(path, compression)):
        if number % INDEX_EVERY == 0:
            offsets.append(position)
        examples += 1
        seconds = time.monotonic() - started
        if seconds >= due:
            due *= 2
            _log.warning(
                "Counting the records of %s: %s so far (%s) in %.0f s; the file has %s%s.",
                *(path, f"{examples:,}", format_size(position), seconds),
                *(format_size(size), ", compressed" if compression else ""),
            )
    return Shard(
        path, examples, size, compute_checksum(path), () if compression else tuple(offsets)
    )


def read_records(path: str, compression: str = "", first: int = 0) -> Iterator[tuple[int, bytes]]:
    """Yields each record of a file with its position in the (decompressed) file.

    Args:
        path: the path of the file.
        compression: "" or "GZIP".
        first: the position of the first record to read, in a file that is not compressed.

    Raises:
        UserError: the file is missing, or a record is corrupt; the message names the file and the
            record, counted from the first one that was read.
        BucketError: the bucket cannot be reached.
    """
    number, position = 0, first
    with open_file(path) as raw:
        size = files.find_size(path) or 0
        raw.seek(first)
        if compression == "GZIP":
            file, room = gzip.GzipFile(fileobj=raw), _DEFLATE * size
            largest = max(_SMALL, _RECORD_DEFLATE * size)
        else:
            file, room, largest = raw, size, size
        while True:
            try:
                record = _read_next(file, room - position, largest)
            except BucketError:  # an unreachable bucket says nothing about the record
                raise
            except (ValueError, OSError, EOFError, zlib.error) as error:
                raise UserError(f"{path}: record {number} is corrupt: {error}.") from error
            if record is None:
                return
            yield position, record
            number, position = number + 1, position + len(record) + OVERHEAD


def find_compression(path: str) -> str:
    """Returns "GZIP" for a compressed file, otherwise "".

    Raises:
        UserError: the file is missing or cannot be read.
    """
    with open_file(path) as file:
        header = file.read(_HEADER)
    packed = header[:2] == b"\x1f\x8b" and len(header) == _HEADER and not _is_length(header)
    return "GZIP" if packed else ""


def compute_max_records(size: int) -> int:
    """Returns the most records that a file of this many bytes can hold, compressed or not."""
    return _DEFLATE * size // OVERHEAD


def count_readable(path: str, position: int, count: int) -> int:
    """Returns how many records of a file TensorFlow can read without crashing this process.

    TensorFlow's reader allocates the length that a record states before it reads the record, and
    crashes if the memory is too small. So the lengths alone are read first and compared with the
    file. A length whose checksum does not match is left to TensorFlow, which reports it.

    Args:
        path: the path of a local file that is not compressed.
        position: the position of the first record in the file.
        count: the number of wanted records.

    Returns:
        `count`, or fewer if a record states a length beyond the end of the file.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return count  # TensorFlow raises an error that names the file
    try:
        size = os.fstat(descriptor).st_size
        for number in range(count):
            header = os.pread(descriptor, _HEADER, position)
            if len(header) < _HEADER:
                break
            length = int.from_bytes(header[:8], "little")
            if length > size - position - OVERHEAD and _is_length(header):
                return number
            position += length + OVERHEAD
            if position > size:
                break
    finally:
        os.close(descriptor)
    return count


def open_file(path: str) -> BinaryIO:
    """Opens a file, local or in a bucket, for reading.

    Raises:
        UserError: there is no such file, or it cannot be read.
    """
    try:
        return files.open_file(path)
    except MissingError as error:
        near = files.suggest_existing(path)
        raise UserError(f"There is no file {path}.{near}") from error
    except BucketError:
        raise
    except OSError as error:
        raise UserError(f"The file {path} cannot be read: {error.strerror or error}.") from error


@contextlib.contextmanager
def _compress(raw: BinaryIO, compression: str) -> Iterator[BinaryIO | gzip.GzipFile]:
    if compression != "GZIP":
        yield raw
        return
    # The header holds neither a name nor a time, which would differ between runs.
    with gzip.GzipFile("", "wb", compresslevel=6, fileobj=raw, mtime=0) as target:
        yield target


def _read_next(file: BinaryIO | gzip.GzipFile, left: int, largest: int) -> bytes | None:
    """Returns the next record, or None at the end of the file.

    Args:
        file: the file, at the beginning of a record.
        left: the most bytes that the rest of the file can have.
        largest: the most bytes of a record.

    Raises:
        ValueError: the record is truncated or larger than `largest`, or a checksum does not match.
    """
    header = file.read(_HEADER)
    if not header:
        return None
    if len(header) < _HEADER:
        raise ValueError("the file ends inside a length")
    if not _is_length(header):
        raise ValueError("the checksum of its length does not match")
    length = int.from_bytes(header[:8], "little")
    if length > left - OVERHEAD:
        raise ValueError(f"the file ends inside it, although its length is {length:,} bytes")
    if length > largest:
        raise ValueError(
            f"its length of {length:,} bytes is more than {_RECORD_DEFLATE} times the size of the "
            "whole compressed file"
        )
    data = _read_exactly(file, length + 4)
    if struct.unpack("<I", data[-4:])[0] != _compute_masked_crc(data[:-4]):
        raise ValueError("the checksum of its data does not match")
    return data[:-4]


def _read_exactly(file: BinaryIO | gzip.GzipFile, count: int) -> bytes:
    """Reads this many bytes in pieces, so that it never allocates much more than the file has."""
    pieces = []
    while count:
        pieces.append(file.read(min(count, _PIECE)))
        if not pieces[-1]:
            raise ValueError("the file ends inside it")
        count -= len(pieces[-1])
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _is_length(header: bytes) -> bool:
    """Returns whether a header's checksum matches its length."""
    return struct.unpack("<I", header[8:])[0] == _compute_masked_crc(header[:8])


def _compute_masked_crc(data: bytes) -> int:
    return _mask_crc(google_crc32c.value(data))


def _mask_crc(crc: int) -> int:
    return ((crc >> 15 | crc << 17) + _MASK) & 0xFFFFFFFF
