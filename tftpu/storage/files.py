"""Files of a workdir, local or `gs://`: written whole or not at all; one run at a time.

Every operation on storage goes through `_operate`, and fails with OSError alone. Those of a bucket
are tried again for some minutes where it answers that it is busy.
"""

import contextlib
import fcntl
import json
import logging
import os
import random
import shutil
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from tftpu.errors import UserError

RETRY_SECONDS = 300.0  # how long an operation on a bucket is tried again
_FIRST_WAIT = 0.5  # seconds, doubled after each try up to
_LONGEST_WAIT = 20.0
# Apart from Python's generator: Keras draws the seeds of initial weights from that one, and a
# thread that waits for a bucket meanwhile would change them.
_RANDOM = random.Random()

_HELD: set[Path] = set()  # the locks that this process holds


class HeldError(UserError):
    """Another process works in a folder."""


def is_remote(path: str) -> bool:
    """Whether TensorFlow's file systems are needed for the path."""
    return "://" in str(path)


def join(*parts: str) -> str:
    return os.path.join(*map(str, parts))


def write_whole(path: str, data: bytes | Iterable[bytes]) -> None:
    """Writes a file so that a reader, or a crash, sees the old content or the new, never a part.

    Args:
        data: the content, or its parts; these are asked for again if a bucket has to be.

    Raises:
        OSError: it could not be written; what was there before still is.
    """
    parts = [data] if isinstance(data, bytes) else data
    if is_remote(path):
        _remote(path, _upload, path, parts)
        return
    path = Path(path)
    _operate("mkdir", path.parent, os.makedirs, path.parent, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with _operate("open", temporary, open, temporary, "wb", buffering=0) as file:
            for part in parts:
                _operate("write", temporary, _write_all, file, part)
            _operate("fsync", temporary, os.fsync, file.fileno())
        _operate("replace", path, os.replace, temporary, path)
        _operate("fsync", path.parent, _sync_folder, path.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            _operate("unlink", temporary, os.unlink, temporary)
        raise


def read(path: str) -> bytes:
    """The content of a file; raises FileNotFoundError if there is none."""
    if is_remote(path):
        return _remote(path, _download, path)
    return _operate("read", path, Path(path).read_bytes)


def exists(path: str) -> bool:
    if is_remote(path):
        return _remote(path, _gfile().exists, path)
    return _operate("exists", path, os.path.exists, path)


def size(path: str) -> int | None:
    """Bytes of a file; None if there is none."""
    if is_remote(path):
        with contextlib.suppress(FileNotFoundError):
            return _remote(path, _gfile().stat, path).length
        return None
    return os.path.getsize(path) if os.path.isfile(path) else None


def names_in(folder: str) -> list[str]:
    """The names in a folder, sorted; empty if there is no such folder."""
    if is_remote(folder):
        if not exists(folder):
            return []
        return sorted(name.rstrip("/") for name in _remote(folder, _gfile().listdir, folder))
    try:
        return sorted(_operate("list", folder, os.listdir, folder))
    except (FileNotFoundError, NotADirectoryError):
        return []


def remove(path: str) -> None:
    """Removes a file, if it is there."""
    if is_remote(path):
        if exists(path):
            _remote(path, _gfile().remove, path)
        return
    with contextlib.suppress(FileNotFoundError):
        _operate("unlink", path, os.unlink, path)


def remove_tree(folder: str) -> None:
    """Removes a folder and all in it, if it is there."""
    if is_remote(folder):
        if exists(folder):
            _remote(folder, _gfile().rmtree, folder)
        return
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        _operate("rmtree", folder, shutil.rmtree, folder)


@contextlib.contextmanager
def claim(workdir: str) -> Iterator[None]:
    """Holds a workdir for one run: creates it, and locks it until the end of the block.

    Within a process that holds it already the block runs as it is. The lock is the operating
    system's, so it ends with the process however that ends. A bucket has no such locks: there, two
    runs on one workdir are not kept apart.

    Raises:
        HeldError: another run holds it.
        UserError: the workdir cannot be written.
    """
    if is_remote(workdir):
        try:
            _remote(workdir, _gfile().makedirs, workdir)
        except OSError as error:
            raise _cannot_write(workdir, error) from error
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
        raise _cannot_write(workdir, error) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            holder = file.read().strip() or "another process"
            raise HeldError(
                f"The workdir {workdir!r} is held by {holder}: wait for that run, or choose "
                "another with --workdir=DIR."
            ) from error
        except OSError as error:  # some network disks
            logging.warning(
                "%s cannot be locked (%s): two runs on it would not be kept apart.", workdir, error
            )
        # A full disk: the lock holds without its text.
        with contextlib.suppress(OSError):
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


def _operate(operation: str, path: str, function: Callable, *args, **keywords) -> Any:
    """One operation on storage. Tests put another in its place, and let the nth one fail."""
    return function(*args, **keywords)


def _remote(path: str, function: Callable, *args) -> Any:
    """An operation on a bucket, tried again while the bucket is busy or out of reach."""
    from tensorflow import errors

    busy = (
        errors.AbortedError,
        errors.DeadlineExceededError,
        errors.InternalError,
        errors.ResourceExhaustedError,
        errors.UnavailableError,
    )
    end, wait = time.monotonic() + RETRY_SECONDS, _FIRST_WAIT
    while True:
        try:
            return _operate(function.__name__, path, function, *args)
        except errors.NotFoundError as error:
            raise FileNotFoundError(path) from error
        except errors.OpError as error:
            if not isinstance(error, busy) or time.monotonic() + wait > end:
                raise OSError(f"{path}: {str(error).splitlines()[0][:200]}") from error
            logging.warning("%s does not answer (%s): trying again.", path, type(error).__name__)
        time.sleep(wait * _RANDOM.uniform(0.5, 1.0))  # not all hosts at once
        wait = min(2 * wait, _LONGEST_WAIT)


def _upload(path: str, parts: Iterable[bytes]) -> None:
    # An object of a bucket appears when its upload is complete.
    with _gfile().GFile(path, "wb") as file:
        for part in parts:
            file.write(part)


def _download(path: str) -> bytes:
    with _gfile().GFile(path, "rb") as file:
        return file.read()


def _write_all(file: Any, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]


def _sync_folder(folder: Path) -> None:
    """Makes a new name in a folder outlive a crash of the machine."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _cannot_write(workdir: str, error: OSError) -> UserError:
    return UserError(
        f"The workdir {workdir!r} cannot be written ({error.strerror or error}): choose another "
        "with --workdir=DIR."
    )


def _gfile():
    import tensorflow as tf

    return tf.io.gfile
