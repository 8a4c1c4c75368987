"""Files of a workdir, local or `gs://`: written whole or not at all; one run at a time."""

import contextlib
import fcntl
import json
import os
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from tftpu.errors import UserError

_HELD: set[Path] = set()  # the locks that this process holds


def is_remote(path: str) -> bool:
    """Whether TensorFlow's file systems are needed for the path."""
    return "://" in str(path)


def join(*parts: str) -> str:
    return os.path.join(*map(str, parts))


def write_whole(path: str, data: bytes) -> None:
    """Writes a file so that a reader, or a crash, sees the old content or the new, never a part."""
    if is_remote(path):
        # An object of a bucket appears when its upload is complete.
        with _gfile().GFile(path, "wb") as file:
            file.write(data)
        return
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def read(path: str) -> bytes:
    """The content of a file; raises FileNotFoundError if there is none."""
    if is_remote(path):
        if not _gfile().exists(path):
            raise FileNotFoundError(path)
        with _gfile().GFile(path, "rb") as file:
            return file.read()
    return Path(path).read_bytes()


def exists(path: str) -> bool:
    return _gfile().exists(path) if is_remote(path) else Path(path).exists()


def names_in(folder: str) -> list[str]:
    """The names in a folder, sorted; empty if there is no such folder."""
    if is_remote(folder):
        if not _gfile().exists(folder):
            return []
        return sorted(name.rstrip("/") for name in _gfile().listdir(folder))
    return sorted(os.listdir(folder)) if os.path.isdir(folder) else []


def remove_tree(folder: str) -> None:
    """Removes a folder and all in it, if it is there."""
    if is_remote(folder):
        if _gfile().exists(folder):
            _gfile().rmtree(folder)
        return
    shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def claim(workdir: str) -> Iterator[None]:
    """Holds a workdir for one run: creates it, and locks it until the end of the block.

    Within a process that holds it already the block runs as it is. The lock is the operating
    system's, so it ends with the process however that ends. A bucket has no such locks: there, two
    runs on one workdir are not kept apart.

    Raises:
        UserError: the workdir cannot be written, or another run holds it.
    """
    if is_remote(workdir):
        _gfile().makedirs(workdir)
        yield
        return
    lock = Path(workdir).absolute() / ".lock"
    if lock in _HELD:
        yield
        return
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        file = open(lock, "a+")  # noqa: SIM115 (held until the end of the block)
    except OSError as error:
        raise UserError(
            f"The workdir {workdir!r} cannot be written ({error.strerror}): choose another with "
            "--workdir=DIR."
        ) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            holder = file.read().strip() or "another process"
            raise UserError(
                f"The workdir {workdir!r} is held by {holder}: wait for that run, or choose "
                "another with --workdir=DIR."
            ) from error
        file.truncate(0)
        started = time.strftime("%Y-%m-%d %H:%M:%S")
        file.write(f"process {os.getpid()} on {socket.gethostname()}, since {started}\n")
        file.flush()
        _HELD.add(lock)
        try:
            yield
        finally:
            _HELD.remove(lock)


def truncate_lines(path: str, last_step: int) -> None:
    """Drops the lines of a JSON-lines file that come after a step, and a torn last line.

    A run that goes on from a checkpoint repeats the steps after it; without this they would stand
    in the file twice.
    """
    if not exists(path):
        return
    kept = []
    for line in read(path).decode().splitlines():
        with contextlib.suppress(ValueError, KeyError, TypeError):
            if json.loads(line)["step"] <= last_step:
                kept.append(line + "\n")
    write_whole(path, "".join(kept).encode())


def _gfile():
    import tensorflow as tf

    return tf.io.gfile
