"""TFRecord files without TensorFlow: written byte for byte as TensorFlow does, scanned by record.

A record is its length (8 bytes, little-endian), the masked CRC32C of the length, the data, and the
masked CRC32C of the data.
"""

import contextlib
import gzip
import os
import struct
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO

import google_crc32c

from tftpu.errors import UserError
from tftpu.input_pipelines.formats.manifest import INDEX_EVERY, Shard
from tftpu.storage import checksums, files

_MASK = 0xA282EAD8
OVERHEAD = 16  # bytes of a record in addition to its data


def frame(record: bytes) -> bytes:
    """Returns a record as the file holds it: with its length and both checksums."""
    length = struct.pack("<Q", len(record))
    return b"".join(
        (
            length,
            struct.pack("<I", _masked_crc(length)),
            record,
            struct.pack("<I", _masked_crc(record)),
        )
    )


def write(path: str, records: Iterable[bytes], compression: str = "") -> Shard:
    """Writes a local file of records atomically; equal records give equal bytes.

    Args:
        path: of the file.
        records: its records, in order.
        compression: "" or "GZIP".

    Returns:
        The shard, named after the file, with its size, checksum and index.
    """
    folder, name = os.path.split(path)
    temporary = os.path.join(folder, f".{name}.{os.getpid()}.tmp")
    examples, offsets, position = 0, [], 0
    try:
        with open(temporary, "wb") as raw:
            with _compressed(raw, compression) as target:
                for record in records:
                    if examples % INDEX_EVERY == 0:
                        offsets.append(position)
                    framed = frame(record)
                    target.write(framed)
                    position += len(framed)
                    examples += 1
            raw.flush()
            os.fsync(raw.fileno())
        size, crc = os.path.getsize(temporary), checksum(temporary)
        os.replace(temporary, path)
    except BaseException:
        if os.path.exists(temporary):
            os.unlink(temporary)
        raise
    return Shard(name, examples, size, crc, () if compression else tuple(offsets))


def checksum(path: str) -> str:
    """Returns the CRC32C of a file's bytes as eight hexadecimal digits."""
    with opened(path) as file:
        return checksums.crc32c(file)


def scan(path: str, compression: str = "") -> Shard:
    """Returns the shard that a file holds, after reading every record and checking its checksums.

    Raises:
        UserError: the file is missing, or a record is corrupt; names the file and the record.
    """
    examples, offsets = 0, []
    for number, (position, _) in enumerate(records(path, compression)):
        if number % INDEX_EVERY == 0:
            offsets.append(position)
        examples += 1
    size = files.size(path) or 0
    return Shard(path, examples, size, checksum(path), () if compression else tuple(offsets))


def records(path: str, compression: str = "") -> Iterator[tuple[int, bytes]]:
    """Yields each record of a file with its position in the (decompressed) file.

    Raises:
        UserError: the file is missing, or a record is corrupt; names the file and the record.
    """
    number, position = 0, 0
    with opened(path) as raw:
        file = gzip.GzipFile(fileobj=raw) if compression == "GZIP" else raw
        while True:
            try:
                record = _next(file)
            except (ValueError, OSError, EOFError) as error:
                raise UserError(f"{path}: record {number} is corrupt: {error}.") from error
            if record is None:
                return
            yield position, record
            number, position = number + 1, position + len(record) + OVERHEAD


def opened(path: str) -> BinaryIO:
    """Opens a file, local or in a bucket, for reading.

    Raises:
        UserError: there is no such file.
    """
    if files.is_remote(path):
        import tensorflow as tf

        if not tf.io.gfile.exists(path):
            raise UserError(f"There is no file {path}.")
        remote: Any = tf.io.gfile.GFile(path, "rb")
        return remote
    try:
        return open(path, "rb")
    except OSError as error:
        raise UserError(f"The file {path} cannot be read: {error.strerror}.") from error


@contextlib.contextmanager
def _compressed(raw: BinaryIO, compression: str) -> Iterator[BinaryIO | gzip.GzipFile]:
    if compression != "GZIP":
        yield raw
        return
    # Without a name and a time, which would differ from one run to the next.
    with gzip.GzipFile("", "wb", compresslevel=6, fileobj=raw, mtime=0) as target:
        yield target


def _next(file: BinaryIO | gzip.GzipFile) -> bytes | None:
    """Returns the next record, or None at the end of the file.

    Raises:
        ValueError: the record is truncated, or a checksum does not match.
    """
    header = file.read(12)
    if not header:
        return None
    if len(header) < 12:
        raise ValueError("the file ends inside a length")
    if struct.unpack("<I", header[8:])[0] != _masked_crc(header[:8]):
        raise ValueError("the checksum of its length does not match")
    (length,) = struct.unpack("<Q", header[:8])
    data = file.read(length + 4)
    if len(data) < length + 4:
        raise ValueError("the file ends inside it")
    if struct.unpack("<I", data[-4:])[0] != _masked_crc(data[:-4]):
        raise ValueError("the checksum of its data does not match")
    return data[:-4]


def _masked_crc(data: bytes) -> int:
    crc = google_crc32c.value(data)
    return ((crc >> 15 | crc << 17) + _MASK) & 0xFFFFFFFF
