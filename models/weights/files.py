"""Weight files as named arrays: safetensors, in one file or several, and Keras's HDF5.

Arrays stay in their file until they are needed, one after the other: a model may be larger than the
memory of a host. Keras's HDF5 files, which hold small models, are read at once.
"""

import functools
import io
import json
import mmap
import os
import re
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from tftpu.errors import UserError
from tftpu.models.weights.hdf5 import Hdf5File, check_heaps
from tftpu.storage import files, regions, safetensors

INDEX = "model.safetensors.index.json"
WHOLE = "model.safetensors"
_MANIFEST = "manifest.json"  # the manifest of a tftpu checkpoint
_OF_PROCESSES = r"model(-\d+){0,2}\.safetensors"


class StoredArray(NamedTuple):
    """An array of a weight file.

    Attributes:
        shape: the shape of the array.
        content: a function that returns the array, which may be a read-only view of the file.
    """

    shape: tuple[int, ...]
    content: Callable[[], np.ndarray]

    def build_outline(self) -> np.ndarray:
        """Returns an array of this shape that takes no memory."""
        return np.broadcast_to(np.int8(0), self.shape)


def read(path: str) -> dict[str, StoredArray]:
    """Reads the names and shapes of a file's arrays, whose content is read later.

    Args:
        path: local or `gs://`: a `.safetensors` file, the `.safetensors.index.json` of several, an
            `.h5` file of Keras, or a folder that holds one of the first two under its usual name.

    Returns:
        The arrays by name; an array of an `.h5` file has the name of its layer and its index in
        the layer: "conv1/0". The shards of a variable in a checkpoint of tftpu are joined.

    Raises:
        UserError: there is no such file, or it cannot be read.
    """
    path = str(path)
    if not path.endswith((".safetensors", ".safetensors.index.json", ".h5")):
        path = _find_in_folder(path)
    if files.find_size(path) is None:
        raise UserError(f"There is no weight file {path!r}.")
    try:
        if path.endswith(".json"):
            return _read_several(path)
        return _read_h5(path) if path.endswith(".h5") else _read_safetensors(path)
    except (ValueError, KeyError, TypeError, OSError, RecursionError) as error:
        raise UserError(f"The weights in {path!r} cannot be read: {error}.") from error


def write_safetensors(path: str, arrays: dict[str, np.ndarray]) -> None:
    """Writes arrays to a safetensors file, which appears completely or not at all.

    Args:
        path: the path of the file, local or `gs://`.
        arrays: the arrays by name.
    """
    arrays = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    # Transformers requires the entry "format".
    files.write_whole(path, safetensors.TensorFile(arrays, metadata={"format": "pt"}))


def _find_in_folder(folder: str) -> str:
    if not files.exists(folder):
        here = "" if os.path.isabs(folder) or files.is_remote(folder) else f" in {os.getcwd()}"
        near = files.suggest_existing(folder, folders=True)
        raise UserError(f"There is no file or folder {folder!r}{here} with weights.{near}")
    names = files.list_names(folder)
    for name in (INDEX, WHOLE):
        if name in names:
            return files.join(folder, name)
    raise UserError(
        f"{folder!r} is neither a weight file nor a folder with {WHOLE} or {INDEX}: give a "
        ".safetensors, .safetensors.index.json or .weights.h5 file, or such a folder."
    )


def _read_several(index: str) -> dict[str, StoredArray]:
    places = json.loads(files.read(index))["weight_map"]
    if not isinstance(places, dict):
        raise ValueError("its weight_map is not a JSON object")
    for name in places.values():
        if not isinstance(name, str) or not files.is_inside(name):
            raise ValueError(f"it names the file {name!r}, which is not in the same folder")
    folder = os.path.dirname(index)
    arrays = {}
    for name in sorted(set(places.values())):
        arrays |= _read_safetensors(files.join(folder, name))
    absent = sorted(set(places) - set(arrays))
    if absent:
        raise ValueError(f"none of its files holds {absent[0]}")
    return arrays


