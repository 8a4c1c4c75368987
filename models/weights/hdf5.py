"""Reads the arrays of Keras's HDF5 files, and nothing outside of the file itself.

HDF5 has links to other files, and arrays whose bytes are stored in them: a weight file from a
stranger could read any file of this machine into weights, which are then saved and shared. Such
links are not followed, and the arrays may take at most 100 times the size of the file.
"""

import math
import mmap
import re
import struct
from collections.abc import Iterable
from typing import Any

import numpy as np

# A file's arrays may take this many times its bytes: weights hardly compress, but zeros do.
_INFLATION = 100
_DEFLATE = 1032  # the most bytes that one compressed byte can become


# The first bytes of a file; and, by the version of its header, the offset of two bytes that hold
# the size of an address and the size of a length.
_SIGNATURE = b"\x89HDF\r\n\x1a\n"
_WIDTHS = {0: 13, 1: 13, 2: 9, 3: 9}
_HEAP = b"GCOL"  # begins a global heap, which holds texts


def check_heaps(data: bytes | mmap.mmap) -> None:
    """Raises `ValueError` if the HDF5 library would hang, or if the header is damaged.

    The library walks through the objects of a global heap by their sizes, and never ends if one
    has the size 0 (HDF5 File Format Specification 3.0, III.E).

    Args:
        data: the bytes of an HDF5 file.
    """
    if data[:8] != _SIGNATURE or data[8:9] == b"":
        raise ValueError("it does not begin as an HDF5 file")
    widths = _WIDTHS.get(data[8])
    if widths is None or data[widths : widths + 2] != b"\x08\x08":
        raise ValueError("its header is damaged, or has a version that Keras does not write")
    start = data.find(_HEAP)
    while start >= 0:
        size = int.from_bytes(data[start + 8 : start + 16], "little")
        place, end = start + 16, min(start + size, len(data))
        while place + 16 <= end:
            number, taken = struct.unpack_from("<H6xQ", data, place)
            # Object 0 is the heap's free space. Its size includes its header.
            step = taken if number == 0 else (16 + (taken + 7 & ~7)) % (1 << 64)
            if step == 0:
                raise ValueError(f"the heap at byte {start} is damaged")
            place += step
        start = data.find(_HEAP, start + 1)


class Hdf5File:
    """The arrays of an open file.

    Args:
        file: an `h5py.File`.
        size: the size of the file in bytes.
    """

    def __init__(self, file: Any, size: int):
        self._file = file
        # Number of bytes of arrays that may still be read, to limit decompression.
        self._left = size * _INFLATION
        self._size = size

    def read_arrays(self) -> dict[str, np.ndarray]:
        """Returns the arrays, by the name of their layer and their index in it: "conv1/0".

        Raises:
            ValueError: an array or group is a link elsewhere, or an array is too large or invalid.
            KeyError: a group that the file names does not exist.
        """
        file = self._file
        legacy = _find_child(file, "model_weights") if "model_weights" in file else file
        return (
            self._read_legacy(legacy) if "layer_names" in legacy.attrs else self._read_current(file)
        )

    def _read_current(self, file: Any) -> dict[str, np.ndarray]:
        """Reads a file of Keras 3: each layer has a group "vars" with arrays "0", "1", …"""
        arrays = {}

        def visit(path: str, group: Any) -> None:
            if path.split("/")[-1] == "vars" and "name" in group.attrs:
                for index in group:
                    arrays[f"{group.attrs['name']}/{index}"] = self._read_array(
                        _find_child(group, index)
                    )

        file.visititems(visit)  # HDF5's `visititems` does not follow links to other places
        return arrays

    def _read_legacy(self, file: Any) -> dict[str, np.ndarray]:
        """Reads a file of Keras 2: each layer has a group, which lists its arrays in order."""
        arrays = {}
        for group in _decode_texts(file.attrs["layer_names"]):
            counts: dict[str, int] = {}
            inside = _find_child(file, group)
            for name in _decode_texts(inside.attrs["weight_names"]):
                # A name is like "stem/stem_conv/kernel:0".
                parts = re.sub(r":\d+$", "", name).split("/")
                if len(parts) < 2:
                    raise ValueError(f"its array {name!r} names no layer")
                layer = parts[-2]
                index = counts.get(layer, 0)
                counts[layer] = index + 1
                arrays[f"{layer}/{index}"] = self._read_array(_find_child(inside, name))
        return arrays

    def _read_array(self, dataset: Any) -> np.ndarray:
        """Returns the values of a dataset.

        Raises:
            ValueError: the values are in another file, are not numbers, or take more bytes than the
                stored data can decompress to.
        """
        import h5py

        if not isinstance(dataset, h5py.Dataset) or dataset.shape is None:
            raise ValueError(f"{dataset.name!r} is not an array")
        if dataset.external or dataset.is_virtual:
            raise ValueError(
                f"{dataset.name!r} is in another file, and such links are not followed"
            )
        if dataset.dtype.kind not in "biufV" or dataset.dtype.hasobject:
            raise ValueError(f"{dataset.name!r} has the dtype {dataset.dtype}, not numbers")
        needed = math.prod(dataset.shape) * dataset.dtype.itemsize
        stored = dataset.id.get_storage_size()
        compressed = dataset.chunks is not None and dataset.id.get_create_plist().get_nfilters()
        allowed = stored * _DEFLATE if compressed else stored
        chunk = math.prod(dataset.chunks) * dataset.dtype.itemsize if dataset.chunks else 0
        if stored > self._size or max(needed, chunk) > min(allowed, self._left):
            raise ValueError(
                f"{dataset.name!r} needs {needed:,} bytes, but the file holds only {stored:,} of "
                "them"
            )
        self._left -= needed
        return dataset[()]


def _find_child(group: Any, path: str) -> Any:
    """Returns a group or dataset inside a group, along hard links only.

    Raises:
        ValueError: a link leads elsewhere.
        KeyError: there is no such group or dataset.
    """
    import h5py

    for part in path.split("/"):
        if not isinstance(group, h5py.Group):
            raise KeyError(path)
        if not isinstance(group.get(part, getlink=True), h5py.HardLink):
            raise ValueError(
                f"{part!r} is a link to another place, and such links are not followed"
            )
        group = group[part]
    return group


def _decode_texts(names: Iterable[bytes | str]) -> list[str]:
    return [name.decode() if isinstance(name, bytes) else str(name) for name in names]
