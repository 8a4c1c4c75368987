"""Weight files as named arrays: safetensors, in one file or several, and Keras's HDF5."""

import io
import json
import mmap
import re
from collections.abc import Iterable
from typing import Any

import numpy as np

from tftpu.errors import UserError
from tftpu.storage import files, safetensors

INDEX = "model.safetensors.index.json"
WHOLE = "model.safetensors"


def read(path: str) -> dict[str, np.ndarray]:
    """Reads the arrays of a file, by name.

    They are read-only; those of a local safetensors file are mapped, not copied.

    Args:
        path: local or `gs://`: a `.safetensors` file, the `.safetensors.index.json` of several, an
            `.h5` file of Keras, or a folder that holds one of the first two under its usual name.
            An array of an `.h5` file is named by its layer and its index there: "conv1/0".

    Raises:
        UserError: there is no such file, or it cannot be read.
    """
    path = str(path)
    if not path.endswith((".safetensors", ".safetensors.index.json", ".h5")):
        path = _in_folder(path)
    if not files.exists(path):
        raise UserError(f"There is no weight file {path!r}.")
    try:
        if path.endswith(".json"):
            return _read_several(path)
        return _read_h5(path) if path.endswith(".h5") else _read_safetensors(path)
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise UserError(f"The weights in {path!r} cannot be read: {error}.") from error


def write_safetensors(path: str, arrays: dict[str, np.ndarray]) -> None:
    """Writes arrays to a safetensors file, which appears completely or not at all.

    Args:
        path: of the file, local or `gs://`.
        arrays: by name.
    """
    arrays = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    # Transformers requires the format.
    files.write_whole(path, safetensors.TensorFile(arrays, metadata={"format": "pt"}))


def _in_folder(folder: str) -> str:
    names = files.names_in(folder)
    for name in (INDEX, WHOLE):
        if name in names:
            return files.join(folder, name)
    raise UserError(
        f"{folder!r} is neither a weight file nor a folder with {WHOLE} or {INDEX}: give a "
        ".safetensors, .safetensors.index.json or .weights.h5 file, or such a folder."
    )


def _read_several(index: str) -> dict[str, np.ndarray]:
    places = json.loads(files.read(index))["weight_map"]
    folder = index.rpartition("/")[0]
    arrays = {}
    for name in sorted(set(places.values())):
        arrays |= _read_safetensors(files.join(folder, name))
    absent = sorted(set(places) - set(arrays))
    if absent:
        raise ValueError(f"none of its files holds {absent[0]}")
    return arrays


def _read_safetensors(path: str) -> dict[str, np.ndarray]:
    if files.is_remote(path):
        return safetensors.decode(files.read(path))
    with open(path, "rb") as file:
        return safetensors.decode(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def _read_h5(path: str) -> dict[str, np.ndarray]:
    import h5py

    with h5py.File(io.BytesIO(files.read(path)) if files.is_remote(path) else path, "r") as file:
        return _arrays(file)


def _arrays(file: Any) -> dict[str, np.ndarray]:
    legacy = file.get("model_weights", file)  # the former in files of complete models
    return _legacy(legacy) if "layer_names" in legacy.attrs else _current(file)


def _current(file: Any) -> dict[str, np.ndarray]:
    """Reads a file of Keras 3: each layer has a group "vars" with arrays "0", "1", …"""
    arrays = {}

    def visit(path: str, group: Any) -> None:
        if path.split("/")[-1] == "vars" and "name" in group.attrs:
            for index, array in group.items():
                arrays[f"{group.attrs['name']}/{index}"] = array[()]

    file.visititems(visit)
    return arrays


def _legacy(file: Any) -> dict[str, np.ndarray]:
    """Reads a file of Keras 2: each layer has a group, which lists its arrays in order."""
    arrays = {}
    for group in _texts(file.attrs["layer_names"]):
        counts: dict[str, int] = {}
        for name in _texts(file[group].attrs["weight_names"]):
            layer = re.sub(r":\d+$", "", name).split("/")[-2]  # "stem/stem_conv/kernel:0"
            index = counts.get(layer, 0)
            counts[layer] = index + 1
            arrays[f"{layer}/{index}"] = file[group][name][()]
    return arrays


def _texts(names: Iterable[bytes | str]) -> list[str]:
    return [name.decode() if isinstance(name, bytes) else str(name) for name in names]
