"""Prices MaxText's own train step, which `maxtext_step` compiled, beside tftpu's.

    KERAS_BACKEND=jax python -m tests.benchmarks.compiled.maxtext_cost FILE

Both are Llama 3.1 8B on a v6e-8, 3 x 8,192 tokens a chip, priced by the same rules. The compiler
says nothing of the work in a kernel: MaxText's for attention take the price of tftpu's of the same
pass.

Evidence: compiled.
"""

import os

os.environ["KERAS_BACKEND"] = "jax"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import collections
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.benchmarks.compiled import sharded_cost
from tftpu.engines.lowered import LoweredStep
from tftpu.preflight.compiling import compiler
from tftpu.preflight.pricing.cost import parse_memory_stats, price
from tftpu.preflight.pricing.instructions import Priced
from tftpu.tpu.slices import parse_slice

ROW = sharded_cost.ROWS["8b-v6e-8"]
FORWARD, BACKWARD = "splash_mha_fwd", "splash_mha_dkv"  # names of MaxText's kernels


def main(arguments: list[str]) -> None:
    """Prints the seconds of each kind of work, and of all."""
    [file] = arguments
    target = parse_slice(ROW.slice)
    step, compiled = sharded_cost.compiled_row(ROW)
    ours = price(step, compiled, target).instructions
    theirs = price(*_program(Path(file).read_text()), target).instructions
    found = [_seconds(ours), _seconds(_with_kernels_of(ours, theirs))]
    print(f"tftpu needs {parse_memory_stats(compiled.memory).total / 2**30:.2f} GiB")
    print(f"{'seconds':14}{'tftpu':>9}{'MaxText':>9}")
    for kind in sorted(found[0] | found[1]):
        print(f"{kind:14}" + "".join(f"{seconds[kind]:9.3f}" for seconds in found))
    totals = [sum(seconds.values()) for seconds in found]
    print(f"{'all':14}" + "".join(f"{t:9.3f}" for t in totals) + f"{totals[0] / totals[1]:9.3f}")


def _seconds(instructions: Sequence[Priced]) -> collections.Counter[str]:
    by_kind = collections.Counter[str]()
    for priced in instructions:
        by_kind[priced.kind] += 0 if priced.overlaps else priced.seconds
    return by_kind


def _program(text: str) -> tuple[LoweredStep, compiler.Compiled]:
    """Returns a program of which nothing is known but its text."""
    names = ["?"] * text.count(" parameter(")
    step = LoweredStep(program=b"", arguments=names, precision="bfloat16")
    kinds = ("argument", "output", "alias", "temp", "generated_code", "peak_memory")
    memory = {f"{kind}_{'' if 'peak' in kind else 'size_'}in_bytes": 0 for kind in kinds}
    return step, compiler.Compiled("", False, text, memory, 0.0, 0.0, False)


def _with_kernels_of(ours: Sequence[Priced], theirs: Sequence[Priced]) -> list[Priced]:
    """Returns their instructions, with our prices of the kernels for attention."""
    runs = sorted(p.seconds / p.times for p in ours if p.kind == "kernel" and p.flops)
    prices = {FORWARD: runs[0], BACKWARD: runs[-1]}

    def priced(p: Priced) -> Priced:
        own = [seconds for name, seconds in prices.items() if p.name.startswith(name)]
        return dataclasses.replace(p, seconds=own[0] * p.times) if own else p

    return [priced(p) for p in theirs]


if __name__ == "__main__":
    main(sys.argv[1:])
