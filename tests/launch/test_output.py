"""A command whose output nobody reads any more does its work to the end."""

import os
import subprocess
import sys
import time

import pytest

from tftpu.launch import output
from tftpu.runtime import slow
from tftpu.runtime.notes import without_notes

# Prints as a run does: plainly, by Rich, and by a warning.
CODE = """
import logging, sys, time
from rich.console import Console
from tftpu.launch import main

def print_and_work(*_):
    for _ in range(2000):
        print("a line of 24 characters", flush=True)
        Console(file=sys.stdout).print("another")
        logging.getLogger("tftpu").warning("and one on stderr")
    time.sleep(float(sys.argv[2]))
    print("a late line")
    open(sys.argv[1], "w").write("done")
    return 0

main.main = print_and_work
main.run()
"""


@pytest.mark.medium
@pytest.mark.parametrize(("both", "seconds"), [(False, 0.0), (False, 2.1), (True, 0.0)])
def test_a_closed_pipe_does_not_end_the_work(both, seconds, tmp_path):
    reading, writing = os.pipe()
    with subprocess.Popen(
        [sys.executable, "-c", CODE, str(tmp_path / "work"), str(seconds)],
        stdout=writing,
        stderr=writing if both else subprocess.PIPE,
        text=True,
    ) as process:
        os.close(writing)
        assert os.read(reading, 10)
        os.close(reading)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 0
    assert (tmp_path / "work").read_text() == "done"
    if not both:
        # `head` has what it wants of a short command; of a long one, later lines are lost.
        assert said.count("the output cannot be written") == bool(seconds)
        assert said.count("and one on stderr") == 2000
        assert "Traceback" not in said


def test_a_command_into_a_closed_pipe_prints_no_traceback():
    command = f"{sys.executable} -m tftpu.launch.main configs | true"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert not done.stderr


def test_characters_that_a_terminal_cannot_show_are_printed_as_escapes():
    code = (
        "from tftpu.launch import main\n"
        "main.main = lambda *_: print('wait \\u2026 \\ud800', flush=True)\n"
        "main.run()"
    )
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stdout) == (0, "wait \\u2026 \\ud800\n"), done.stderr


def test_lines_leave_at_once_without_a_buffer():
    """With PYTHONUNBUFFERED, as in many containers, also what is not flushed."""
    code = (
        "import os, sys, warnings\n"
        "from tftpu.launch import main\n"
        "def leave(*_):\n"
        "    print('a line')\n"
        "    warnings.warn('a warning')\n"
        "    os._exit(0)\n"
        "main.main = leave\n"
        "main.run()"
    )
    env = {**os.environ, "PYTHONUNBUFFERED": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert done.stdout == "a line\n"
    assert "a warning" in done.stderr


@pytest.mark.medium
def test_a_long_block_says_now_and_then_how_long_it_has_taken(monkeypatch, capfd):
    monkeypatch.setattr(slow, "_FIRST", 0.1)
    with output.reporting("Loading"), without_notes((b"a note",)):
        os.write(2, b"a note of a library\n")
        time.sleep(2.1)
    first, *said = capfd.readouterr().err.splitlines()
    assert first == "Loading ..." and len(said) <= 5  # after 0.1, 0.2, 0.4, 0.8 and 1.6 s
    assert said[0] == "Loading: 0 s so far" and said[-1] == "Loading: 2 s so far"


def test_a_graph_that_stays_as_it_was_is_no_error_to_report(capfd):
    with without_notes():
        os.write(2, b"E0000 00:00:17.1 42 meta_optimizer.cc:967] layout failed: INVALID_ARGUMENT\n")
        os.write(2, b"E0000 00:00:17.1 42 rendezvous.cc:10] failed: INTERNAL\n")
    assert capfd.readouterr().err == "E0000 00:00:17.1 42 rendezvous.cc:10] failed: INTERNAL\n"
