"""Named arrays in one file in the safetensors format, written in pieces.

The safetensors package builds a whole file in memory before writing it, a second copy of the model,
and its NumPy interface lacks bfloat16. The format is a length (8 bytes, little-endian), a JSON
header of that length with names, dtypes, shapes and offsets, and the arrays without gaps:
https://huggingface.co/docs/safetensors.
"""

import json
import math
import mmap
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import ml_dtypes
import numpy as np

from tftpu.storage.pieces import cut_pieces

_LONGEST_HEADER = 100_000_000  # bytes; the limit of the safetensors package
_MOST_DIMENSIONS = 32
_LARGEST = 1 << 62

_DTYPES = {
    "BOOL": np.bool_,
    "BF16": ml_dtypes.bfloat16,
    **{f"F{8 * size}": f"<f{size}" for size in (2, 4, 8)},
    **{f"I{8 * size}": f"<i{size}" for size in (1, 2, 4, 8)},
    **{f"U{8 * size}": f"<u{size}" for size in (1, 2, 4, 8)},
}
_NAMES = {np.dtype(dtype): name for name, dtype in _DTYPES.items()}


class TensorFile:
    """The content of a file of named arrays, as an iterable of pieces of bytes.

    Args:
        arrays: contiguous arrays by name, of a floating, integer or Boolean dtype.
        metadata: strings by name, stored in the header.
    """

    def __init__(self, arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str] | None = None):
        self._arrays = arrays
        self._metadata = metadata

    def __iter__(self) -> Iterator[bytes]:
        return cut_pieces(self.iterate_blocks())

    def iterate_blocks(self) -> Iterator[bytes | memoryview]:
        """Yields the header, and the bytes of each array."""
        yield self._build_header()
        for array in self._arrays.values():
            yield array.reshape(-1).view(np.uint8).data

    def _build_header(self) -> bytes:
        entries: dict[str, object] = {}
        if self._metadata:
            entries["__metadata__"] = dict(self._metadata)
        place = 0
        for name, array in self._arrays.items():
            end = place + array.nbytes
            entries[name] = {
                "dtype": _NAMES[array.dtype],
                "shape": list(array.shape),
                "data_offsets": [place, end],
            }
            place = end
        header = json.dumps(entries).encode()
        header += b" " * (-len(header) % 8)  # the arrays begin at a multiple of 8
        return len(header).to_bytes(8, "little") + header


def decode(data: bytes | mmap.mmap) -> dict[str, np.ndarray]:
    """Returns the arrays of a file by name, as read-only views of its bytes.

    Raises:
        ValueError: the data is not in this format: the header is not a valid JSON object, or the
            arrays do not fill the rest of the file without gaps and overlaps.
    """
    start = 8 + int.from_bytes(data[:8], "little")
    if not 10 <= start <= len(data):
        raise ValueError(
            f"its header must end at byte {start:,}, but the file has {len(data):,} bytes"
        )
    arrays, end = {}, 0
    for entry in parse_header(data[:start]):
        end = entry.last
        if start + end > len(data):
            raise ValueError(f"{entry.name!r} ends after the end of the file")
        flat = np.frombuffer(data, np.uint8, entry.last - entry.first, start + entry.first)
        arrays[entry.name] = flat.view(entry.dtype).reshape(entry.shape)
    if start + end != len(data):
        raise ValueError(f"{len(data) - start - end:,} bytes at its end belong to no array")
    return arrays


class Entry(NamedTuple):
    """An array in a header; `first` and `last` (exclusive) count bytes from the header's end."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    first: int
    last: int


def parse_header(header: bytes) -> list[Entry]:
    """Returns the arrays of a header in the order of their bytes; `header` begins with its length.

    Raises:
        ValueError: the header is not valid, or its arrays overlap or leave gaps.
    """
    size = len(header) - 8
    if size > _LONGEST_HEADER:
        raise ValueError(
            f"its header has {size:,} bytes, but at most {_LONGEST_HEADER:,} are allowed"
        )
    try:
        fields = json.loads(header[8:])
    except (ValueError, RecursionError) as error:
        raise ValueError(f"its header is not JSON ({error})") from error
    if not isinstance(fields, dict):
        raise ValueError("its header is not a JSON object")
    fields.pop("__metadata__", None)
    found = sorted((_build_entry(name, value) for name, value in fields.items()), key=_place)
    end = 0
    for entry in found:
        if entry.first != end:
            kind = "overlaps another array" if entry.first < end else "follows a gap"
            raise ValueError(f"{entry.name!r} {kind}")
        end = entry.last
    return found


def _place(entry: Entry) -> tuple[int, int]:
    return entry.first, entry.last


def _build_entry(name: str, value: object) -> Entry:
    """Returns the `Entry` of an array from its name and its JSON value in the header.

    Raises:
        ValueError: the JSON value is not valid.
    """
    name.encode()  # raises for a lone surrogate, which could not be printed
    if not isinstance(value, dict) or not {"dtype", "shape", "data_offsets"} <= set(value):
        raise ValueError(f"{name!r} lacks dtype, shape or data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise ValueError(f"{name!r} has the unknown dtype {dtype!r}")
    kind = np.dtype(_DTYPES[dtype])
    if not _has_sizes(shape) or len(shape) > _MOST_DIMENSIONS:
        raise ValueError(f"{name!r} has the shape {shape!r}, which is not valid")
    if not _has_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ValueError(f"{name!r} has the data_offsets {offsets!r}, which are not valid")
    first, last = offsets
    if last - first != math.prod(shape) * kind.itemsize:
        raise ValueError(
            f"{name!r} has {last - first:,} bytes, which is not the size of {dtype} {shape!r}"
        )
    return Entry(name, kind, tuple(shape), first, last)


def _has_sizes(numbers: object) -> bool:
    """Returns whether a JSON value is a list of whole numbers that can be sizes of an array."""
    return isinstance(numbers, list) and all(
        type(number) is int and 0 <= number < _LARGEST for number in numbers
    )
