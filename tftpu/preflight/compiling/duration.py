"""Estimates how long the TPU compiler takes for a program, from programs that were measured.

Most of its time goes to the choice of tiles for products. It takes longer for convolutions, and for
products of four or more dimensions of which the last two do not fill tiles.
"""

import contextlib
import functools
import json
import math
import re
from pathlib import Path
from typing import NamedTuple

import numpy as np

_PRODUCT = re.compile(
    r"stablehlo\.(dot_general|convolution)\b.*? : "
    r"\(tensor<([^>]*)>, tensor<([^>]*)>\) -> tensor<([^>]*)>"
)
_ROWS_OF_TILE = 8
_ALIKE = 1.05  # most that two programs of one model differ in their number of instructions


class ProgramSize(NamedTuple):
    """What the compiler's time depends on; products count by the root of their elements.

    Attributes:
        instructions: number of instructions, except constants.
        convolutions: the sum over convolutions.
        products: the sum over all products, convolutions among them.
        unaligned: the sum over products of four or more dimensions that do not fill tiles.
    """

    instructions: int
    convolutions: float
    products: float
    unaligned: float


# Sizes of programs, and the compiler's seconds of processor time (2026-11-27, 2 cores of an x86-64
# machine that did other work as well; `python -m tests.benchmarks.compiled.compile_times`).
MEASURED: dict[str, tuple[ProgramSize, float]] = {
    "digits_resnet v4-8": (ProgramSize(3457, 9321, 9472, 1176), 3.7),
    "digits_resnet v5e-8": (ProgramSize(3349, 7336, 7454, 880), 2.3),
    "digits_resnet v6e-8": (ProgramSize(3349, 7336, 7454, 880), 3.2),
    "llama_110m_tinystories v5e-8": (ProgramSize(18750, 0, 3204777, 306023), 63.5),
    "python_gpt v4-8": (ProgramSize(5836, 0, 64134, 0), 5.1),
    "python_gpt v5e-8": (ProgramSize(5836, 0, 46158, 0), 4.2),
    "python_gpt v6e-8": (ProgramSize(5836, 0, 46158, 0), 5.2),
    "resnet50_imagenet v5e-8": (ProgramSize(14901, 1082565, 1085688, 661258), 149.4),
    "vit_s16_imagenet v5e-8": (ProgramSize(13662, 16210, 1574005, 1237335), 115.3),
}


def measure_program(module: str, devices: int) -> ProgramSize:
    """Returns the size of a program.

    Args:
        module: its StableHLO text.
        devices: the number of devices that it is divided among; 1 if it is of one device.
    """
    instructions = module.count("= stablehlo.") + module.count('= "stablehlo.')
    convolutions = products = unaligned = 0.0
    for kind, *tensors in _PRODUCT.findall(module):
        shapes = [[int(size) for size in tensor.split("x")[:-1]] for tensor in tensors]
        weight = math.sqrt(sum(map(math.prod, shapes)) / devices)
        products += weight
        convolutions += weight if kind == "convolution" else 0.0
        is_wide = max(map(len, shapes)) > 3
        unaligned += weight if is_wide and not all(map(_fills_tiles, shapes)) else 0.0
    instructions -= module.count("stablehlo.constant")
    return ProgramSize(instructions, convolutions, products, unaligned)


def _fills_tiles(shape: list[int]) -> bool:
    return all(n <= _ROWS_OF_TILE or n % _ROWS_OF_TILE == 0 for n in shape[-2:])


def estimate_seconds(size: ProgramSize) -> float:
    """Returns the processor time that the compiler takes on the machine that was measured."""
    return float(np.dot(size, fit_weights(tuple(MEASURED.values()))))


@functools.cache
def fit_weights(rows: tuple[tuple[ProgramSize, float], ...]) -> np.ndarray:
    """Returns the seconds for each part of a size, by least squares of the relative errors."""
    relative = np.array([np.divide(size, seconds) for size, seconds in rows])
    kept = np.arange(relative.shape[1])
    while True:  # a part does not save time: what would be negative is left out
        found = np.linalg.lstsq(relative[:, kept], np.ones(len(rows)), rcond=None)[0]
        if found.min() >= 0:
            weights = np.zeros(relative.shape[1])
            weights[kept] = found
            return weights
        kept = np.delete(kept, found.argmin())


def measure_correction(size: ProgramSize, folder: Path) -> float:
    """Returns measured by estimated seconds of the same model on this machine, 1 if it is new.

    Args:
        size: the size of the program to be compiled.
        folder: the folder of all programs that were compiled on this machine.
    """
    ratios = []
    for path in folder.glob("*/result.json"):
        # One of an older version, or damaged, has no such numbers.
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            result = json.loads(path.read_text())
            known = ProgramSize(*result["program_size"])
            more, less = sorted((known.instructions, size.instructions), reverse=True)
            if not result["error"] and more <= _ALIKE * less:
                ratios.append(result["processor_seconds"] / estimate_seconds(known))
    return float(np.median(ratios)) if ratios else 1.0
