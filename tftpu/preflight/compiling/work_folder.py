"""Folders for compilations in progress, and the removal of those that a killed process left."""

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tftpu.errors import UserError

_PREFIX = "compiling-"
_SETTLED = 3600.0  # seconds; a younger folder may not be locked yet by the process that made it


@contextlib.contextmanager
def open_work_folder(parent: Path) -> Iterator[Path]:
    """Yields a new folder, locked within the `with` statement and removed afterwards.

    Folders that killed processes left behind are removed first.

    Args:
        parent: the folder to create it in; created if necessary.

    Raises:
        UserError: `parent` cannot be created or written.
    """
    try:
        parent.mkdir(parents=True, exist_ok=True)
        remove_abandoned(parent)
        work = tempfile.TemporaryDirectory(dir=parent, prefix=_PREFIX)
    except OSError as error:
        raise UserError(
            f"The folder for compiled programs, {parent}, cannot be created or written "
            f"({error.strerror}): set TFTPU_CACHE to a folder that can be written."
        ) from error
    with work as folder:
        handle = os.open(folder, os.O_RDONLY)
        try:
            # On a file system without locks, `_remove` fails as well, so the folder is safe.
            with contextlib.suppress(OSError):
                fcntl.flock(handle, fcntl.LOCK_EX)
            yield Path(folder)
        finally:
            os.close(handle)


def remove_abandoned(parent: Path) -> None:
    """Removes work folders that are over an hour old and that no living process has locked."""
    for folder in parent.glob(f"{_PREFIX}*"):
        # Fails if the folder is locked, or if another process has just removed it.
        with contextlib.suppress(OSError):
            if time.time() - folder.stat().st_mtime > _SETTLED:
                _remove(folder)


def _remove(folder: Path) -> None:
    """Removes a folder.

    Raises:
        OSError: a living process has locked the folder, the folder is gone, or the file system has
            no locks.
    """
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder)
    finally:
        os.close(handle)
