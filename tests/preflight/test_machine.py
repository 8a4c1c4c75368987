"""Machines that cannot run the TPU compiler."""

import pytest

from tftpu.errors import UserError
from tftpu.preflight import compiler


def test_without_libtpu_the_error_says_how_to_install_it(monkeypatch):
    def missing(name):
        raise compiler.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(compiler.importlib.metadata, "version", missing)
    with pytest.raises(UserError, match=r"pip install 'jax.*' 'libtpu>="):
        compiler.check_machine()


def test_an_unsupported_machine_fails_with_a_clear_error(monkeypatch):
    monkeypatch.setattr(compiler.platform, "machine", lambda: "arm64")
    with pytest.raises(UserError, match="x86-64 Linux only"):
        compiler.check_machine()
