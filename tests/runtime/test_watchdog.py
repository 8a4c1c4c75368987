"""A run that hangs is ended, with the stacks of its threads; one that compiles is not."""

import subprocess
import sys

import pytest

from tests.support import warm
from tftpu.errors import ExitCode
from tftpu.runtime import watchdog

CODE = """
import sys, threading, time
from tftpu.runtime import watchdog
watchdog._GIL_SECONDS = 0.5
{extra}
with watchdog.Watchdog(0.5) as dog:
{body}
"""


def run(body: str, extra: str = "") -> subprocess.CompletedProcess:
    body = "\n".join("    " + line for line in body.splitlines())
    code = CODE.format(body=body, extra=extra)
    return warm.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )


def test_a_hang_ends_the_process_with_the_stacks_and_the_last_step():
    done = run(
        "dog.beat(120)\nlock.acquire()\nlock.acquire()",
        "lock = threading.Lock()\n"
        "def stuck_reader(): time.sleep(60)\n"
        "threading.Thread(target=stuck_reader, daemon=True).start()",
    )
    assert done.returncode == ExitCode.HUNG
    assert "no step was finished for 0 s; the last one is step 120." in done.stderr
    assert "stuck_reader" in done.stderr  # every thread
    assert done.stderr.count("most recent call first") >= 3


@pytest.mark.slow
def test_a_hang_that_holds_the_interpreter_is_ended_from_c():
    """No Python runs in such a process: a regular expression that never ends."""
    done = run("dog.beat(1)\nimport re\nre.match('(a+)+$', 'a' * 60 + 'b')")
    assert done.returncode == 1
    assert "Timeout" in done.stderr
    assert "most recent call first" in done.stderr


@pytest.mark.slow
def test_neither_compiling_nor_slow_steps_are_a_hang():
    body = (
        "time.sleep(1.2)\n"  # the first device loop: it compiles
        "for step in range(8):\n"
        "    dog.beat(step)\n"
        "    time.sleep(0.2)\n"
        "with dog.paused():\n"  # the first evaluation: it compiles, too
        "    time.sleep(1.2)\n"
        "time.sleep(0.2)\n"
        "print('alive')"
    )
    done = run(body)
    assert (done.returncode, done.stdout) == (0, "alive\n")


def test_without_seconds_nothing_is_watched():
    with watchdog.Watchdog(None) as dog:
        dog.beat(1)
        with dog.paused():
            pass
