"""Python programs that begin with TensorFlow imported: its import is most of what small ones take.

`run` and `Popen` take what those of `subprocess` take, where the command is this interpreter and
`-m MODULE`, `-c CODE` or a file. They give real children: signals, `wait` and pipes are those of
any process. A program that runs Keras on JAX has KERAS_BACKEND=jax in its environment. What happens
on import, or in the interpreter itself, is tested by `subprocess`.
"""

import ctypes
import inspect
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# A change of these must be seen by an import: such a process starts cold. (JAX_PLATFORMS is set by
# tftpu itself, to what a machine without a TPU has anyway.)
_READ_ON_IMPORT = (
    *("KERAS_", "TF_CPP_", "TF_ENABLE_", "TF_USE_", "JAX_COMPILATION", "JAX_PERSISTENT"),
    *("JAX_ENABLE", "PYTHON", "LD_", "LC_", "LANG", "HOME"),
)
_PR_SET_CHILD_SUBREAPER = 36


class Popen(subprocess.Popen):
    """A process as by `subprocess.Popen`, forked from a server of this process.

    Overrides a private method, in Python 3.11 to 3.13; `test_warm.py` tries all that is used.
    """

    def _execute_child(self, args: Any, *rest: Any) -> None:
        given = inspect.signature(subprocess.Popen._execute_child).bind(self, args, *rest).arguments
        environment = dict(os.environ if given["env"] is None else given["env"])
        program, *words = map(os.fspath, args)
        if program != sys.executable or (words[0][:1] == "-" and words[0] not in ("-m", "-c")):
            raise ValueError(f"{args[:2]}: not a program that this interpreter runs")
        server = _find_server(environment)
        if server is None or given["preexec_fn"] or given["pass_fds"]:
            super()._execute_child(args, *rest)
            return
        ends = (given["p2cread"], given["c2pwrite"], given["errwrite"])
        standard = [own if end == -1 else end for own, end in enumerate(ends)]
        request = {
            "argv": words,
            "environment": environment,
            "folder": os.fspath(given["cwd"] or os.getcwd()),
            "session": given["start_new_session"],
        }
        self.pid = server.fork(request, standard)
        self._child_created = True
        pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(given[pipe] for pipe in pipes))


def run(
    args: Sequence[str | os.PathLike[str]],
    *,
    capture_output: bool = False,
    check: bool = False,
    timeout: float | None = None,
    **options: Any,
) -> subprocess.CompletedProcess:
    """Runs a program to its end, as `subprocess.run` does."""
    if capture_output:
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with Popen(args, **options) as process:
        try:
            output, errors = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    code = process.poll() or 0
    if check and code:
        raise subprocess.CalledProcessError(code, process.args, output, errors)
    return subprocess.CompletedProcess(process.args, code, output, errors)


class _Server:
    """The process that forks, which ends with this one."""

    def __init__(self, environment: Mapping[str, str]):
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self._turn = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.programs.forking", str(theirs.fileno())],
            cwd=_ROOT,
            env=environment,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C ends the tests, and with their socket the server
        )
        theirs.close()

    def fork(self, request: Mapping[str, Any], standard: Sequence[int]) -> int:
        """Returns the id of a new child of this process with these standard streams."""
        body = json.dumps(request).encode()
        with self._turn:
            # The server's child forks the program and ends: its next of kin is this process.
            _adopt_orphans(True)
            try:
                socket.send_fds(self._socket, [len(body).to_bytes(8)], list(standard))
                self._socket.sendall(body)
                answer = self._socket.recv(8, socket.MSG_WAITALL)
            finally:
                _adopt_orphans(False)
        if len(answer) < 8:
            raise RuntimeError(f"the server of processes ended with {self._process.wait()}")
        return int.from_bytes(answer)


_ROOT = Path(__file__).parents[2]
_environment = dict(os.environ)  # of all tests, before one changes it for itself
_servers: dict[str, _Server] = {}
_starting = threading.Lock()


def _find_server(environment: Mapping[str, str]) -> _Server | None:
    """Returns the server for Keras's backend, or None where the environment differs in more."""
    backend = environment.get("KERAS_BACKEND", "tensorflow")
    own = {**_environment, "KERAS_BACKEND": backend}

    def read_on_import(variables: Mapping[str, str]) -> dict[str, str]:
        return {name: variables[name] for name in variables if name.startswith(_READ_ON_IMPORT)}

    if read_on_import({"KERAS_BACKEND": backend, **environment}) != read_on_import(own):
        return None
    with _starting:
        if backend not in _servers:
            _servers[backend] = _Server(own)
        return _servers[backend]


def _adopt_orphans(on: bool) -> None:
    """Makes this process the parent of orphans below it, or no longer (Linux, prctl(2))."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, int(on), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")
