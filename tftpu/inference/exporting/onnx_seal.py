"""The checksum of an exported ONNX file, in its metadata: ONNX Runtime runs damaged weights.

A file has up to 2 GB: it is read and written in pieces, not copied.
"""

from pathlib import Path

import google_crc32c

from tftpu.storage.safetensors import cut_pieces

KEY = "crc32c"
_BLANK = "0" * 8
# A string of the metadata in the wire format of protobuf: its key, and before its value.
_ENTRY = bytes([0x0A, len(KEY)]) + KEY.encode() + bytes([0x12, len(_BLANK)])


def make_blank_entry() -> dict[str, str]:
    """Returns the entry of the metadata that `write_sealed` fills in."""
    return {"key": KEY, "value": _BLANK}


def write_sealed(path: Path, data: bytes) -> None:
    """Writes the content of a file that has a blank entry, with the checksum of the rest in it."""
    before, _, after = _split(data)
    with path.open("wb") as file:
        file.writelines([before, _compute_checksum(before, after), after])


def is_intact(data: bytes) -> bool:
    """Returns whether a file is as it was sealed; one that never was is, too."""
    if _ENTRY not in data:
        return True
    before, said, after = _split(data)
    return said == _compute_checksum(before, after)


def _split(data: bytes) -> tuple[memoryview, memoryview, memoryview]:
    """Returns what is before the checksum, the checksum and what is behind it."""
    begin = data.rindex(_ENTRY) + len(_ENTRY)
    end, view = begin + len(_BLANK), memoryview(data)
    return view[:begin], view[begin:end], view[end:]


def _compute_checksum(before: memoryview, after: memoryview) -> bytes:
    crc32c = 0
    for piece in cut_pieces([before, after]):
        crc32c = google_crc32c.extend(crc32c, piece)
    return f"{crc32c:08x}".encode()
