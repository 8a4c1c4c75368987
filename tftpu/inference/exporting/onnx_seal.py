"""The checksum in an ONNX file's metadata, needed because ONNX Runtime runs damaged weights.

A file may have 2 GB, so its content is processed in pieces, without a second copy in memory.
"""

from pathlib import Path

import google_crc32c

from tftpu.storage.pieces import cut_pieces

KEY = "crc32c"
_BLANK = "0" * 8
# An entry of the metadata in protobuf's wire format: the key, and the header of its value.
_ENTRY = bytes([0x0A, len(KEY)]) + KEY.encode() + bytes([0x12, len(_BLANK)])


def make_blank_entry() -> dict[str, str]:
    """Returns the blank metadata entry that `write_sealed` fills in."""
    return {"key": KEY, "value": _BLANK}


def write_sealed(path: Path, data: bytes) -> None:
    """Writes a serialized model; the checksum of the other bytes replaces its blank value."""
    before, _, after = _split(data)
    with path.open("wb") as file:
        file.writelines([before, _compute_checksum(before, after), after])


def is_intact(data: bytes) -> bool:
    """Returns whether a file's content matches its checksum; True if it has no checksum."""
    if _ENTRY not in data:
        return True
    before, said, after = _split(data)
    return said == _compute_checksum(before, after)


def _split(data: bytes) -> tuple[memoryview, memoryview, memoryview]:
    """Returns the bytes before the checksum, the checksum, and the bytes after it."""
    begin = data.rindex(_ENTRY) + len(_ENTRY)
    end, view = begin + len(_BLANK), memoryview(data)
    return view[:begin], view[begin:end], view[end:]


def _compute_checksum(before: memoryview, after: memoryview) -> bytes:
    crc32c = 0
    for piece in cut_pieces([before, after]):
        crc32c = google_crc32c.extend(crc32c, piece)
    return f"{crc32c:08x}".encode()
