"""Processes on loopback in place of the hosts of a pod, found by TF_CONFIG."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

from tests.support import warm


def free_ports(count: int) -> list[int]:
    """Returns ports of loopback that nobody uses."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


def start(folder: Path, count: int, *words: str) -> list[subprocess.Popen]:
    """Starts `python -m WORDS` for each of `count` hosts.

    Args:
        folder: gets a file output-INDEX.txt of each.
        count: of hosts; a single one has no TF_CONFIG.
        words: the module and its arguments.
    """
    folder.mkdir(parents=True, exist_ok=True)
    cluster = {"worker": [f"127.0.0.1:{port}" for port in free_ports(count)]}
    processes = []
    for index in range(count):
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "-1"}
        environment["KERAS_BACKEND"] = "jax"
        if count > 1:
            task = {"type": "worker", "index": index}
            environment["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": task})
        with open(folder / f"output-{index}.txt", "w") as output:
            process = warm.Popen(
                [sys.executable, "-m", *words],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
            )
        processes.append(process)
    return processes


def codes(processes: list[subprocess.Popen], seconds: float = 300) -> list[int]:
    """Returns the exit codes; ends processes that take longer."""
    try:
        return [process.wait(timeout=seconds) for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()


def said(folder: Path) -> list[str]:
    """Returns the output of each host."""
    return [path.read_text() for path in sorted(folder.glob("output-*.txt"))]
