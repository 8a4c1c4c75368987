"""The console script."""

import subprocess
import sys

_PROGRAM = """
import os, signal, sys

class Interrupting:
    def find_spec(self, name, *_):
        if name == "tftpu.launch.settings":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupting())
from tftpu.launch.entry import run
run()
"""


def test_ctrl_c_while_the_command_line_is_imported_ends_without_a_traceback():
    done = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "tftpu: interrupted\n")
