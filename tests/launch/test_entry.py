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


@pytest.mark.parametrize("module", ["tftpu.launch.settings", "numpy.version"])
def test_ctrl_c_while_the_command_line_is_imported_ends_without_a_traceback(module):
    """Code in C that imports NumPy raises another error in place of the interrupt."""
    command = [sys.executable, "-c", _PROGRAM, "train", module]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "tftpu: interrupted\n")
