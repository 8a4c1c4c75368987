"""Files that were made to harm their reader."""

import struct
from pathlib import Path

import google_crc32c


def masked(data: bytes) -> bytes:
    """Returns the masked CRC32C of TFRecord files, by its definition."""
    crc = google_crc32c.value(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def stated_length(length: int) -> bytes:
    """Returns the begin of a record: a length of any size, with its valid checksum."""
    header = struct.pack("<Q", length)
    return header + masked(header)


def with_length(path: Path, record: int, length: int) -> None:
    """Makes a record of a file state another length, and changes nothing else.

    Args:
        path: of a TFRecord file.
        record: its number.
        length: what it states then.
    """
    data, position = bytearray(path.read_bytes()), 0
    for _ in range(record):
        position += struct.unpack_from("<Q", data, position)[0] + 16
    data[position : position + 12] = stated_length(length)
    path.write_bytes(data)
