"""Measures how long the TPU compiler takes, for the table of `preflight/compiling/duration.py`.

    python -m tests.benchmarks.compiled.compile_times [CONFIG:SLICE ...]

Evidence: executed; the processor seconds of the compiler on this machine. Prints a row of the table
for each config and slice, which takes up to five minutes, and the estimate without that model.
"""

import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from tftpu.preflight.compiling.duration import MEASURED, ProgramSize, fit_weights

USUAL = ("digits_resnet:v5e-8", "python_gpt:v5e-8", "llama_110m_tinystories:v5e-8",
         "resnet50_imagenet:v5e-8", "vit_s16_imagenet:v5e-8")  # fmt: skip


def measure(config: str, slice_name: str) -> tuple[ProgramSize, float]:
    """Returns the size of a config's program, and the compiler's seconds of processor time."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "tftpu.launch.main", "preflight", config]
        subprocess.run(
            [*command, f"--slices={slice_name}", f"--workdir={folder}"],
            env={**os.environ, "TFTPU_CACHE": folder},
            stdout=subprocess.DEVNULL,
            check=True,
        )
        [path] = Path(folder, "preflight").glob("*/result.json")
        result = json.loads(path.read_text())
    return ProgramSize(*result["program_size"]), result["processor_seconds"]


def estimate_without(name: str) -> float:
    """Returns what the rows of other models estimate for a row of the table."""
    model = name.split()[0]
    rows = tuple(row for other, row in MEASURED.items() if other.split()[0] != model)
    return float(np.dot(MEASURED[name][0], fit_weights(rows)))


def main() -> None:
    """Prints the rows that are asked for, then the errors of the rows in the table."""
    for word in sys.argv[1:] or USUAL:
        config, _, slice_name = word.partition(":")
        size, seconds = measure(config, slice_name)
        shown = ", ".join(f"{value:.0f}" for value in size)
        print(f'    "{config} {slice_name}": (ProgramSize({shown}), {seconds:.1f}),', flush=True)
    for name, (_, seconds) in MEASURED.items():
        found = estimate_without(name)
        factor = math.exp(abs(math.log(found / seconds)))
        print(f"{name}: {seconds:.1f} s, {found:.1f} s without this model, factor {factor:.2f}")


if __name__ == "__main__":
    main()
