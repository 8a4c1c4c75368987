"""Checkpoints: all that a run needs to go on, visible only when whole.

    checkpoints/<step>/model.safetensors       weights and moving statistics
                      optimizer.safetensors    the optimizer's state
                      loss_scale.safetensors   of mixed_float16
                      step.safetensors         the step counter
                      ema.safetensors          the average of the weights
                      state.json               what the host knows: config, seed, position in the
                                               data, history, running sums
                      manifest.json            sizes and checksums; written last
    checkpoints/best                           the step of the best one, and its metric

A folder without a manifest is no checkpoint: that is what makes a save atomic, on a disk and in a
bucket alike. Training waits for a copy to host memory; a thread writes it, one save at a time.
"""

import contextlib
import difflib
import json
import logging
import os
import re
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import google_crc32c
import numpy as np

from tftpu.errors import UserError
from tftpu.storage import files, safetensors

# Groups of variables that depend on the precision: a checkpoint may have them or not.
_OPTIONAL = ("loss_scale",)
_LARGE = 1 << 20  # bytes of a variable that is copied by a thread of its own


class Restored(NamedTuple):
    """What `Checkpoints.restore` found."""

    step: int
    state: dict[str, Any]


class Best(NamedTuple):
    """Why a checkpoint is the best one so far."""

    metric: str
    value: float


class Failure(NamedTuple):
    """A save that failed, and why."""

    step: int
    reason: str


