"""Small files that a run replaces, such as `goodput.json`, unless another run has written them.

On a disk, the lock of the workdir keeps other processes away. The lease of a bucket can be lost
unnoticed, for example while a machine is suspended: an object is therefore replaced only if it
still has the generation that this process saw while it held the lease.
"""

from typing import Any

from tftpu.storage import buckets, files, locks, retry, side_files


class _StaysError(OSError):
    """An object still exists after it was removed."""


class OwnFile:
    """A small file of a workdir, which only the run that holds the workdir's lock replaces.

    Only one thread may use it at a time.

    Args:
        workdir: local or `gs://`.
        names: the names of the folders below the workdir, and of the file.

    Attributes:
        path: the path of the file.
    """

    def __init__(self, workdir: files.StrPath, *names: str):
        self.path = files.join(workdir, *names)
        self._workdir = workdir
        self._claim: object = None  # the lock under which the generation was seen
        self._generation: int | None = None  # None: not seen under this lock yet
        # Bytes that were sent, but not confirmed; the next write sends them again first.
        self._unsure = b""

    def see(self) -> None:
        """Records the generation of the file in a bucket, once for each lock of its workdir.

        Raises:
            LockLostError: this process lost the workdir.
            OSError: the bucket is out of reach.
        """
        if not files.is_remote(self.path):
            return
        claim = locks.find_lock(self._workdir)
        if self._generation is None or claim is not self._claim:
            generation = buckets.read_newest(self.path)[1]
            # If the lock was lost before the read, the generation may be the next owner's.
            locks.check_lock(self._workdir)
            self._claim, self._generation, self._unsure = claim, generation, b""

    def take(self, **fields: type) -> dict[str, Any] | None:
        """Returns the file's JSON object, or None; renames a damaged file, as `side_files.take`."""
        record = side_files.take(self.path, **fields)
        if record is None and self._generation:
            self._generation = None
        return record

    def write(self, data: bytes) -> None:
        """Writes the file atomically; returns when it is durable.

        Raises:
            ChangedError: another process wrote the file meanwhile; that content stays.
            LockLostError: this process lost the workdir.
            OSError: the file could not be written.
        """
        if not files.is_remote(self.path):
            files.write_whole(self.path, data)
            return
        self.see()
        if self._unsure:
            self._publish(self._unsure)
        self._publish(data)

    def remove(self) -> None:
        """Removes the file, if there is one; raises the errors of `write`."""
        if not files.is_remote(self.path):
            files.remove(self.path)
            return
        self.see()
        if retry.call(self._remove_seen, (_StaysError,), self.path):
            raise buckets.ChangedError(
                f"Failed removing {self.path}: another process wrote it meanwhile. Use a separate "
                "folder for each run."
            )
        self._generation, self._unsure = 0, b""

    def _remove_seen(self) -> bool:
        """Removes the recorded generation, or raises `_StaysError`; returns whether one is left."""
        if self._generation:
            buckets.discard(self.path, self._generation)
        left = buckets.read_newest(self.path)[1]
        if left and left == self._generation:
            raise _StaysError(f"{self.path} cannot be removed")
        return left > 0

    def _publish(self, data: bytes) -> None:
        self._unsure = data
        self._generation = buckets.publish(self.path, data, self._generation or 0)
        self._unsure = b""
