"""Prints the progress of `tftpu predict`, the files of its predictions, and a few predictions."""

import json
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tftpu.errors import counted
from tftpu.storage import files

if TYPE_CHECKING:
    from tftpu.inference.predict import Job
    from tftpu.input_pipelines.formats import results
    from tftpu.input_pipelines.unlabelled import UnlabelledRecords

_SECONDS = 10.0  # seconds between two lines of progress
ROWS = 5  # largest number of predictions that are printed
_VALUES = 20  # longest list that is printed
_VALUES_BESIDE_CLASS = 5  # longest list that is printed beside a class, such as "top5"


class ProgressPrinter:
    """A printer of the progress of a prediction job.

    Attributes:
        found: the number of records whose predictions existed when the job started.
    """

    def __init__(self) -> None:
        self.found = 0
        self._first: tuple[int, float] | None = None
        self._said = 0.0

    def __call__(self, done: int, count: int) -> None:
        now = time.monotonic()
        if self._first is None:
            self._first, self._said, self.found = (done, now), now, done
            if done:
                print(f"{done:,} of {count:,} records are there already", flush=True)
        elif done < count and now - self._said >= _SECONDS:
            begun, since = self._first
            rate = (done - begun) / (now - since)
            left = (count - done) / rate
            print(f"{done:,} of {count:,} records  {rate:,.0f}/s  {left:,.0f} s left", flush=True)
            self._said = now


def print_summary(job: "Job", records: "UnlabelledRecords", complete: bool, others: bool) -> None:
    """Prints the number of predictions and errors, and the files that contain them.

    Args:
        job: the prediction job.
        records: the records, including those that this process could not read.
        complete: whether the predictions of all machines are there.
        others: whether other processes wrote some of the rows; errors are then not counted.
    """
    machine, machines = job.machine
    if records.skipped:
        print(
            f"tftpu: warning: {counted(len(records.skipped), 'record')} could not be read; the "
            "row of each contains the error.",
            file=sys.stderr,
        )
    if complete:
        shards = -(-records.count // job.records_per_shard)
        number = "00000" if shards == 1 else "*"
        name = f"predictions-{number}-of-{shards:05d}.{job.format}"
        errors = len(records.skipped)
        said = counted(records.count - errors, "prediction")
        said += f" and {counted(errors, 'error')}" if errors else ""
        said = counted(records.count, "row") if others else said
        print(f"{said} in {files.join(job.output, name)}")
    else:
        print(
            f"the predictions of machine {machine} of {machines} are in {job.output}; some of the "
            "other machines' are missing"
        )


def print_rows(rows: Sequence[dict[str, Any]]) -> None:
    """Prints predictions as JSON lines without long lists; skips rows that only name records."""
    from tftpu.input_pipelines.formats.results import KEYS

    for row in rows:
        most = _VALUES_BESIDE_CLASS if "class" in row else _VALUES
        shown = {name: value for name, value in row.items() if np.size(value) <= most}
        if shown.keys() - set(KEYS):
            print(json.dumps(shown, ensure_ascii=False))


def collect_rows(encode: Any, rows: list[dict[str, Any]]) -> Any:
    """Returns a function that encodes a shard as `encode` does, and adds its rows to a list."""
    from tftpu.input_pipelines.formats import results

    def encode_and_collect(columns: "results.Columns", errors: "results.Errors") -> bytes:
        rows.extend(results.iterate_rows(columns, errors))
        return encode(columns, errors)

    return encode_and_collect