class Checkpoints:
    """The checkpoints of one workdir.

    Args:
        workdir: local or `gs://`.
        keep: how many of the newest are kept; the best is kept besides.
        keep_every: every step that is a multiple of it is kept, too; 0: none.
    """

    def __init__(self, workdir: str, keep: int = 3, keep_every: int = 0):
        self.folder = files.join(workdir, "checkpoints")
        self.keep = keep
        self.keep_every = keep_every
        self._copy = _HostCopy()
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint-writer")
        self._pending: tuple[int, Future] | None = None
        self._failure: Failure | None = None
        self.newest: int | None = None  # of the checkpoints that were saved or restored here

    def steps(self) -> list[int]:
        """The steps that there is a whole checkpoint of, in order."""
        self.wait()
        return self._steps()

    def best(self) -> int | None:
        """The step of the best checkpoint by the evaluation's metric."""
        path = files.join(self.folder, "best")
        return json.loads(files.read(path))["step"] if files.exists(path) else None

    def save(
        self,
        step: int,
        variables: dict[str, list],
        state: dict[str, Any],
        best: Best | None = None,
    ) -> None:
        """Starts to write a checkpoint; returns when the variables may change again.

        A save that is still being written is waited for first. What fails is told by
        `take_failure`, and leaves the earlier checkpoints as they are.

        Args:
            step: its name.
            variables: lists of Keras or TensorFlow variables by group; a file each.
            state: JSON, what the host knows; arrays become lists.
            best: it is the best so far, and kept whatever its age.
        """
        self.wait()
        groups = self._copy.take(variables)
        text = json.dumps(state, default=_plain).encode()
        self._pending = step, self._writer.submit(self._write, step, groups, text, best)

    def mark_best(self, step: int, best: Best) -> None:
        """Marks a checkpoint that was saved already as the best one so far."""
        self.wait()
        self._pending = step, self._writer.submit(self._mark_best, step, best)

    def reserve(self, variables: dict[str, list]) -> None:
        """Begins to make room for the copy, so that the first save does not wait for that."""
        self._copy.reserve(variables)

    def wait(self) -> None:
        """Waits until nothing is being written."""
        if self._pending is None:
            return
        step, future = self._pending
        try:
            future.result()
        except OSError as error:
            self._failure = Failure(step, error.strerror or str(error))
        finally:
            self._pending = None

    def take_failure(self) -> Failure | None:
        """The last save that failed, if any; told once."""
        if self._pending is not None and self._pending[1].done():
            self.wait()
        failure, self._failure = self._failure, None
        return failure

    def restore(self, variables: dict[str, list], step: int | None = None) -> Restored | None:
        """Loads a checkpoint into variables; None if there is none.

        One that does not match its checksums is passed over with a warning, and the next newest
        taken. Variables of another precision take the values rounded.

        Args:
            variables: as for `save`.
            step: which one; None: the newest.

        Raises:
            UserError: it belongs to another model or optimizer, and the message lists where they
                differ; or there are checkpoints, and none is whole.
        """
        self.wait()
        candidates = [step] if step is not None else self._steps()[::-1]
        for candidate in candidates:
            try:
                contents = self._read(candidate)
            except (OSError, ValueError, KeyError) as error:
                logging.warning(
                    "Checkpoint %s is broken (%s): passed over.", self._path(candidate), error
                )
                continue
            _load(contents, variables, candidate)
            self.newest = candidate
            return Restored(candidate, json.loads(contents["state.json"]))
        if step is not None:
            others = [other for other in self._steps() if other != step]
            hint = f"; there are {_listed(others)}" if others else ""
            if others and self.best() == step:
                hint += f". Remove {files.join(self.folder, 'best')} to take the newest of them"
            raise UserError(
                f"The checkpoint of step {step} in {self.folder} is not whole, or gone{hint}."
            )
        if candidates:
            raise UserError(
                f"No checkpoint in {self.folder} is whole (there is {_listed(candidates)}). To "
                "train from the start, remove that folder or choose another --workdir."
            )
        return None

    # In the writer's thread

    def _write(self, step: int, groups: dict, state: bytes, best: Best | None) -> None:
        try:
            self._discard(step)  # what a save that was cut off left, or a broken one
            contents = {
                f"{group}.safetensors": safetensors.TensorFile(arrays)
                for group, arrays in groups.items()
            }
            contents["state.json"] = [state]
            manifest = {"step": step, "files": {}}
            for name, pieces in contents.items():
                summed = _Summed(pieces)
                files.write_whole(self._path(step, name), summed)
                manifest["files"][name] = {"bytes": summed.size, "crc32c": summed.crc32c}
            files.write_whole(self._path(step, "manifest.json"), json.dumps(manifest).encode())
            self.newest = step
        except OSError:
            with contextlib.suppress(OSError):  # a part of a checkpoint only takes up space
                self._discard(step)
            raise
        if best is not None:
            self._mark_best(step, best)
        try:
            self._prune(step)
        except OSError as error:
            logging.warning("Old checkpoints could not be removed: %s", error)

    def _mark_best(self, step: int, best: Best) -> None:
        record = {"step": step, **best._asdict()}
        files.write_whole(files.join(self.folder, "best"), json.dumps(record).encode())

    def _prune(self, newest: int) -> None:
        """Removes what need not be kept, and what saves that were cut off left.

        Checkpoints of later steps are broken ones that the run went back from: they neither count
        nor are touched until the run gets there.
        """
        whole = [step for step in self._steps() if step <= newest]
        spared = {self.best(), *whole[-self.keep :]}
        if self.keep_every:
            spared |= {step for step in whole if step % self.keep_every == 0}
        for step in self._folders():
            if step < newest and step not in spared:
                self._discard(step)
        for name in files.names_in(self.folder):
            if name.endswith(".tmp"):
                files.remove(files.join(self.folder, name))

    def _discard(self, step: int) -> None:
        # The manifest goes first: from then on the folder is no checkpoint.
        files.remove(self._path(step, "manifest.json"))
        files.remove_tree(self._path(step))

    def _steps(self) -> list[int]:
        return [s for s in self._folders() if files.exists(self._path(s, "manifest.json"))]

    def _folders(self) -> list[int]:
        return sorted(int(name) for name in files.names_in(self.folder) if name.isdigit())

    def _read(self, step: int) -> dict[str, bytes]:
        manifest = json.loads(files.read(self._path(step, "manifest.json")))
        contents = {}
        for name, expected in manifest["files"].items():
            data = files.read(self._path(step, name))
            if google_crc32c.value(data) != expected["crc32c"]:
                raise ValueError(f"{name} does not match its checksum")
            contents[name] = data
        return contents

    def _path(self, step: int, *parts: str) -> str:
        return files.join(self.folder, str(step), *parts)


