"""`tftpu train` runs the quick checks of doctor before it loads TensorFlow."""

import pytest

from tests.support.fakes.scratch_machine import V5E, Scratch
from tftpu.errors import UserError
from tftpu.launch.diagnosis import quick
from tftpu.launch.diagnosis.machine import Machine
from tftpu.launch.main import main
from tftpu.launch.run import start


@pytest.fixture
def machine(tmp_path) -> Scratch:
    return Scratch(tmp_path)


def as_machine(scratch: Scratch) -> Machine:
    return Machine((str(scratch.site),), scratch.root, scratch.environ, scratch.python)


def test_a_good_machine_passes_silently(machine, capsys):
    machine.install("tensorflow-cpu", "2.20.0")
    quick.check(as_machine(machine))
    assert capsys.readouterr() == ("", "")


def test_what_makes_training_impossible_ends_the_command(machine):
    machine.install("tensorflow-cpu", "2.20.0")
    machine.write(V5E)  # a TPU, and a TensorFlow without its kernels
    with pytest.raises(UserError) as error:
        quick.check(as_machine(machine))
    assert "Fix it with: " in str(error.value) and "`tftpu doctor`" in str(error.value)


def test_other_problems_are_printed_with_their_fix(machine, capsys):
    machine.install("tensorflow-cpu", "2.20.0")
    machine.uninstall("importlib_resources")
    quick.check(as_machine(machine))
    said = capsys.readouterr().err
    assert said.startswith("tftpu: tensorflow-datasets is installed without importlib_resources")
    assert "Fix it with: pip install" in said


def test_train_checks_before_tensorflow_is_imported(monkeypatch, tmp_path, capsys):
    def damaged(machine):
        raise UserError("the wheel is damaged")

    def imported():
        raise AssertionError("TensorFlow was imported")

    monkeypatch.setattr(quick, "check", damaged)
    monkeypatch.setattr(start.startup, "import_tensorflow", imported)
    assert main(["train", "--config=digits_resnet", f"--workdir={tmp_path}"]) == 2
    assert capsys.readouterr().err == "tftpu: the wheel is damaged\n"
