"""Files that other processes remove while they are read, and names of folders."""

import errno
import os
import threading
import time

import pytest

from tftpu.errors import UserError
from tftpu.storage import files


def test_a_path_that_is_taken_gets_the_next_number(tmp_path):
    for name in ("a", "a_2", "b.onnx"):
        (tmp_path / name).mkdir()
    assert files.suggest_path(f"{tmp_path}/a/") == f"{tmp_path}/a_3"
    assert files.suggest_path(tmp_path / "b.onnx", ".onnx") == f"{tmp_path}/b_2.onnx"


def test_a_missing_file_is_answered_with_the_nearest_beside_it(tmp_path, monkeypatch):
    (tmp_path / "tales.txt").touch()
    (tmp_path / "photos").mkdir()
    asked = " Did you mean"
    said = files.suggest_existing(tmp_path / "tale.txt")
    assert said == f"{asked} '{tmp_path}/tales.txt'?"
    monkeypatch.chdir(tmp_path)
    assert files.suggest_existing("tale.txt") == f"{asked} 'tales.txt'?"
    assert files.suggest_existing("photo") == ""
    assert files.suggest_existing("photo", folders=True) == f"{asked} 'photos'?"
    for other in ("nowhere/tale.txt", "gs://bucket/tale.txt", "x"):
        assert files.suggest_existing(other) == ""


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


def test_a_file_system_of_short_names_has_folders_that_can_be_used(monkeypatch):
    """Such as eCryptfs, which allows 143 bytes for a name."""

    def lstat(path: str) -> None:
        if any(len(name) > 143 for name in path.split("/")):
            raise OSError(errno.ENAMETOOLONG, "File name too long", path)

    monkeypatch.setattr(os, "lstat", lstat)
    files.check_folder("workdir", "runs/mlp")
    with pytest.raises(UserError, match="too long: give a shorter name"):
        files.check_folder("workdir", f"runs/{'x' * 144}")


def test_a_tilde_that_no_shell_replaced_is_refused(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    with pytest.raises(UserError, match=r"=~/runs begins with ~.*, /home/me/runs, or ./~/runs"):
        files.check_folder("--workdir", "~/runs")
    files.check_folder("--workdir", "runs/a~b")
