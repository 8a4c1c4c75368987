"""Named arrays in one file in the safetensors format, written in pieces.

The safetensors package builds a whole file in memory before writing it, a second copy of the model,
and its NumPy interface lacks bfloat16. The format is a length (8 bytes, little-endian), a JSON
header of that length with names, dtypes, shapes and offsets, and the arrays without gaps:
https://huggingface.co/docs/safetensors.
"""

import json
import mmap
from collections.abc import Iterator, Mapping

import ml_dtypes
import numpy as np

PIECE = 4 << 20  # bytes

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
        arrays: contiguous, of a floating, integer or Boolean dtype.
        metadata: texts by name, stored in the header.
    """

    def __init__(self, arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str] | None = None):
        self._arrays = arrays
        self._metadata = metadata

    def __iter__(self) -> Iterator[bytes]:
        pending = bytearray(self._header())
        for array in self._arrays.values():
            data = array.reshape(-1).view(np.uint8)
            for start in range(0, len(data), PIECE):
                pending += data[start : start + PIECE].data
                if len(pending) >= PIECE:
                    yield bytes(pending)
                    pending.clear()
        yield bytes(pending)

    def _header(self) -> bytes:
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
        ValueError: the data is not in this format.
    """
    start = 8 + int.from_bytes(data[:8], "little")
    arrays = {}
    for name, entry in json.loads(data[8:start]).items():
        if name == "__metadata__":
            continue
        first, last = entry["data_offsets"]
        flat = np.frombuffer(data, np.uint8, last - first, start + first)
        dtype = _DTYPES.get(entry["dtype"])
        if dtype is None:
            raise ValueError(f"{name} has the unknown dtype {entry['dtype']}")
        arrays[name] = flat.view(dtype).reshape(entry["shape"])
    return arrays