class _HostCopy:
    """A copy of variables in host memory, whose place is used again: pages cost more than bytes."""

    def __init__(self):
        self._arrays: dict[tuple[str, int], np.ndarray] = {}
        self._threads = ThreadPoolExecutor(min(4, os.cpu_count() or 1), "checkpoint-copy")
        self._reserved: Future | None = None

    def reserve(self, variables: dict[str, list]) -> None:
        """Makes room in the background: the system hands out pages when they are first written."""
        import tensorflow as tf

        wanted = {
            (group, i): (tuple(v.shape), tf.as_dtype(v.dtype).as_numpy_dtype)
            for group, members in variables.items()
            for i, v in enumerate(members)
        }

        def allocate() -> None:
            for key, (shape, dtype) in wanted.items():
                self._arrays[key] = np.empty(shape, dtype)
                self._arrays[key].fill(0)

        if not self._arrays and self._reserved is None:
            self._reserved = self._threads.submit(allocate)

    def take(self, variables: dict[str, list]) -> dict[str, dict[str, np.ndarray]]:
        """The values of variables by group and name; they are good until the next call."""
        if self._reserved is not None:
            self._reserved.result()
            self._reserved = None
        copies = []
        groups = {
            group: {_key(i, v): self._array(group, i, v, copies) for i, v in enumerate(members)}
            for group, members in variables.items()
        }
        for copy in copies:
            copy.result()
        return groups

    def _array(self, group: str, index: int, variable: Any, copies: list[Future]) -> np.ndarray:
        import tensorflow as tf

        value = np.asarray(tf.convert_to_tensor(variable))  # on a CPU: the variable's own memory
        array = self._arrays.get((group, index))
        if array is None or (array.shape, array.dtype) != (value.shape, value.dtype):
            array = self._arrays[group, index] = np.empty(value.shape, value.dtype)
        if value.nbytes < _LARGE:
            np.copyto(array, value)
        else:
            copies.append(self._threads.submit(np.copyto, array, value))
        return array


class _Summed:
    """Pieces of bytes, whose size and checksum are known when they have been gone through."""

    def __init__(self, pieces: Iterable[bytes]):
        self._pieces = pieces
        self.size = self.crc32c = 0

    def __iter__(self) -> Iterator[bytes]:
        self.size = self.crc32c = 0
        for piece in self._pieces:
            self.size += len(piece)
            self.crc32c = google_crc32c.extend(self.crc32c, piece)
            yield piece


def _name(variable: Any) -> str:
    return getattr(variable, "path", variable.name)


def _key(index: int, variable: Any) -> str:
    # The place comes first: Keras counts up automatic names ("dense_7") within a process.
    return f"{index:05d} {_name(variable)}"


def uncounted(name: str) -> str:
    """A variable's name without what Keras counts up within a process: "dense_7" is "dense"."""
    return re.sub(r"_\d+(?=_|/|:|$)", "", name)


def _load(contents: dict[str, bytes], variables: dict[str, list], step: int) -> None:
    """Assigns all variables, or none if they are not those of the checkpoint."""
    assignments = []
    for group, members in variables.items():
        data = contents.get(f"{group}.safetensors")
        if data is None and group in _OPTIONAL:
            continue
        decoded = safetensors.decode(data) if data is not None else {}
        saved = [(key.split(" ", 1)[1], decoded[key]) for key in sorted(decoded)]
        differences = _differences(saved, members)
        if differences:
            raise UserError(
                f"The checkpoint of step {step} is of another {group}: {_listed(differences)}. "
                "Use the configuration that it was trained with, or another --workdir."
            )
        assignments += [(v, value) for v, (_, value) in zip(members, saved)]
    for variable, value in assignments:
        variable.assign(value.astype(_dtype(variable), copy=False))


def _differences(saved: list[tuple[str, np.ndarray]], variables: list) -> list[str]:
    """Where variables and the arrays of a checkpoint differ, a clause each."""
    there = [(uncounted(name), value.shape) for name, value in saved]
    here = [(uncounted(_name(v)), tuple(v.shape)) for v in variables]
    differences = []
    for kind, a, b, c, d in difflib.SequenceMatcher(None, there, here, False).get_opcodes():
        if kind == "equal":
            continue
        shapes = dict(there[a:b])
        for variable, (plain, shape) in zip(variables[c:d], here[c:d]):
            other = shapes.pop(plain, None)
            what = f"is {shape} here and {other} there" if other else "is not in the checkpoint"
            differences.append(f"{_name(variable)} {what}")
        left = [name for name, _ in saved[a:b] if uncounted(name) in shapes]
        differences += [f"{name} is only in the checkpoint" for name in left]
    return differences


def _plain(value: Any) -> Any:
    """What JSON has no form for, as callbacks may log it: arrays and scalars of any library."""
    array = np.asarray(value)
    return repr(value) if array.dtype == object else array.tolist()


def _dtype(variable: Any) -> np.dtype:
    import tensorflow as tf

    return tf.as_dtype(variable.dtype).as_numpy_dtype


def _listed(items: list) -> str:
    """The first of many, for a sentence."""
    shown = "; ".join(map(str, items[:8]))
    return f"{shown}; and {len(items) - 8} more" if len(items) > 8 else shown
