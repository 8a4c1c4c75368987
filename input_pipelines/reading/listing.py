"""Listings of files, local or in a bucket."""

import errno
import fnmatch
import functools
import itertools
import logging
import os
import re
import stat
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from tftpu.storage import buckets, files

_log = logging.getLogger(__name__)
_SHOWN = 10  # maximum number of links that a warning names
_CHECKED = 1000  # maximum number of links to files that are checked for a warning
_WILDCARD = re.compile(r"[*?\[]")

_FILE, _FOLDER = "file", "folder"
_UNUSABLE, _UNREADABLE, _CIRCLE = "unusable", "unreadable", "circle"
_OTHERS = (_UNUSABLE, _UNREADABLE, _CIRCLE)


class Tree(NamedTuple):
    """The content of a folder and its subfolders, by sorted relative path; in a bucket, only files.

    Attributes:
        sizes: the sizes in bytes of the regular files.
        unusable: broken links, pipes and devices.
        unreadable: entries whose kind and size cannot be read.
        circles: links to themselves, or to a folder above them.
        empty: the outermost folders that contain none of the entries above.
        links: the links to regular files, and the links to folders that were followed.
    """

    sizes: dict[str, int]
    unusable: list[str]
    unreadable: list[str]
    circles: list[str]
    empty: list[str]
    links: list[str]


def list_sizes(folder: str) -> dict[str, int]:
    """Returns the sizes in bytes of all regular files below a folder, by sorted relative path."""
    return scan_folder(folder).sizes


def scan_folder(folder: str, follow_links: bool = False) -> Tree:
    """Lists everything below a folder.

    Args:
        folder: local or in a bucket.
        follow_links: whether to follow links to folders (except to a folder above the link), and to
            warn about folders that cannot be read.
    """
    if files.is_remote(folder):
        stored = sorted(buckets.list_files(folder).items())
        return Tree({name: file.bytes for name, file in stored}, [], [], [], [], [])
    sizes: dict[str, int] = {}
    links, read = [], []
    others: dict[str, list[str]] = {kind: [] for kind in _OTHERS}
    # Folders to read, each with its own real path and those of all its parents.
    pending: list[tuple[str, tuple[str, ...]]] = [("", (os.path.realpath(folder),))]
    while pending:
        path, real = pending.pop()
        try:
            with os.scandir(os.path.join(folder, path) if path else folder) as listed:
                entries = list(listed)
        except OSError as error:
            if follow_links:
                _warn(error)
            continue
        read.append(path)
        for entry in entries:
            name = f"{path}/{entry.name}" if path else entry.name
            kind, size = _examine_entry(entry)
            if kind == _FOLDER:
                if entry.is_symlink() and not follow_links:
                    continue
                inner = os.path.join(real[-1], entry.name)
                inner = os.path.realpath(inner) if entry.is_symlink() else inner
                if inner in real:
                    kind = _CIRCLE
                else:
                    pending.append((name, (*real, inner)))
            if kind == _FILE:
                sizes[name] = size
            if kind in others:
                others[kind].append(name)
            elif entry.is_symlink():
                links.append(name)
    empty = _find_empty(read, itertools.chain(sizes, *others.values()))
    unusable, unreadable, circles = map(sorted, others.values())
    sizes = dict(sorted(sizes.items()))
    return Tree(sizes, unusable, unreadable, circles, empty, sorted(links))


def _examine_entry(entry: os.DirEntry[str]) -> tuple[str, int]:
    """Returns the kind of an entry, and its size in bytes if it is a file, otherwise 0.

    It makes one system call for a file and none for a folder, because system calls are slow on NFS.
    """
    try:
        if entry.is_dir():
            return _FOLDER, 0
        status = entry.stat()
    except (FileNotFoundError, NotADirectoryError):
        return _UNUSABLE, 0
    except OSError as error:
        return _CIRCLE if error.errno == errno.ELOOP else _UNREADABLE, 0
    return (_FILE, status.st_size) if stat.S_ISREG(status.st_mode) else (_UNUSABLE, 0)


def _find_empty(folders: Iterable[str], names: Iterable[str]) -> list[str]:
    """Returns the outermost folders that contain none of the entries named `names`."""
    used = {""}
    for name in names:
        while (name := os.path.dirname(name)) and name not in used:
            used.add(name)
    empty = {folder for folder in folders if folder not in used}
    return sorted(name for name in empty if os.path.dirname(name) not in empty)


