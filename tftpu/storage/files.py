"""Files and folders, local or `gs://`: written completely or not at all.

Operations on a disk raise `OSError`; most pass through `_operate`, which tests replace. Operations
on a bucket are requests of `buckets`, and raise its `BucketError`, which is an `OSError` as well.
"""

import contextlib
import errno
import itertools
import os
import posixpath
import re
import shutil
import stat
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from tftpu.errors import UserError, find_nearest
from tftpu.storage import buckets

_T = TypeVar("_T")
StrPath = str | os.PathLike[str]

_ROOM = 200  # bytes reserved for paths inside a folder, such as "trials/0000/run/checkpoints/…"
_SHORT = 40  # bytes of each name in the path that `check_folder` tries
_LONGEST_OBJECT = 1024  # most bytes of an object's name in a bucket


def is_remote(path: StrPath) -> bool:
    """Returns whether a path has a scheme, such as `gs://`; any other scheme fails when used."""
    return "://" in str(path)


def is_inside(name: str) -> bool:
    """Returns whether a name, relative to a folder, stays inside the folder.

    The names `../x`, `/x` and `gs://b/x` do not stay inside; names from a file may be like these.
    """
    parts = name.split("/")
    return (
        bool(name)
        and name == posixpath.normpath(name)
        and ".." not in parts
        and not name.startswith("/")
        and "://" not in name
        and "\\" not in name
        and "\0" not in name
        and name != "."
    )


