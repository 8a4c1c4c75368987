"""A warm process is what a new one is: its streams, arguments, folder, variables and end."""

import os
import signal
import subprocess
import sys

import pytest

from tests.support import warm

SHOWN = """
import os, sys
print(sys.argv, os.getcwd(), os.environ["A"], __name__, os.getppid(), sys.path[0])
print("to stderr", file=sys.stderr)
"""


@pytest.mark.medium
@pytest.mark.parametrize("kind", ["code", "file", "module"])
def test_it_has_what_a_new_process_has(tmp_path, kind, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the server is started elsewhere
    (tmp_path / "shown.py").write_text(SHOWN)
    words = {"code": ["-c", SHOWN], "file": [str(tmp_path / "shown.py")], "module": ["-m", "shown"]}
    command = [sys.executable, *words[kind], "--flag", "a b"]
    options = {"env": {**os.environ, "A": "1"}, "cwd": tmp_path}
    new, forked = (
        run(command, capture_output=True, text=True, check=True, **options)
        for run in (subprocess.run, warm.run)
    )
    assert forked.stdout == new.stdout
    assert forked.stderr == "to stderr\n"


def test_tensorflow_is_imported_and_not_started(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    code = (
        "import sys; print('tensorflow' in sys.modules)\n"
        "import tensorflow as tf\n"
        "tf.config.set_logical_device_configuration(tf.config.list_physical_devices('CPU')[0],"
        " [tf.config.LogicalDeviceConfiguration()] * 3)\n"
        "print(len(tf.config.list_logical_devices('CPU')), float(tf.reduce_sum(tf.ones((8,)))))"
    )
    done = warm.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "True\n3 8.0\n", done.stderr


@pytest.mark.medium
def test_another_backend_has_a_server_of_its_own():
    code = "import keras; print(keras.config.backend(), float(keras.ops.sum(keras.ops.ones(8))))"
    environment = {**os.environ, "KERAS_BACKEND": "jax"}
    command = [sys.executable, "-c", code]
    done = warm.run(command, env=environment, capture_output=True, text=True)
    assert done.stdout == "jax 8.0\n", done.stderr


def test_what_an_import_would_read_is_read():
    code = "import os, sys; print(os.environ['KERAS_HOME'], 'keras' in sys.modules)"
    environment = {**os.environ, "KERAS_HOME": "/elsewhere"}
    command = [sys.executable, "-c", code]
    done = warm.run(command, env=environment, capture_output=True, text=True)
    assert done.stdout == "/elsewhere False\n", done.stderr


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("import sys; sys.exit(75)", 75),
        ("import sys; sys.exit('said')", 1),
        ("raise ValueError", 1),
        ("import os; os._exit(3)", 3),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
        ("import signal; signal.raise_signal(signal.SIGINT)", -signal.SIGINT),
        ("import atexit, os; atexit.register(os._exit, 4)", 4),
    ],
)
def test_it_ends_as_a_new_process_does(code, expected):
    assert warm.run([sys.executable, "-c", code], capture_output=True).returncode == expected


def test_signals_reach_it_and_it_is_a_child_of_this_process():
    code = "import time; print('ready', flush=True); time.sleep(60)"
    command = [sys.executable, "-c", code]
    with warm.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stdout.readline() == "ready\n"
        assert os.getpgid(process.pid) == process.pid
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=0.1)
        process.terminate()
        assert process.wait() == -signal.SIGTERM


def test_its_output_can_be_a_file(tmp_path):
    with open(tmp_path / "output.txt", "w") as file:
        command = [sys.executable, "-c", "import os; print('a', flush=True); os.system('echo b')"]
        warm.run(command, stdout=file, stderr=subprocess.STDOUT, check=True)
    assert (tmp_path / "output.txt").read_text() == "a\nb\n"


def test_another_program_is_refused():
    for command in (["ls"], [sys.executable, "-S", "-c", ""]):
        with pytest.raises(ValueError, match="not a program that this interpreter runs"):
            warm.run(command)