def _warn(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError | NotADirectoryError):
        _log.warning(
            "%s is left out, because it cannot be read: %s.", error.filename, error.strerror
        )


def warn_of_links(folder: str, links: Sequence[str], names: Collection[str]) -> None:
    """Warns once if files of a folder are outside it, because their paths contain links.

    Args:
        folder: a local folder; a bucket has no links.
        links: the relative paths of all links in the folder; see `Tree`.
        names: the paths of the files, relative to the folder.
    """
    if not links:
        return
    found = list(itertools.islice(_find_outer_links(folder, links, names), _SHOWN + 1))
    if found:
        said = ", ".join(found[:_SHOWN]) + (" and others" if len(found) > _SHOWN else "")
        if len({*names}.intersection(links)) > _CHECKED:
            said += f" (only the first {_CHECKED:,} links to images were checked)"
        _warn_of_links(folder, said)


def _find_outer_links(folder: str, links: Sequence[str], names: Collection[str]) -> Iterator[str]:
    """Yields a text about each link that a file's path contains and that leads out of a folder.

    Only the first `_CHECKED` links to files are checked: if millions of files are links, they
    usually lead to the same folder.
    """
    inside = os.path.realpath(folder)
    images, above = set(names), set()
    for name in names:
        while (name := os.path.dirname(name)) and name not in above:
            above.add(name)
    to_files = itertools.islice((link for link in links if link in images), _CHECKED)
    to_folders = (link for link in links if link in above)
    for link in sorted([*to_folders, *to_files]):
        target = os.path.realpath(os.path.join(folder, link))
        if os.path.commonpath([inside, target]) != inside:
            yield f"{decode_path(link)} is a link to {decode_path(target)}"


def decode_path(path: str) -> str:
    """Returns a path as text, with a replacement character for bytes that are not UTF-8."""
    return os.fsencode(path).decode(errors="replace")


@functools.cache
def _warn_of_links(folder: str, links: str) -> None:
    _log.warning("Some images of %s are outside of that folder: %s.", folder, links)


def find_matches(pattern: str) -> dict[str, int]:
    """Returns the sizes in bytes of files that match a pattern (*, ?, [...]), by sorted path.

    As in a shell, the pattern must name a hidden file or folder (.DS_Store) to match it.
    """
    folder = _find_fixed_folder(pattern)
    if folder == "." and not pattern.startswith("./"):
        pattern = f"./{pattern}"
    if not _WILDCARD.search(pattern) and not files.is_remote(pattern):
        size = files.find_size(pattern)
        return {} if size is None else {pattern: size}
    found = {f"{folder}/{name}": size for name, size in list_sizes(folder).items()}
    if "/." not in pattern.removeprefix(folder):
        found = {path: n for path, n in found.items() if "/." not in path.removeprefix(folder)}
    return {path: size for path, size in found.items() if fnmatch.fnmatchcase(path, pattern)}


def select_new(found: Mapping[str, int], known: set[str]) -> dict[str, int]:
    """Returns the files that earlier patterns did not match, and adds them to the known ones.

    Args:
        found: the sizes of the files that a pattern matches, by path.
        known: the files of earlier patterns; ./a.txt and a.txt are one file.
    """
    new = {path: n for path, n in found.items() if _shorten(path) not in known}
    known.update(map(_shorten, new))
    return new


def _shorten(path: str) -> str:
    return path if files.is_remote(path) else os.path.normpath(path)


def list_checksums(pattern: str) -> dict[str, str]:
    """Returns the CRC32C of the files that match a pattern, by their sorted path."""
    if not files.is_remote(pattern):
        return {path: buckets.describe_file(path).crc32c for path in find_matches(pattern)}
    folder = _find_fixed_folder(pattern)
    stored = buckets.list_files(folder)
    return {path: stored[path.removeprefix(f"{folder}/")].crc32c for path in find_matches(pattern)}


def _find_fixed_folder(pattern: str) -> str:
    """Returns the innermost folder that contains all possible matches of a pattern."""
    fixed = _WILDCARD.split(pattern, maxsplit=1)[0]
    return os.path.dirname(fixed) or "."
