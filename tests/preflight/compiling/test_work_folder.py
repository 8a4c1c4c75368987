"""Folders for compilations in progress, in a cache that may not be writable."""

from pathlib import Path

import pytest

from tftpu.errors import UserError
from tftpu.preflight.compiling.work_folder import open_work_folder


def test_a_cache_that_cannot_be_written_is_an_error_that_names_the_variable(tmp_path):
    (tmp_path / "file").touch()
    # /proc exists, and nobody, root included, can create anything in it.
    for parent in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc")):
        says = rf"programs, {parent}, cannot be created or written \(.+\): set TFTPU_CACHE to a"
        with pytest.raises(UserError, match=says), open_work_folder(parent):
            pass
