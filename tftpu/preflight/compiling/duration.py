"""Predicts the time of a compilation from earlier ones of the same model on this machine."""

import contextlib
import json
import statistics
from pathlib import Path

_ALIKE = 1.01  # largest ratio of the instruction counts of programs that count as similar


def count_instructions(module: str) -> int:
    """Returns the number of instructions of a program in StableHLO."""
    return module.count("= stablehlo.") + module.count('= "stablehlo.')


def find_measured_seconds(instructions: int, generation: str, folder: Path) -> float | None:
    """Returns the median processor seconds of earlier compilations of similar programs, or None.

    Similar programs are for the same generation and have almost the same number of instructions, as
    the same model has for another batch or slice. Compiling ResNet-50 takes four times as long for
    v6e as for v5e.

    Args:
        instructions: the number of instructions of the program to be compiled.
        generation: the name of the slice's generation.
        folder: the folder of all programs that were compiled on this machine.
    """
    found = []
    for path in folder.glob(f"*{generation}-*/result.json"):
        # A result of an older version, or a damaged one, lacks these values.
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            result = json.loads(path.read_text())
            less, more = sorted((result["instructions"], instructions))
            if not result["error"] and more <= _ALIKE * less:
                found.append(result["processor_seconds"])
    return statistics.median(found) if found else None
