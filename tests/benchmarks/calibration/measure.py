"""Compiles and prices the rows of one engine.

python -m tests.benchmarks.calibration.measure ENGINE FILE [ROW ...]
"""

import dataclasses
import sys
from pathlib import Path
from typing import Any

import keras

from tests.benchmarks.calibration.recording import record, write_rows
from tests.benchmarks.calibration.rows import ROWS, Row
from tftpu.preflight.compiling.compiler import compile_program
from tftpu.preflight.pricing.cost import price
from tftpu.tpu.slices import parse_slice

TIME_LIMIT = 3600.0


def measure_row(row: Row) -> dict[str, Any]:
    """Returns a row with its predicted time, and what that consists of, as JSON.

    Raises:
        RuntimeError: the step does not compile.
    """
    keras.utils.clear_session()  # the names of layers, by which programs are cached, start anew
    target = parse_slice(row.slice)
    step = row.workload.lower(target)
    compiled = compile_program(step, target, row.workload.choose_options(target), TIME_LIMIT)
    if compiled.error:
        raise RuntimeError(f"The step of {row.name} does not compile: {compiled.error[:500]}")
    cost = price(step, compiled, target)
    published = {
        field.name: getattr(row, field.name)
        for field in dataclasses.fields(row)
        if field.name != "workload"
    }
    recorded = record(step, compiled, target)
    return published | {"is_step": row.is_step, "predicted_ms": 1e3 * cost.seconds} | recorded


def main(engine: str, file: str, *names: str) -> None:
    """Writes the rows of an engine to a file."""
    chosen = [
        row
        for row in ROWS
        if row.workload.cluster.engine == engine and (not names or row.name in names)
    ]
    write_rows([measure_row(row) for row in chosen], Path(file))


if __name__ == "__main__":
    main(*sys.argv[1:])
