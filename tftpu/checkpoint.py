"""Checkpoints: all that a run needs to go on, visible only when whole.

    checkpoints/<step>/model.safetensors      weights and moving statistics
                      optimizer.safetensors   the optimizer's state
                      step.safetensors        the step counter and the average of the weights
                      state.json              what the host knows: history, running sums
                      manifest.json           sizes and checksums; written last

A folder without a manifest is no checkpoint: that is what makes a save atomic, on a disk and in a
bucket alike.
"""

import json
import logging
from typing import Any, NamedTuple

import google_crc32c
import numpy as np
import safetensors.numpy
import tensorflow as tf

from tftpu import files
from tftpu.errors import UserError


class Restored(NamedTuple):
    """What `Checkpoints.restore` found."""

    step: int
    state: dict[str, Any]


class Checkpoints:
    """The checkpoints of one workdir.

    Args:
        workdir: local or `gs://`.
        keep: how many of the newest are kept; the best is kept besides.
    """

    def __init__(self, workdir: str, keep: int = 3):
        self.folder = files.join(workdir, "checkpoints")
        self.keep = keep

    def steps(self) -> list[int]:
        """The steps that there is a whole checkpoint of, in order."""
        names = [name for name in files.names_in(self.folder) if name.isdigit()]
        return sorted(int(n) for n in names if files.exists(self._path(int(n), "manifest.json")))

    def best(self) -> int | None:
        """The step of the best checkpoint by the evaluation's metric."""
        path = files.join(self.folder, "best")
        return json.loads(files.read(path))["step"] if files.exists(path) else None

    def save(self, step: int, variables: dict[str, list], state: dict[str, Any]) -> None:
        """Writes a checkpoint and removes those that need not be kept.

        Args:
            step: its name.
            variables: lists of Keras or TensorFlow variables by group; a file each.
            state: JSON, what the host knows.
        """
        contents = {
            f"{group}.safetensors": safetensors.numpy.save(
                {_key(i, v): _array(v) for i, v in enumerate(group_variables)}
            )
            for group, group_variables in variables.items()
        }
        contents["state.json"] = json.dumps(state).encode()
        manifest = {"step": step, "files": {}}
        for name, data in contents.items():
            files.write_whole(self._path(step, name), data)
            manifest["files"][name] = {"bytes": len(data), "crc32c": google_crc32c.value(data)}
        files.write_whole(self._path(step, "manifest.json"), json.dumps(manifest).encode())
        self._prune()

    def mark_best(self, step: int, metric: str, value: float) -> None:
        """Names the best checkpoint so far; it is kept whatever its age."""
        record = {"step": step, "metric": metric, "value": value}
        files.write_whole(files.join(self.folder, "best"), json.dumps(record).encode())
        self._prune()

    def restore(self, variables: dict[str, list], step: int | None = None) -> Restored | None:
        """Loads a checkpoint into variables; None if there is none.

        A checkpoint that does not match its checksums is passed over with a warning, and the next
        newest taken.

        Args:
            variables: as for `save`.
            step: which one; None: the newest.

        Raises:
            UserError: it belongs to another model or optimizer; the message lists where they
                differ.
        """
        for candidate in [step] if step is not None else reversed(self.steps()):
            try:
                contents = self._read(candidate)
            except (OSError, ValueError, KeyError) as error:
                logging.warning("Checkpoint %s is broken (%s): passed over.", candidate, error)
                continue
            for group, group_variables in variables.items():
                _load(contents[f"{group}.safetensors"], group_variables, group, candidate)
            return Restored(candidate, json.loads(contents["state.json"]))
        return None

    def _read(self, step: int) -> dict[str, bytes]:
        manifest = json.loads(files.read(self._path(step, "manifest.json")))
        contents = {}
        for name, expected in manifest["files"].items():
            data = files.read(self._path(step, name))
            if google_crc32c.value(data) != expected["crc32c"]:
                raise ValueError(f"{name} does not match its checksum")
            contents[name] = data
        return contents

    def _prune(self) -> None:
        spared = {self.best(), *self.steps()[-self.keep :]}
        for step in self.steps():
            if step not in spared:
                # The manifest goes first: from then on the folder is no checkpoint.
                files.remove_tree(self._path(step, "manifest.json"))
                files.remove_tree(self._path(step))

    def _path(self, step: int, *parts: str) -> str:
        return files.join(self.folder, str(step), *parts)


def _array(variable) -> np.ndarray:
    array = np.array(variable.numpy())
    # NumPy has no bfloat16 of its own to read back into; float32 holds it without loss.
    return array.astype(np.float32) if tf.as_dtype(variable.dtype) == tf.bfloat16 else array


def _name(variable) -> str:
    return getattr(variable, "path", variable.name)


def _key(index: int, variable) -> str:
    # By position: Keras counts up automatic names ("dense_7") within a process.
    return f"{index:05d} {_name(variable)}"


def _load(data: bytes, variables: list, group: str, step: int) -> None:
    saved = safetensors.numpy.load(data)
    keys = sorted(saved)
    differences = []
    for index in range(max(len(keys), len(variables))):
        there = keys[index] if index < len(keys) else None
        here = variables[index] if index < len(variables) else None
        if there is None:
            differences.append(f"{_name(here)} is not in the checkpoint")
        elif here is None:
            differences.append(f"{there.split(' ', 1)[1]} is only in the checkpoint")
        elif saved[there].shape != tuple(here.shape):
            differences.append(
                f"{_name(here)} is {tuple(here.shape)} here and {saved[there].shape} there"
            )
    if differences:
        shown = "; ".join(differences[:5])
        more = f"; and {len(differences) - 5} more" if len(differences) > 5 else ""
        raise UserError(
            f"The checkpoint of step {step} is of another {group}: {shown}{more}. Use the "
            "configuration that it was trained with, or another --workdir."
        )
    for key, variable in zip(keys, variables):
        variable.assign(saved[key].astype(tf.as_dtype(variable.dtype).as_numpy_dtype))
