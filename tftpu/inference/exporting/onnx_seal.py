"""The checksum of an exported ONNX file, in its metadata: ONNX Runtime runs damaged weights."""

import google_crc32c

KEY = "crc32c"
_BLANK = "0" * 8
# A string of the metadata in the wire format of protobuf: its key, and before its value.
_ENTRY = bytes([0x0A, len(KEY)]) + KEY.encode() + bytes([0x12, len(_BLANK)])


def blank_entry() -> dict[str, str]:
    """Returns the entry of the metadata that `seal` fills in."""
    return {"key": KEY, "value": _BLANK}


def seal(data: bytes) -> bytes:
    """Returns the content of a file with `blank_entry`, with the checksum of the rest in it."""
    before, after = _around(data)
    return before + f"{_checksum(before, after):08x}".encode() + after


def is_intact(data: bytes) -> bool:
    """Returns whether a file is as it was sealed; one that never was is, too."""
    if _ENTRY not in data:
        return True
    before, after = _around(data)
    said = data[len(before) : len(before) + len(_BLANK)]
    return said == f"{_checksum(before, after):08x}".encode()


def _around(data: bytes) -> tuple[bytes, bytes]:
    end = data.rindex(_ENTRY) + len(_ENTRY)
    return data[:end], data[end + len(_BLANK) :]


def _checksum(before: bytes, after: bytes) -> int:
    return google_crc32c.extend(google_crc32c.value(before), after)
