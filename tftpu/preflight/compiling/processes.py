"""The compiler's processes: as many as memory and cores allow, each with a time limit."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import psutil

from tftpu.preflight.compiling.caller import StoppedError
from tftpu.preflight.compiling.progress import Progress, read_processor_seconds
from tftpu.tpu.slices import Slice

# Bytes of memory that a compiler needs at its start, and for each byte of the program's text.
# Measured peaks: 0.6 GB for 1.3 MB of text (python_gpt), 2.0 GB for 2.9 MB (ResNet-50), 2.9 GB for
# 5.1 MB (BERT base).
_AT_START, _PER_BYTE = 0.3e9, 600
_TOO_LONG = (
    "The TPU compiler had not finished after {:.0f} s and was stopped: raise the time limit "
    "(--time_limit, or time_limit of PreflightOptions), or try a smaller model first."
)
_HANGS = (
    "The TPU compiler used no processor time for {:.0f} s and was stopped: try again, and with "
    "--verbose if it happens again."
)
_IDLE = 600.0  # seconds without processor time after which a compiler counts as hanging
_LOOK = 1.0  # seconds between two checks of a compiler
_CGROUP = Path("/sys/fs/cgroup")


class Processes:
    """The compiler's processes of one check; several threads may use this object at once.

    Args:
        progress: shows the processes.
        others: a `Processes` whose processes share memory and cores with these; stopping it
            stops this object, too.
    """

    def __init__(self, progress: Progress, others: "Processes | None" = None):
        self.progress = progress
        self._others = others
        self._changed = threading.Condition() if others is None else others._changed
        # For each process, the bytes that it may need.
        self._running: dict[subprocess.Popen, float] = {} if others is None else others._running
        self._own: set[subprocess.Popen] = set()
        self._ended = False

    def run(
        self,
        job: Path,
        target: Slice,
        time_limit: float,
        verbose: bool,
        text: str,
        expected: float | None = None,
    ) -> tuple[str, float]:
        """Compiles a program in a separate process, once memory and cores allow; waits for its end.

        Args:
            job: folder with the program; the process writes its result there.
            target: the slice to compile for.
            time_limit: seconds. The process is stopped once its processor time and the elapsed time
                have both reached the limit.
            verbose: whether to pass the process's messages through to standard error.
            text: what is being compiled, such as "compiling v5e-8", for the lines of progress.
            expected: seconds of processor time that the process is expected to take.

        Returns:
            An error message, "" on success; and the seconds that the process ran.

        Raises:
            StoppedError: `stop` was called.
        """
        with (
            (job / "stderr.txt").open("wb") as log,
            self._running_compiler(job, target, verbose, log, text) as process,
            self.progress.show_phase(text, process.pid, time_limit, expected) as phase,
        ):
            failure = _wait_for_end(process, time_limit)
            if failure:
                return failure, phase.seconds
        if self._is_stopped():
            raise StoppedError
        return _explain_failure(process.returncode, job / "stderr.txt"), phase.seconds

    def stop(self) -> None:
        """Kills the processes of this object and of objects with it as `others`; starts no more."""
        with self._changed:
            self._ended = True
            for process in self._running if self._others is None else self._own:
                process.kill()
            self._changed.notify_all()

    def _is_stopped(self) -> bool:
        return self._ended or (self._others is not None and self._others._is_stopped())

    @contextlib.contextmanager
    def _running_compiler(
        self, job: Path, target: Slice, verbose: bool, log: IO[bytes], text: str
    ) -> Iterator[subprocess.Popen]:
        """Starts a compiler's process as soon as memory and cores allow; ends it on exit."""
        need = _AT_START + _PER_BYTE * (job / "module.mlir").stat().st_size
        command = [sys.executable, "-P", "-m", "tftpu.preflight.compiling.compiler", str(job)]
        environment = {
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "TPU_SKIP_MDS_QUERY": "1",  # without it, libtpu waits for a cloud's metadata server
            # Without it, only one process of a machine may use libtpu.
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
            "TPU_ACCELERATOR_TYPE": target.single.name,
            "TPU_WORKER_HOSTNAMES": "localhost",
        }
        with self._changed:
            if not self._has_room(need):
                with self.progress.show_phase(f"waiting for another compiler to end, {text}"):
                    while not self._has_room(need):
                        self._changed.wait(1.0)  # not longer, as other programs may free memory
            if self._is_stopped():
                raise StoppedError
            process = subprocess.Popen(
                command, env=environment, stdout=log, stderr=None if verbose else log
            )
            self._running[process] = need
            self._own.add(process)
        try:
            yield process
        finally:
            process.kill()
            process.wait()
            with self._changed:
                del self._running[process]
                self._own.remove(process)
                self._changed.notify_all()

    def _has_room(self, need: float) -> bool:
        """Returns whether a process can start; true for the first, and for any after `stop`."""
        if not self._running or self._is_stopped():
            return True
        growing = sum(max(0.0, most - _read_memory(p)) for p, most in self._running.items())
        cores = len(os.sched_getaffinity(0))
        return len(self._running) < cores and measure_available_memory() - growing > need


def _wait_for_end(process: subprocess.Popen, time_limit: float) -> str:
    """Waits for a process to end; returns an error message if it takes too long or hangs, or "".

    The limit counts processor time, so that a compiler is not stopped because the machine is busy.
    """
    start = last = time.monotonic()
    used = 0.0
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(min(_LOOK, time_limit))
            return ""
        now, before, used = time.monotonic(), used, read_processor_seconds(process.pid)
        if min(used, now - start) >= time_limit:
            return _TOO_LONG.format(time_limit)
        last = now if used > before else last
        if now - last >= _IDLE:
            return _HANGS.format(_IDLE)


def measure_available_memory() -> float:
    """Returns the bytes of memory that are free for this process, in a container too."""
    available = float(psutil.virtual_memory().available)
    # Fails without a cgroup of version 2, or if its limit is "max".
    with contextlib.suppress(OSError, ValueError):
        limit, used = (
            int((_CGROUP / name).read_text()) for name in ("memory.max", "memory.current")
        )
        available = min(available, limit - used)
    return available


def _read_memory(process: subprocess.Popen) -> float:
    with contextlib.suppress(psutil.Error):
        return psutil.Process(process.pid).memory_info().rss
    return 0.0


def _explain_failure(code: int, log: Path) -> str:
    """Returns an error message for the exit code of a compiler, "" for 0."""
    if code == 0:
        return ""
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
    last = [line for line in log.read_text(errors="replace").splitlines() if line]
    return f"The TPU compiler {how}. Its last output: {' '.join(last[-2:])[-300:] or 'none'}"
