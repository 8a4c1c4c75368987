"""CRC32C, the checksum that buckets and TFRecord files use."""

from typing import Protocol

import google_crc32c


class Readable(Protocol):
    """A file open for reading bytes."""

    def read(self, size: int, /) -> bytes: ...


def crc32c(file: Readable) -> str:
    """Returns the CRC32C of the rest of an open file, as eight hexadecimal digits."""
    crc = google_crc32c.Checksum()
    while chunk := file.read(1 << 20):
        crc.update(chunk)
    return crc.digest().hex()
