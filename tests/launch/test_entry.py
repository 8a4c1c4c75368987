"""The console script."""

import contextlib
import signal
import subprocess
import sys

import pytest

from tftpu.launch import failures

_PROGRAM = """
import os, signal, sys

class Interrupting:
    def find_spec(self, name, *_):
        if name == sys.argv[2]:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupting())
from tftpu.launch.entry import run
run()
"""


def test_an_error_that_c_code_raises_in_place_of_the_interrupt_is_the_interrupt(capsys):
    """As TensorFlow does while it traces; without an interrupt, an error is an error."""

    def hide_interrupt(is_sent: bool) -> None:
        with contextlib.suppress(KeyboardInterrupt):
            if is_sent:
                signal.raise_signal(signal.SIGINT)
        raise ValueError("Could not pack sequence. Structure had 10 atoms")

    before = signal.signal(
        signal.SIGINT, signal.default_int_handler
    )
    try:
        assert failures.run_for_exit_code(lambda: hide_interrupt(True)) == 130
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        with pytest.raises(ValueError, match="Could not pack sequence"):
            failures.run_for_exit_code(lambda: hide_interrupt(False))
    finally:
        signal.signal(signal.SIGINT, before)
    assert capsys.readouterr().err == "tftpu: interrupted\n"


@pytest.mark.parametrize(
    ("command", "module"), [("train", "tftpu.launch.settings"), ("predict", "numpy.version")]
)
def test_ctrl_c_while_the_command_line_is_imported_ends_without_a_traceback(command, module):
    """Code in C that imports NumPy raises another error in place of the interrupt."""
    words = [sys.executable, "-c", _PROGRAM, command, module]
    done = subprocess.run(words, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "tftpu: interrupted\n")
