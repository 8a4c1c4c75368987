"""Ctrl-C: one line and the exit code of an interrupt, wherever it falls."""

import contextlib
import gc
import signal
import subprocess
import sys
import time

import pytest

from tftpu.launch import failures, interrupts, output
from tftpu.launch.run import start
from tftpu.storage import files


def test_a_ctrl_c_that_an_import_hides_is_one(capsys, tmp_path):
    def import_package() -> None:
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt as error:
            raise ImportError("failed to import") from error

    assert failures.run_for_exit_code(import_package) == 130
    assert capsys.readouterr().err == "tftpu: interrupted\n"

    def train(workdir) -> None:
        with start.explained_interruption(str(workdir)):
            import_package()

    assert failures.run_for_exit_code(lambda: train(tmp_path)) == 130
    assert "No step was saved: the same command starts the run" in capsys.readouterr().err
    files.write_whole(str(tmp_path / "checkpoints/5/manifest.json"), b"{}")
    assert failures.run_for_exit_code(lambda: train(tmp_path)) == 130
    assert "interrupted\nThe same command resumes from step 5.\n" in capsys.readouterr().err


@pytest.mark.medium
def test_a_ctrl_c_that_falls_into_a_callback_is_not_lost():
    """Python ignores an exception of a callback of the garbage collection."""

    def interrupt(*_):
        gc.callbacks.remove(interrupt)
        signal.raise_signal(signal.SIGINT)

    with interrupts.repeating_lost_interrupts(), pytest.raises(KeyboardInterrupt):
        gc.callbacks.append(interrupt)  # not before: a collection may begin at any time
        gc.collect()
        time.sleep(10)


def test_a_ctrl_c_while_the_process_leaves_ends_it_without_a_traceback():
    code = (
        "import atexit, sys, time; from tftpu.launch import main\n"
        "atexit.register(lambda: (print(file=sys.stderr, flush=True), time.sleep(20)))\n"
        "sys.argv = ['tftpu', 'version']; main.run()"
    )
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", code], **pipes) as process:
        assert process.stderr is not None
        process.stderr.readline()  # the command has ended
        process.send_signal(signal.SIGINT)
        written, said = process.communicate(timeout=30)
    assert written.startswith("tftpu ") and said == ""
    assert process.returncode == -signal.SIGINT


def test_other_errors_of_a_callback_are_shown_as_before(monkeypatch):
    seen = []
    monkeypatch.setattr(sys, "unraisablehook", seen.append)

    def fail(*_):
        gc.callbacks.remove(fail)
        raise ValueError("of a callback")

    gc.callbacks.append(fail)
    with interrupts.repeating_lost_interrupts():
        gc.collect()
    assert [str(one.exc_value) for one in seen] == ["of a callback"]


def test_an_error_that_c_code_raises_in_place_of_the_interrupt_is_the_interrupt(capsys):
    """TensorFlow raises one while it traces. Without an interrupt, an error is an error."""

    def hide_interrupt(is_sent: bool) -> None:
        with contextlib.suppress(KeyboardInterrupt):
            if is_sent:
                signal.raise_signal(signal.SIGINT)
        raise ValueError("Could not pack sequence. Structure had 10 atoms")

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert failures.run_for_exit_code(lambda: hide_interrupt(True)) == 130
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        with pytest.raises(ValueError, match="Could not pack sequence"):
            failures.run_for_exit_code(lambda: hide_interrupt(False))
    finally:
        signal.signal(signal.SIGINT, before)
    assert capsys.readouterr().err == "tftpu: interrupted\n"


def test_an_interrupt_that_a_library_drops_ends_the_phase(capsys):
    def lose_interrupt() -> None:
        with output.reporting("Compiling"), contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        print("ready")

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert failures.run_for_exit_code(lose_interrupt) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    written, said = capsys.readouterr()
    assert written == "" and said == "Compiling ...\ntftpu: interrupted\n"
