"""TFRecord files without TensorFlow: written byte for byte the same, scanned record by record.

A record is its length (8 bytes, little-endian), the masked CRC32C of those, the data, and the
masked CRC32C of the data.
"""

import gzip
import os
import struct
from collections.abc import Iterable, Iterator
from typing import BinaryIO

import google_crc32c

from tftpu.errors import UserError
from tftpu.input_pipelines.formats.manifest import INDEX_EVERY, Shard
from tftpu.storage import files

_MASK = 0xA282EAD8
OVERHEAD = 16  # bytes of a record besides its data


def frame(record: bytes) -> bytes:
    """A record as it stands in the file."""
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
    """Writes a local file of records, whole or not at all; the same bytes for the same records.

    Returns:
        The shard, by its file's name, with size, checksum and index.
    """
    folder, name = os.path.split(path)
    temporary = os.path.join(folder, f".{name}.{os.getpid()}.tmp")
    examples, offsets, position = 0, [], 0
    try:
        with open(temporary, "wb") as raw:
            target = raw
            if compression == "GZIP":  # without name and time, which would differ
                target = gzip.GzipFile("", "wb", compresslevel=6, fileobj=raw, mtime=0)
            for record in records:
                if examples % INDEX_EVERY == 0:
                    offsets.append(position)
                framed = frame(record)
                target.write(framed)
                position += len(framed)
                examples += 1
            if target is not raw:
                target.close()
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
    """CRC32C of a file's bytes, eight hexadecimal digits."""
    crc = google_crc32c.Checksum()
    with opened(path) as file:
        while chunk := file.read(1 << 20):
            crc.update(chunk)
    return crc.digest().hex()


def scan(path: str, compression: str = "") -> Shard:
    """A shard as its file has it: every record is read and its checksums are compared.

    Raises:
        UserError: the file is missing, or a record is corrupt; it names both.
    """
    examples, offsets = 0, []
    for number, (position, _) in enumerate(records(path, compression)):
        if number % INDEX_EVERY == 0:
            offsets.append(position)
        examples += 1
    with opened(path) as file:
        size = file.seek(0, os.SEEK_END) if not files.is_remote(path) else file.size()
    return Shard(path, examples, size, checksum(path), () if compression else tuple(offsets))


def records(path: str, compression: str = "") -> Iterator[tuple[int, bytes]]:
    """Each record of a file with its position in the (decompressed) file.

    Raises:
        UserError: the file is missing, or a record is corrupt; it names both.
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
    """A file, local or in a bucket, open for reading.

    Raises:
        UserError: there is no such file.
    """
    if files.is_remote(path):
        import tensorflow as tf

        if not tf.io.gfile.exists(path):
            raise UserError(f"There is no file {path}.")
        return tf.io.gfile.GFile(path, "rb")
    try:
        return open(path, "rb")
    except OSError as error:
        raise UserError(f"The file {path} cannot be read: {error.strerror}.") from error


def _next(file: BinaryIO) -> bytes | None:
    """The next record; None at the end.

    Raises:
        ValueError: it is cut off, or a checksum does not fit.
    """
    header = file.read(12)
    if not header:
        return None
    if len(header) < 12:
        raise ValueError("the file ends inside a length")
    if struct.unpack("<I", header[8:])[0] != _masked_crc(header[:8]):
        raise ValueError("the checksum of its length does not fit")
    (length,) = struct.unpack("<Q", header[:8])
    data = file.read(length + 4)
    if len(data) < length + 4:
        raise ValueError("the file ends inside it")
    if struct.unpack("<I", data[-4:])[0] != _masked_crc(data[:-4]):
        raise ValueError("the checksum of its data does not fit")
    return data[:-4]


def _masked_crc(data: bytes) -> int:
    crc = google_crc32c.value(data)
    return ((crc >> 15 | crc << 17) + _MASK) & 0xFFFFFFFF
