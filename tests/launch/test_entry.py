"""The console script."""

import subprocess
import sys

import pytest

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


@pytest.mark.parametrize(
    ("command", "module"), [("train", "tftpu.launch.settings"), ("predict", "numpy.version")]
)
def test_ctrl_c_while_the_command_line_is_imported_ends_without_a_traceback(command, module):
    """Code in C that imports NumPy raises another error in place of the interrupt."""
    words = [sys.executable, "-c", _PROGRAM, command, module]
    done = subprocess.run(words, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "tftpu: interrupted\n")