def _read_safetensors(path: str) -> dict[str, StoredArray]:
    folder, file = os.path.split(path)
    names = [file]
    # A checkpoint has one file for each process.
    if file == WHOLE and _MANIFEST in files.list_names(folder):
        listed = json.loads(files.read(files.join(folder, _MANIFEST)))["files"]
        names = [name for name in listed if re.fullmatch(_OF_PROCESSES, name)]
    arrays = {}
    for name in names:
        arrays |= _read_arrays(files.join(folder, name))
    return _join_arrays(arrays)


def _read_arrays(path: str) -> dict[str, StoredArray]:
    """Returns the arrays of one safetensors file."""
    if not files.is_remote(path):
        return {
            name: _wrap_array(array)
            for name, array in safetensors.decode(_read_content(path)).items()
        }
    start = 8 + int.from_bytes(files.read_range(path, 0, 8), "little")
    size = files.find_size(path) or 0
    if not 10 <= start <= size:
        raise ValueError(f"its header must end at byte {start:,}, but it has {size:,} bytes")
    entries = safetensors.parse_header(files.read_range(path, 0, start))
    if start + (entries[-1].last if entries else 0) != size:
        raise ValueError(f"it has {size:,} bytes, which is not the size of its arrays")
    return {
        entry.name: StoredArray(entry.shape, functools.partial(_download, path, start, entry))
        for entry in entries
    }


def _download(path: str, start: int, entry: safetensors.Entry) -> np.ndarray:
    try:
        data = files.read_range(path, start + entry.first, entry.last - entry.first)
    except OSError as error:
        raise UserError(f"{entry.name!r} cannot be read from {path!r}: {error}.") from error
    if len(data) != entry.last - entry.first:
        raise UserError(f"{path!r} changed while its weights were read: read it again.")
    return np.frombuffer(data, entry.dtype).reshape(entry.shape)


def _wrap_array(array: np.ndarray) -> StoredArray:
    return StoredArray(array.shape, lambda: array)


def _join_arrays(arrays: dict[str, StoredArray]) -> dict[str, StoredArray]:
    """Returns the arrays of a checkpoint, with the shards of each variable joined."""
    found: dict[str, StoredArray] = {}
    parts: dict[str, list[tuple[regions.Named, StoredArray]]] = {}
    for name, array in arrays.items():
        if not re.search(r" of \[[\d, ]+\]$", name):
            found[name] = array
            continue
        part = regions.parse_name(name, array.shape)
        name = regions.format_name(part._replace(region=regions.select_all(part.shape)))
        parts.setdefault(name, []).append((part, array))
    for name, pieces in parts.items():
        shape = pieces[0][0].shape
        if not regions.fill([part.region for part, _ in pieces], shape):
            raise ValueError(f"its shards of {name!r} do not cover the variable exactly once")
        found[name] = StoredArray(shape, functools.partial(_join, pieces))
    return found


def _join(pieces: list[tuple[regions.Named, StoredArray]]) -> np.ndarray:
    (first, stored), *_ = pieces
    whole = np.empty(first.shape, stored.content().dtype)
    for part, stored in pieces:
        whole[regions.to_slices(part.region)] = stored.content()
    return whole


def _read_content(path: str) -> bytes | mmap.mmap:
    """Returns the bytes of a file; a local file is memory-mapped, and so read when used."""
    if files.is_remote(path):
        return files.read(path)
    with files.open_file(path) as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _read_h5(path: str) -> dict[str, StoredArray]:
    import h5py

    data = _read_content(path)
    check_heaps(data)
    place = io.BytesIO(data) if files.is_remote(path) else path
    try:
        with h5py.File(place, "r") as file:
            return {
                n: _wrap_array(array)
                for n, array in Hdf5File(file, len(data)).read_arrays().items()
            }
    except (RuntimeError, AttributeError) as error:  # HDF5 raises these for many kinds of damage
        raise ValueError(f"{error}") from error
