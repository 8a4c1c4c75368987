"""Machines that cannot run the TPU compiler, and compilers that nobody waits for."""

import os
import subprocess
import sys

import psutil
import pytest

from tftpu.errors import UserError
from tftpu.preflight.compiling import compiler


def test_without_libtpu_the_error_says_how_to_install_it(monkeypatch):
    def missing(name):
        raise compiler.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(compiler.importlib.metadata, "version", missing)
    with pytest.raises(UserError, match=r"pip install 'jax.*' 'libtpu.*>="):
        compiler.check_machine()


def test_an_unsupported_machine_fails_with_a_clear_error(monkeypatch):
    monkeypatch.setattr(compiler.platform, "machine", lambda: "arm64")
    with pytest.raises(UserError, match="only on x86-64 Linux"):
        compiler.check_machine()


@pytest.mark.medium
def test_a_compiler_ends_with_the_check_that_waits_for_it(tmp_path):
    (tmp_path / "job.json").write_text('{"options": {}, "instructions": 0}')
    os.mkfifo(tmp_path / "module.mlir")  # reading it takes for ever
    start = (
        "import subprocess, sys; "
        "command = [sys.executable, '-P', '-m', *sys.argv[1:]]; "
        "child = subprocess.Popen(command); print(child.pid, flush=True); child.wait()"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", start, compiler.__name__, str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    process = psutil.Process(int(parent.stdout.readline()))
    writer = os.open(tmp_path / "module.mlir", os.O_WRONLY)  # waits until the compiler reads
    assert process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    parent.kill()
    parent.wait()
    psutil.wait_procs([process], timeout=10)
    # Nobody waits for it but the system's first process.
    assert not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    os.close(writer)
