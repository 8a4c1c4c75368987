"""CRC32C, the checksum that buckets and TFRecord files use."""

import re
from typing import Protocol

import google_crc32c

_SEAL = re.compile(rb', "crc32c": "([0-9a-f]{8})"\}\Z')


class Readable(Protocol):
    """A file open for reading bytes."""

    def read(self, size: int, /) -> bytes: ...


def crc32c(file: Readable) -> str:
    """Returns the CRC32C of the rest of an open file, as eight hexadecimal digits."""
    crc = google_crc32c.Checksum()
    while chunk := file.read(1 << 20):
        crc.update(chunk)
    return crc.digest().hex()


def sealed(text: str) -> bytes:
    """Returns the text of a JSON object, or of lines of them, with the text's CRC32C.

    It is a further field, the last one of the last object.
    """
    return f'{text[:-1]}, "crc32c": "{google_crc32c.value(text.encode()):08x}"}}'.encode()


def check_seal(data: bytes) -> bool:
    """Returns whether a text was sealed; raises ValueError if it was changed since."""
    found = _SEAL.search(data)
    if found and int(found[1], 16) != google_crc32c.value(data[: found.start()] + b"}"):
        raise ValueError("it does not match its checksum")
    return found is not None
