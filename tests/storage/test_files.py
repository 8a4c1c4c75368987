"""Files that other processes remove while they are read."""

import os
import threading
import time

from tftpu.storage import files


def test_a_file_that_comes_and_goes_is_there_or_missing(tmp_path):
    path, over = tmp_path / "lock", threading.Event()

    def come_and_go() -> None:
        while not over.is_set():
            (tmp_path / "new").write_bytes(b"whole")
            os.rename(tmp_path / "new", path)
            os.unlink(path)

    other = threading.Thread(target=come_and_go)
    other.start()
    found = set()
    try:
        end = time.monotonic() + 0.5
        while time.monotonic() < end:
            try:
                found.add(files.read(path))
            except FileNotFoundError:
                found.add(b"")
    finally:
        over.set()
        other.join()
    assert found and found <= {b"", b"whole"}
