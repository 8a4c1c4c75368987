"""Listings of files, local or in a bucket."""

import fnmatch
import functools
import itertools
import logging
import os
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from tftpu.storage import buckets, files

_log = logging.getLogger(__name__)
_SHOWN = 10  # links in a warning
_WILDCARD = re.compile(r"[*?\[]")


class Tree(NamedTuple):
    """The content of a folder and those below it, by relative path, sorted.

    Attributes:
        sizes: of the regular files.
        unusable: links to nothing, pipes, devices.
        empty: folders that have none of these below them, without those inside them; in a bucket
            there are none.
    """

    sizes: dict[str, int]
    unusable: list[str]
    empty: list[str]


def tree(folder: str, follow_links: bool = False) -> dict[str, int]:
    """Returns the sizes of all regular files below a folder, by their sorted relative path.

    Args:
        folder, follow_links: as for `scan`.
    """
    return scan(folder, follow_links).sizes


def scan(folder: str, follow_links: bool = False) -> Tree:
    """Lists all that is below a folder.

    Args:
        folder: local or in a bucket.
        follow_links: follow links to folders, unless they lead to a folder that they are in, and
            warn of folders that cannot be read.
    """
    if files.is_remote(folder):
        stored = sorted(buckets.listing(folder).items())
        return Tree({name: file.bytes for name, file in stored}, [], [])
    sizes, unusable, read = {}, [], []
    # The real path of a folder that is still to be read, after those of all that it is in.
    real: dict[str, tuple[str, ...]] = {folder: (os.path.realpath(folder),)}
    warn = _warn if follow_links else None
    for path, folders, names in os.walk(folder, onerror=warn, followlinks=follow_links):
        above = real.pop(path, ())
        read.append(_relative(path, folder))
        for name in list(folders) if follow_links else ():
            inner = os.path.realpath(os.path.join(path, name))
            if inner in above:
                folders.remove(name)
            else:
                real[os.path.join(path, name)] = (*above, inner)
        for name in names:
            whole = os.path.join(path, name)
            if os.path.isfile(whole):
                sizes[_relative(whole, folder)] = os.path.getsize(whole)
            else:
                unusable.append(_relative(whole, folder))
    return Tree(dict(sorted(sizes.items())), sorted(unusable), _empty(read, [*sizes, *unusable]))


def _relative(path: str, folder: str) -> str:
    return os.path.relpath(path, folder).replace(os.sep, "/")


def _empty(folders: Iterable[str], names: Iterable[str]) -> list[str]:
    """Returns the outermost folders that no names are below."""
    used = {"."}
    for name in names:
        while (name := os.path.dirname(name)) and name not in used:
            used.add(name)
    empty = {folder for folder in folders if folder not in used}
    return sorted(name for name in empty if os.path.dirname(name) not in empty)


def _warn(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError | NotADirectoryError):
        _log.warning("Left out %s, which cannot be read: %s.", error.filename, error.strerror)


def warn_of_links(folder: str, names: Iterable[str]) -> None:
    """Warns, once, of links that lead out of a folder to some of these files in it.

    Args:
        folder: local; in a bucket there are no links.
        names: paths of files, relative to the folder.
    """
    if files.is_remote(folder):
        return
    found = list(itertools.islice(_find_links(folder, names), _SHOWN + 1))
    if found:
        more = " and others" if len(found) > _SHOWN else ""
        _warn_of_links(folder, ", ".join(found[:_SHOWN]) + more)


def _find_links(folder: str, names: Iterable[str]) -> Iterator[str]:
    """Yields the links on the way to files, each with its target, that lead out of a folder."""
    inside = os.path.realpath(folder)
    seen: set[str] = set()
    for name in names:
        path = name
        while path and path not in seen:
            seen.add(path)
            whole = os.path.join(folder, path)
            if os.path.islink(whole):
                target = os.path.realpath(whole)
                if os.path.commonpath([inside, target]) != inside:
                    yield f"{_displayed(path)} is a link to {_displayed(target)}"
            path = os.path.dirname(path)


def _displayed(path: str) -> str:
    return os.fsencode(path).decode(errors="replace")  # a disk's names need not be UTF-8


@functools.cache
def _warn_of_links(folder: str, links: str) -> None:
    _log.warning("Images of %s are read from outside of it: %s.", folder, links)


def matching(pattern: str) -> dict[str, int]:
    """Returns the sizes of the files that match a pattern (*, ?, [...]), by their sorted path.

    As in a shell, a hidden file or folder (.DS_Store) has to be named.
    """
    folder = _folder_of(pattern)
    if folder == "." and not pattern.startswith("./"):
        pattern = f"./{pattern}"
    if not _WILDCARD.search(pattern) and not files.is_remote(pattern):
        size = files.size(pattern)
        return {} if size is None else {pattern: size}
    found = {f"{folder}/{name}": size for name, size in tree(folder).items()}
    if "/." not in pattern.removeprefix(folder):
        found = {path: n for path, n in found.items() if "/." not in path.removeprefix(folder)}
    return {path: size for path, size in found.items() if fnmatch.fnmatchcase(path, pattern)}


def checksums(pattern: str) -> dict[str, str]:
    """Returns the CRC32C of the files that match a pattern, by their sorted path."""
    if not files.is_remote(pattern):
        return {path: buckets.checksum(path).crc32c for path in matching(pattern)}
    folder = _folder_of(pattern)
    stored = buckets.listing(folder)
    return {path: stored[path.removeprefix(f"{folder}/")].crc32c for path in matching(pattern)}


def _folder_of(pattern: str) -> str:
    """Returns the innermost folder that holds all that a pattern may match."""
    fixed = _WILDCARD.split(pattern, maxsplit=1)[0]
    return os.path.dirname(fixed) or "."
