"""Checkpoints: everything a run needs to resume, visible only when complete.

    checkpoints/<step>/model.safetensors       weights and moving statistics
                       optimizer.safetensors   the optimizer's state
                       loss_scale.safetensors  only with mixed_float16
                       step.safetensors        the step counter
                       ema.safetensors         the moving average of the weights
                       state.json              the host's state: config, seed, position in the
                                               data, history, running sums
                       manifest.json           sizes and checksums; written last
    checkpoints/best                           the step of the best one, and its metric

Training waits only for a copy to host memory, which a thread then writes, one save at a time. If
several hosts each hold a shard of the state, each writes its shard (see `writing`).
"""

import contextlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from tftpu.checkpoint import manifest, matching
from tftpu.checkpoint.host_copy import HostCopy
from tftpu.checkpoint.matching import Found
from tftpu.checkpoint.writing import Writing
from tftpu.engines.engine import Hosts
from tftpu.engines.leaf import Leaf
from tftpu.errors import UserError
from tftpu.storage import files, locks, side_files
from tftpu.storage.own_files import OwnFile

_log = logging.getLogger(__name__)

State = dict[str, Any]  # the host's state, as JSON


class Restored(NamedTuple):
    """A checkpoint that was loaded: its step and the host's state."""

    step: int
    state: State


class Loaded(NamedTuple):
    """A checkpoint in host memory, whose values are not assigned to the leaves yet."""

    restored: Restored
    found: list[Found]


class Best(NamedTuple):
    """The metric and its value that make a checkpoint the best one so far."""

    metric: str
    value: float


class Failure(NamedTuple):
    """A save that failed, and why."""

    step: int
    reason: str
    error: OSError


