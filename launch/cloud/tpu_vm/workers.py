"""The workers of a slice: their reports in the bucket, and how their run ended."""

import dataclasses
import math
import time

from tftpu.errors import ExitCode
from tftpu.launch.cloud import google_cloud, waiting
from tftpu.launch.cloud.tpu_vm.rented import RentedSlice, name_log

# Seconds after the first exit code for which the other workers' codes are awaited. Worker 0 deletes
# the slice 900 seconds after its end, which would look like a preemption.
OTHERS_S = 840.0
# Ranks of exit codes: the run's code is the worker's code of lowest rank. Codes not listed have
# rank 0, because they come from workers that failed by themselves.
_RANK: dict[int, int] = {ExitCode.PREEMPTED: 1, ExitCode.HOST_LOST: 2, ExitCode.DONE: 3}


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The end of a run.

    Attributes:
        code: exit code of the run.
        worker: the worker that ended with that code.
        missing: the workers without an exit code.
    """

    code: int
    worker: int
    missing: tuple[int, ...]


class SliceWorkers:
    """The workers of a slice, each with a log and, once it has ended, an exit code.

    Args:
        rented: the slice.
    """

    def __init__(self, rented: RentedSlice):
        self._rented = rented
        self._folder = google_cloud.BucketFolder(rented.folder)
        self._deadline = math.inf

    def describe_other_logs(self) -> str:
        """Returns a line that says where the output of the other workers is; "" on one host."""
        last = self._rented.slice.hosts - 1
        if last < 1:
            return ""
        others = "worker 1 writes" if last == 1 else f"workers 1 to {last} write"
        return f"Output of worker 0 is shown; {others} to {self._rented.folder}/worker-N/log.txt."

    def poll(self) -> Outcome | None:
        """Prints the new output of worker 0; returns how the run ended, or None if it continues.

        The run has ended when all workers have ended, or some time after the first one has.
        """
        self._folder.print_new(name_log(0))
        codes = {
            int(place.removeprefix("worker-") or 0): int(text)
            for place, text in self._folder.read("exit_code").items()
            if text.strip().isdecimal()
        }
        if not codes:
            return None
        self._deadline = min(self._deadline, time.monotonic() + OTHERS_S)
        missing = tuple(w for w in range(self._rented.slice.hosts) if w not in codes)
        if missing and time.monotonic() < self._deadline:
            return None
        self._folder.print_new(name_log(0))
        worker = min(codes, key=lambda w: (_RANK.get(codes[w], 0), w))
        return Outcome(codes[worker], worker, missing)

    def explain(self, outcome: Outcome) -> str:
        """Prints the last lines of the worker that ended the run; returns where its full log is.

        The lines of worker 0 have already been printed. Workers without an exit code are named.
        """
        log = self._rented.resolve_log(outcome.worker)
        if outcome.worker:
            text = self._folder.read_new(name_log(outcome.worker))
            waiting.print_last_lines(f"worker {outcome.worker}", text)
        where = f"{log} has its output."
        if outcome.missing:
            absent = ", ".join(map(str, outcome.missing))
            where += f" No exit code came from worker {absent}: it never started, or was lost."
        return where