def check_folder(name: str, path: str) -> None:
    """Raises `UserError` unless a path can name a folder, local or in a bucket.

    Other addresses are rejected, because a run cannot lock them: two runs could write there at
    once.

    Args:
        name: the name of the flag or argument, for the message.
        path: its value.
    """
    allowed = "give a local one, or gs://BUCKET/FOLDER"
    if path.startswith("~"):  # such a folder would be easy to make and dangerous to remove
        raise UserError(
            f"{name}={path} begins with ~, which a shell replaces only at the beginning of a "
            f"word, and Python never does. Give the whole path, {os.path.expanduser(path)}, or "
            f"./{path} for a folder of that name."
        )
    try:
        if is_remote(path):
            folder = re.fullmatch(r"gs://[^/\s]+(/.*)?", path)
            too_long = len(path.encode()) > _LONGEST_OBJECT - _ROOM
        else:
            folder = path
            # Tried with short names, because encrypted file systems allow 143 bytes for a name, and
            # others 255.
            too_long = _is_too_long(join(path, *["x" * _SHORT] * (_ROOM // _SHORT)))
    except ValueError:  # the path holds a character that no name can have
        folder, too_long = None, False
    if not folder:
        raise UserError(f"{name}={path} is not a folder that tftpu can use: {allowed}.")
    if too_long:
        raise UserError(f"{name}={path[:40]}… is too long: give a shorter name.")


def _is_too_long(path: str) -> bool:
    """Returns whether a local path is too long for its file system; raises ValueError for "\\0"."""
    try:
        os.lstat(path)
    except OSError as error:
        return error.errno == errno.ENAMETOOLONG
    return False


def join(*parts: StrPath) -> str:
    """Joins the parts of a path, local or remote."""
    return os.path.join(*map(str, parts))


def make_folder(folder: StrPath) -> None:
    """Creates a local folder and its parents, durably; does nothing for a bucket."""
    if is_remote(folder):  # a bucket has objects, but no folders
        return
    missing = [path for path in (Path(folder), *Path(folder).parents) if not path.exists()]
    _operate("mkdir", folder, os.makedirs, folder, exist_ok=True)
    for path in reversed(missing):
        _operate("fsync", path.parent, _sync_folder, path.parent)


def write_whole(path: StrPath, data: bytes | Iterable[bytes]) -> None:
    """Writes a file atomically: readers, also after a crash, see the old content or the new one.

    Args:
        path: local or remote; folders are created.
        data: the content, or pieces of it.

    Raises:
        OSError: it could not be written; the earlier content is unchanged.
    """
    parts = [data] if isinstance(data, bytes) else data
    if is_remote(path):
        buckets.write(str(path), parts)
        return
    target = Path(path)
    make_folder(target.parent)
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


def append(path: StrPath, pending: bytearray) -> None:
    """Appends bytes to a local file, and removes from `pending` what was written.

    Raises:
        OSError: not all bytes were written; the rest stays in `pending` and must be appended next.
    """
    with _operate("open", path, open, path, "ab", buffering=0) as file:
        while pending:
            del pending[: _operate("write", path, _write_some, file, bytes(pending))]


def sync(path: StrPath) -> None:
    """Syncs a local file and its name, so that they survive a crash of the machine."""
    with _operate("open", path, open, path, "rb") as file:
        _operate("fsync", path, os.fsync, file.fileno())
    _operate("fsync", Path(path).parent, _sync_folder, Path(path).parent)


def rename(path: StrPath, target: StrPath) -> None:
    """Renames a file; replaces an existing file of the new name."""
    if is_remote(path):
        buckets.rename(str(path), str(target))
    else:
        _operate("replace", target, os.replace, path, target)


def read(path: StrPath) -> bytes:
    """Returns the content of a file.

    Raises:
        FileNotFoundError: the file does not exist.
        OSError: it is a folder or a pipe, or it cannot be read.
    """
    if is_remote(path):
        return buckets.read(str(path))
    return _operate("read", path, _read_whole, path)


def open_file(path: StrPath) -> BinaryIO:
    """Opens a regular file for reading; rejects pipes, which could block forever.

    Raises:
        FileNotFoundError: the file does not exist.
        OSError: it is a folder, a pipe or a device, or it cannot be opened.
    """
    if is_remote(path):
        return buckets.open_file(str(path))

    def open_regular(name: str, flags: int) -> int:
        # O_NONBLOCK has no effect on a regular file, but keeps a pipe from blocking
        descriptor = os.open(name, flags | os.O_NONBLOCK)
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            return descriptor
        os.close(descriptor)
        raise OSError(f"{name} is not a regular file")

    return open(path, "rb", opener=open_regular)


def read_range(path: StrPath, first: int, count: int) -> bytes:
    """Returns `count` bytes of a file from offset `first`, or fewer at the end of the file.

    Raises:
        FileNotFoundError: the file does not exist.
        OSError: it cannot be read.
    """
    if is_remote(path):
        return buckets.read_range(str(path), first, count)
    return _operate("read", path, _read_range, path, first, count)


def exists(path: StrPath) -> bool:
    """Returns whether a path exists, as a file or as a folder."""
    if is_remote(path):
        return buckets.exists(str(path))
    return _operate("exists", path, os.path.exists, path)


def suggest_path(path: StrPath, ending: str = "") -> str:
    """Returns a similar path that does not exist yet, such as `digits_2.onnx` for `digits.onnx`.

    Args:
        path: a path that exists, local or in a bucket.
        ending: the end of its name, such as ".onnx", which the new name keeps.
    """
    stem = str(path).rstrip("/").removesuffix(ending)
    names = (f"{stem}_{number}{ending}" for number in itertools.count(2))
    return next(name for name in names if not exists(name))


def suggest_existing(path: StrPath, folders: bool = False) -> str:
    """Returns a question, " Did you mean …?", with the file of the most similar name; or "".

    Args:
        path: a path that does not exist. For a path in a bucket, the result is always "".
        folders: whether to suggest folders as well.
    """
    folder, name = os.path.split(str(path))
    if is_remote(path) or not os.path.isdir(folder or "."):
        return ""
    near = ""
    with contextlib.suppress(OSError), os.scandir(folder or ".") as there:
        near = find_nearest(name, [one.name for one in there if folders or one.is_file()])
    return f" Did you mean {os.path.join(folder, near)!r}?" if near else ""


def find_size(path: StrPath) -> int | None:
    """Returns the size of a file in bytes, or None if the file does not exist."""
    if is_remote(path):
        with contextlib.suppress(FileNotFoundError):
            return buckets.look_up(str(path)).bytes
        return None
    return os.path.getsize(path) if os.path.isfile(path) else None


def list_names(folder: StrPath) -> list[str]:
    """Returns the sorted names of the files and folders in a folder; [] if it does not exist."""
    try:
        if is_remote(folder):
            return sorted({*itertools.chain(*buckets.list_names(str(folder)))})
        return sorted(_operate("list", folder, os.listdir, folder))
    except (FileNotFoundError, NotADirectoryError):
        return []


def list_folder(folder: StrPath) -> tuple[list[str], list[str]]:
    """Returns the sorted names of the files in a folder, and those of the folders; may be empty."""
    if is_remote(folder):
        try:
            return buckets.list_names(str(folder))
        except FileNotFoundError:
            return [], []
    names = list_names(folder)
    inner = {name for name in names if os.path.isdir(join(folder, name))}
    return [name for name in names if name not in inner], sorted(inner)


def remove(path: StrPath) -> None:
    """Removes a file, if it exists."""
    if is_remote(path):
        buckets.remove(str(path))
        return
    with contextlib.suppress(FileNotFoundError):
        _operate("unlink", path, os.unlink, path)


def remove_folder_of(folder: StrPath, name: str) -> None:
    """Removes a local folder if it is empty, or contains only the file `name`."""
    with contextlib.suppress(OSError):
        if {*os.listdir(folder)} <= {name}:
            os.unlink(Path(folder) / name)
            os.rmdir(folder)


def remove_tree(folder: StrPath) -> None:
    """Removes a folder and its content, if it exists."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        if is_remote(folder):
            buckets.remove_tree(str(folder))
        else:
            _operate("rmtree", folder, shutil.rmtree, folder)


def _operate(
    operation: str, path: StrPath, function: Callable[..., _T], *args: Any, **keywords: Any
) -> _T:
    """Performs one operation on a disk. Tests replace it to make the nth operation fail."""
    return function(*args, **keywords)


def _read_whole(path: StrPath) -> bytes:
    with open_file(path) as file:
        return file.read()


def _read_range(path: StrPath, first: int, count: int) -> bytes:
    with open_file(path) as file:
        file.seek(first)
        return file.read(count)


def _write_all(file: BinaryIO, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]


def _write_some(file: BinaryIO, data: bytes) -> int:
    return file.write(data)


def _sync_folder(folder: Path) -> None:
    """Syncs a folder, so that a new name in it survives a crash of the machine."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