class Checkpoints:
    """The checkpoints of one workdir.

    Args:
        workdir: a local or `gs://` path.
        keep: number of newest checkpoints to keep, in addition to the best.
        keep_every: also keep checkpoints whose step is a multiple of this; 0 keeps no others.
        hosts: the hosts that train together; None if this process trains alone.

    Attributes:
        workdir: the local or `gs://` path.
        newest: the step of the checkpoint that this object last saved or restored, or None.
    """

    def __init__(
        self, workdir: str, keep: int = 3, keep_every: int = 0, hosts: Hosts | None = None
    ):
        self.workdir = workdir
        self._exchange = hosts.exchange if hosts is not None else None
        self._index = hosts.index if hosts is not None else 0
        self.folder = files.join(workdir, "checkpoints")
        self.keep = keep
        self.keep_every = keep_every
        self.newest: int | None = None
        self._copy = HostCopy()
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint-writer")
        self._pending: tuple[int, Future[None]] | None = None
        self._failure: Failure | None = None
        self._unmarked: tuple[int, Best] | None = None  # the best checkpoint, not marked as yet
        self._best = OwnFile(workdir, "checkpoints", "best")

    def list_steps(self) -> list[int]:
        """Returns the steps of the complete checkpoints in order."""
        self.wait()
        return manifest.list_steps(self.folder)

    def find_best(self) -> int | None:
        """Returns the step of the best checkpoint, or None if none is marked."""
        return _step(side_files.read(self._best.path, step=int))

    def save(
        self,
        step: int,
        leaves: Mapping[str, Sequence[Leaf]],
        state: Mapping[str, Any],
        best: Best | None = None,
        first: Callable[[], None] = lambda: None,
    ) -> None:
        """Starts writing a checkpoint; returns as soon as the leaves may change again.

        Waits for an earlier save that is still being written. A save that fails leaves the earlier
        checkpoints as they are: `take_failure` reports an `OSError`, and `wait` raises others.

        Args:
            step: the step of the checkpoint.
            leaves: the run's leaves, by group. This process writes the regions in `Leaf.written`,
                in one file for each group.
            state: the host's state as JSON; arrays become lists.
            best: the metric that makes this checkpoint the best so far, which is kept regardless
                of its age; None if it is not the best.
            first: function that the chief's writer thread calls before it writes any file.
        """
        self.wait()
        marker = OwnFile(self.workdir, "checkpoints", str(step), manifest.FILE)
        writing = Writing(
            files.join(self.folder, str(step)),
            step,
            self._copy.take(leaves),
            json.dumps(state, default=_to_plain).encode(),
            marker,
        )

        def prepare() -> None:
            # If another owner of the workdir writes these files from here on, our writes fail.
            for file in (marker, self._best):
                file.see()
            locks.check_lock(self.workdir)
            first()

        task = (step, writing, prepare, best)
        write = self._write_part if self._index else self._write
        self._pending = step, self._writer.submit(write, *task)

    def mark_best(self, step: int, best: Best) -> None:
        """Marks a checkpoint that was saved earlier as the best one so far."""
        self.wait()
        if self._index:  # only the chief marks the best checkpoint
            return
        self._pending = step, self._writer.submit(self._mark_best, step, best)

    def retry_marking(self) -> None:
        """Tries again to mark the best checkpoint, if that failed and nothing is being written."""
        if self._pending is None and self._unmarked is not None:
            self._mark_best(*self._unmarked)

    def reserve(self, leaves: Mapping[str, Sequence[Leaf]]) -> None:
        """Allocates memory for the copy in the background, so that the first save is fast."""
        self._copy.reserve(leaves)

    def wait(self) -> None:
        """Waits until nothing is being written; keeps an `OSError` for `take_failure`.

        Other methods that need this wait, too, and raise the same.

        Raises:
            ChangedError: another process wrote the checkpoint's files meanwhile.
            LockLostError: this process lost the workdir.
        """
        if self._pending is None:
            return
        step, future = self._pending
        try:
            future.result()
        except OSError as error:
            self._failure = Failure(step, error.strerror or str(error), error)
        finally:
            self._pending = None

    def take_failure(self) -> Failure | None:
        """Returns the last save that failed with an `OSError`, and forgets it; None without one.

        On several hosts, all learn of a failure at the next save, so that they act alike. Raises
        what `wait` does.
        """
        # A failure that was not taken as yet is older, and the first to be returned.
        known = self._failure is not None or self._exchange is not None
        if not known and self._pending is not None and self._pending[1].done():
            self.wait()
        failure, self._failure = self._failure, None
        return failure

    def restore(
        self,
        leaves: Mapping[str, Sequence[Leaf]],
        step: int | None = None,
        check: Callable[[Mapping[str, Any], str], None] = lambda state, workdir: None,
    ) -> Restored | None:
        """Loads a checkpoint into leaves.

        Damaged checkpoints are skipped with a warning: without `step`, the newest intact one is
        loaded. Values of another precision are rounded to the dtypes of the leaves.

        Args:
            leaves: see `save`.
            step: the step of the checkpoint; None loads the newest.
            check: see `load`.

        Returns:
            The step and the state of the checkpoint, or None if there are no checkpoints.

        Raises:
            UserError: the checkpoint belongs to another model or optimizer (the message lists the
                differences), or none of the checkpoints is complete.
        """
        candidates = self.list_candidates(step)
        for candidate in candidates:
            loaded = self.load(leaves, candidate, check)
            if loaded is not None:
                return self.restore_loaded(loaded)
        if candidates:
            raise self.describe_failure(candidates, step)
        return None

    def list_candidates(self, step: int | None = None) -> list[int]:
        """Returns the steps of the checkpoints to restore, in the order to try them.

        Args:
            step: the only step to try; None tries all complete checkpoints, the newest first.

        Raises:
            UserError: there is no complete checkpoint of that step.
        """
        self.wait()
        complete = manifest.list_steps(self.folder)[::-1]
        if step is not None and step not in complete:
            raise self.describe_failure([step], step)
        return [step] if step is not None else complete

    def load(
        self,
        leaves: Mapping[str, Sequence[Leaf]],
        step: int,
        check: Callable[[Mapping[str, Any], str], None] = lambda state, workdir: None,
    ) -> Loaded | None:
        """Reads a checkpoint; returns None, after a warning, if it is damaged.

        Args:
            leaves: see `save`; nothing is assigned.
            step: the step of the checkpoint.
            check: a function of the host's state and the workdir, which raises `UserError` if this
                run cannot resume from the checkpoint.

        Raises:
            UserError: the checkpoint belongs to another model or optimizer, or `check` fails.
        """
        folder = files.join(self.folder, str(step))
        try:
            stored = manifest.read(folder)
            [(_, state)] = stored["state.json"].read([0])
            host = json.loads(state)
            check(host, self.workdir)
            found = matching.read(stored, leaves, step)
        except (OSError, ValueError, RecursionError) as error:
            _log.warning("The checkpoint %s is damaged (%s) and was skipped.", folder, error)
            return None
        return Loaded(Restored(step, host), found)

    def restore_loaded(self, loaded: Loaded) -> Restored:
        """Assigns the values of a loaded checkpoint to the leaves; returns its step and state."""
        matching.assign(loaded.found)
        self.newest = loaded.restored.step
        return loaded.restored

    def describe_failure(self, candidates: list[int], step: int | None) -> UserError:
        """Returns the error if none of the candidates, the steps that were tried, can be read."""
        if step is None:
            return UserError(
                f"No checkpoint in {self.folder} is complete (found "
                f"{matching.format_list(candidates)}). To train from the start, remove that "
                "folder or choose another workdir."
            )
        others = [other for other in manifest.list_steps(self.folder) if other != step]
        hint = f"; complete ones: {matching.format_list(others)}" if others else ""
        if others and self.find_best() == step:
            best = files.join(self.folder, "best")
            hint += f". Remove {best} to use the newest of them"
        return UserError(
            f"The checkpoint of step {step} in {self.folder} is missing or incomplete{hint}."
        )

    # The methods below run in the writer's thread.

    def _write(
        self,
        step: int,
        writing: Writing,
        prepare: Callable[[], None],
        best: Best | None,
    ) -> None:
        """Writes a checkpoint, on the chief; marks the best checkpoint and removes old ones."""
        if self._exchange is None:
            prepare()
        try:
            if self._exchange is None:
                writing.write_alone()
            else:
                writing.as_chief(self._exchange, prepare)
            self.newest = step
        except OSError:
            if writing.begun:  # the incomplete checkpoint would only take up space
                with contextlib.suppress(OSError):
                    locks.check_lock(self.workdir)
                    manifest.remove_checkpoint(files.join(self.folder, str(step)))
            raise
        if best is not None:
            self._unmarked = step, best
        if self._unmarked is not None:
            self._mark_best(*self._unmarked)
        try:
            self._remove_old(step)
        except OSError as error:
            _log.warning("Old checkpoints could not be removed: %s", error)

    def _write_part(
        self, step: int, writing: Writing, prepare: Callable[[], None], best: Best | None
    ) -> None:
        """Writes this host's files of a checkpoint, on a host other than the chief."""
        if self._exchange is not None:
            writing.as_other(self._exchange, self._index)
            self.newest = step

    def _mark_best(self, step: int, best: Best) -> None:
        """Marks a checkpoint as the best, or leaves that to the next save if it fails.

        Only the chief does so, so that a failure must not be one of the save, of which all hosts
        learn.
        """
        self._unmarked = step, best
        try:
            self._best.take(step=int)  # renames a damaged file, which the write would replace
            record = {"step": step, **best._asdict()}
            self._best.write(json.dumps(record).encode())
            self._unmarked = None
        except OSError as error:
            _log.warning(
                "The checkpoint of step %s could not be marked as the best (%s). The next save "
                "tries it again.",
                step,
                error,
            )

    def _remove_old(self, newest: int) -> None:
        """Removes checkpoints that need not be kept, and leftovers of interrupted saves.

        Checkpoints of later steps are damaged ones that the run fell back from: they are ignored,
        and stay until the run reaches their steps again.
        """
        complete = [step for step in manifest.list_steps(self.folder) if step <= newest]
        kept: set[int | None] = {_step(self._best.take(step=int)), *complete[-self.keep :]}
        kept |= {self._unmarked[0]} if self._unmarked is not None else set()
        if self.keep_every:
            kept |= {step for step in complete if step % self.keep_every == 0}
        for step in manifest.list_folders(self.folder):
            if step < newest and step not in kept:
                manifest.remove_checkpoint(files.join(self.folder, str(step)))
        for name in files.list_names(self.folder):
            if name.endswith(".tmp"):
                files.remove(files.join(self.folder, name))


def _step(record: dict[str, Any] | None) -> int | None:
    return record["step"] if record else None


def _to_plain(value: Any) -> Any:
    """Converts a value for JSON: an array or NumPy scalar to lists or a number, objects to text."""
    array = np.asarray(value)
    return repr(value) if array.dtype == object else array.tolist()
