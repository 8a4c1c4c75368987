"""Imports TensorFlow once, and forks a process for each program that it is asked to run.

python -m tests.support.programs.forking SOCKET
"""

import gc
import json
import os
import runpy
import signal
import socket
import sys
import time
import types
from typing import Any

IMPORTED = ("tftpu.fork_preload", "tftpu.launch.main", "tftpu.launch.run.start")


def serve(connection: socket.socket) -> dict[str, Any]:
    """Forks until the tests end; returns in a new process only, with what it should run."""
    while True:
        length, descriptors, *_ = socket.recv_fds(connection, 8, 3)
        if not length:
            os._exit(0)
        body = connection.recv(int.from_bytes(length), socket.MSG_WAITALL)
        read, write = os.pipe()
        between = os.fork()
        if not between:
            parent = os.getpid()
            child = os.fork()
            if not child:
                connection.close()
                while os.getppid() == parent:
                    time.sleep(0.001)
                return {**json.loads(body), "standard": descriptors}
            os.write(write, child.to_bytes(8))
            os._exit(0)
        os.waitpid(between, 0)  # with its end, the program is a child of who asked
        connection.sendall(os.read(read, 8))
        for descriptor in (*descriptors, read, write):
            os.close(descriptor)


def prepare(request: dict[str, Any]) -> None:
    """Makes this process what a new one with the request's options would be."""
    if request["session"]:
        os.setsid()
    for number, descriptor in enumerate(request["standard"]):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.stdout.reconfigure(line_buffering=os.isatty(1) or "PYTHONUNBUFFERED" in os.environ)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def execute(kind: str, *words: str) -> None:
    """Runs a program as the interpreter would: -m MODULE, -c CODE or a file, and its arguments."""
    if kind == "-m":
        sys.path[0] = os.getcwd()
        sys.argv = [*words]
        sys.modules.pop(words[0], None)  # it is executed, and what imports it gets another
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.path[0] = ""
        sys.argv = ["-c", *words[1:]]
        module = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(words[0], "<string>", "exec"), module.__dict__)
    else:
        sys.path[0] = os.path.dirname(os.path.abspath(kind))
        sys.argv = [kind, *words]
        runpy.run_path(kind, run_name="__main__")


if __name__ == "__main__":
    for name in IMPORTED:
        __import__(name)
    gc.collect()
    gc.freeze()
    program = serve(socket.socket(fileno=int(sys.argv[1])))
    prepare(program)
    execute(*program["argv"])
