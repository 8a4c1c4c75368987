"""Files of a workdir, local or `gs://`: written completely or not at all, by one run at a time.

Every operation on storage passes through `_operate` and raises only `OSError`. Operations on
buckets are retried by the policy of `retry`.
"""

import contextlib
import fcntl
import json
import logging
import os
import re
import shutil
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from tftpu.errors import UserError
from tftpu.storage import retry

_log = logging.getLogger(__name__)
_T = TypeVar("_T")
StrPath = str | os.PathLike[str]

_HELD: set[Path] = set()  # the locks that this process holds


class HeldError(UserError):
    """Another process uses the workdir."""


def is_remote(path: StrPath) -> bool:
    """Returns whether a path needs TensorFlow's file systems, such as `gs://`."""
    return "://" in str(path)


def check_folder(name: str, path: str) -> None:
    """Raises `UserError` unless a path can be that of a folder, local or in a bucket.

    Args:
        name: of the flag or argument, for the message.
        path: its value.
    """
    if "\0" in path or ("://" in path and not re.fullmatch(r"gs://[^/\s]+(/.*)?", path)):
        raise UserError(
            f"{name}={path} is no folder that tftpu can use: give a local one, or "
            "gs://BUCKET/FOLDER."
        )


def join(*parts: StrPath) -> str:
    """Joins the parts of a path, local or remote."""
    return os.path.join(*map(str, parts))


def write_whole(path: StrPath, data: bytes | Iterable[bytes]) -> None:
    """Writes a file atomically: readers and crashes see the old content or the new one.

    Args:
        path: local or remote; folders are created.
        data: the content, or pieces of it; they are iterated again if a bucket needs a retry.

    Raises:
        OSError: it could not be written; the earlier content is unchanged.
    """
    parts = [data] if isinstance(data, bytes) else data
    if is_remote(path):
        _remote(path, _upload, path, parts)
        return
    target = Path(path)
    _operate("mkdir", target.parent, os.makedirs, target.parent, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with _operate("open", temporary, open, temporary, "wb", buffering=0) as file:
            for part in parts:
                _operate("write", temporary, _write_all, file, part)
            _operate("fsync", temporary, os.fsync, file.fileno())
        _operate("replace", target, os.replace, temporary, target)
        _operate("fsync", target.parent, _sync_folder, target.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            _operate("unlink", temporary, os.unlink, temporary)
        raise


def read(path: StrPath) -> bytes:
    """Returns the content of a file.

    Raises:
        FileNotFoundError: there is none.
        OSError: it is a folder or a pipe, or it cannot be read.
    """
    if is_remote(path):
        return _remote(path, _download, path)
    if os.path.exists(path) and not os.path.isfile(path):  # reading a pipe could wait forever
        raise OSError(f"{path} is not a file")
    return _operate("read", path, Path(path).read_bytes)


def retried(path: StrPath, function: Callable[[], _T]) -> _T:
    """Calls a function that reads a file, again while its bucket is out of reach.

    Raises:
        OSError: the bucket stays out of reach.
    """
    return _remote(path, function) if is_remote(path) else function()


def exists(path: StrPath) -> bool:
    """Returns whether there is a file or a folder."""
    if is_remote(path):
        return _remote(path, _gfile().exists, path)
    return _operate("exists", path, os.path.exists, path)


def size(path: StrPath) -> int | None:
    """Returns the bytes of a file, or None if there is none."""
    if is_remote(path):
        with contextlib.suppress(FileNotFoundError):
            return _remote(path, _gfile().stat, path).length
        return None
    return os.path.getsize(path) if os.path.isfile(path) else None


def names_in(folder: StrPath) -> list[str]:
    """Returns the sorted names in a folder, or none if it does not exist."""
    if is_remote(folder):
        if not exists(folder):
            return []
        return sorted(name.rstrip("/") for name in _remote(folder, _gfile().listdir, folder))
    try:
        return sorted(_operate("list", folder, os.listdir, folder))
    except (FileNotFoundError, NotADirectoryError):
        return []


def remove(path: StrPath) -> None:
    """Removes a file, if it exists."""
    if is_remote(path):
        if exists(path):
            _remote(path, _gfile().remove, path)
        return
    with contextlib.suppress(FileNotFoundError):
        _operate("unlink", path, os.unlink, path)


def remove_tree(folder: StrPath) -> None:
    """Removes a folder and its content, if it exists."""
    if is_remote(folder):
        if exists(folder):
            _remote(folder, _gfile().rmtree, folder)
        return
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        _operate("rmtree", folder, shutil.rmtree, folder)


@contextlib.contextmanager
def claim(workdir: StrPath) -> Iterator[None]:
    """Creates a workdir and locks it for one run until the end of the block.

    Blocks of one process may be nested. The lock is the operating system's: it is released
    when the process ends for any reason. Buckets have no such locks, so nothing prevents two runs
    on one workdir there.

    Raises:
        HeldError: another process holds the lock.
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
                f"The folder '{workdir}' is held by {holder}: wait for that process, or choose "
                "another folder."
            ) from error
        except OSError as error:  # some network disks
            _log.warning("%s cannot be locked (%s): start only one run on it.", workdir, error)
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


def truncate_lines(path: StrPath, last_step: int) -> None:
    """Drops the lines of a JSON-lines file after a step, and an incomplete last line.

    A run that resumes from a checkpoint repeats the steps after it, which would otherwise appear
    twice.
    """
    if not exists(path):
        return
    kept = []
    for line in read(path).decode(errors="replace").splitlines():
        with contextlib.suppress(ValueError, KeyError, TypeError):
            if json.loads(line)["step"] <= last_step:
                kept.append(line + "\n")
    write_whole(path, "".join(kept).encode())


def _operate(
    operation: str, path: StrPath, function: Callable[..., _T], *args: Any, **keywords: Any
) -> _T:
    """Performs one operation on storage. Tests replace it to make the nth one fail."""
    return function(*args, **keywords)


def _remote(path: StrPath, function: Callable[..., _T], *args: Any) -> _T:
    """Performs an operation on a bucket, and retries it while the bucket is out of reach."""
    from tensorflow import errors

    transient = (
        errors.AbortedError,
        errors.DeadlineExceededError,
        errors.InternalError,
        errors.ResourceExhaustedError,
        errors.UnavailableError,
    )
    name = getattr(function, "__name__", "read")
    try:
        return retry.call(lambda: _operate(name, path, function, *args), transient, str(path))
    except errors.NotFoundError as error:
        raise FileNotFoundError(path) from error
    except errors.UnimplementedError as error:
        raise UserError(
            f"{str(path)!r} is in a place that cannot be reached: give a local path, or "
            "gs://BUCKET/NAME."
        ) from error
    except errors.OpError as error:
        raise OSError(f"{path}: {str(error).splitlines()[0][:200]}") from error


def _upload(path: StrPath, parts: Iterable[bytes]) -> None:
    # An object appears in its bucket when the upload is complete.
    with _gfile().GFile(path, "wb") as file:
        for part in parts:
            file.write(part)


def _download(path: StrPath) -> bytes:
    with _gfile().GFile(path, "rb") as file:
        return file.read()


def _write_all(file: BinaryIO, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]


def _sync_folder(folder: Path) -> None:
    """Syncs a folder, so that a new name in it survives a crash of the machine."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _cannot_write(workdir: StrPath, error: OSError) -> UserError:
    return UserError(
        f"The folder '{workdir}' cannot be written ({error.strerror or error}): choose another."
    )


def _gfile() -> Any:
    import tensorflow as tf

    return tf.io.gfile
