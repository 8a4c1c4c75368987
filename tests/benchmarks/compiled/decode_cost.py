"""Prices a token that GPT-2 writes on a TPU, beside the time to read weights and cache once.

    python -m tests.benchmarks.compiled.decode_cost [--batches=1,32] [--generations=v5e,v6e]

The compiled program is the loop of `tftpu.inference.writer` over 64 tokens, bfloat16, with
a full cache of 1,024 tokens, on one core. The floor is the time in which all weights, in bfloat16,
and the whole cache come from the memory at its full bandwidth; a prediction rests on 0.8 of it.

Evidence: compiled.
"""

import argparse
import dataclasses
import os

os.environ["KERAS_BACKEND"] = "tensorflow"
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ["JAX_PLATFORMS"] = "cpu"

import functools

from tests.benchmarks.compiled.cycles import CompileError, one_replica_of
from tftpu import models
from tftpu.engines.tensorflow.lowering.lower_writing import LoweredWriting, lower_writing
from tftpu.preflight.compiling import compiler
from tftpu.preflight.pricing.cost import price

HEAD = "| generation | batch | ms a token | floor, ms | ratio | GB a token | floor, GB |"


@dataclasses.dataclass(frozen=True)
class Token:
    """The cost of a token: seconds and bytes accessed, and the least of both."""

    seconds: float
    floor: float
    bytes: float
    floor_bytes: float


def main() -> None:
    """Prints a row for each generation and batch."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", default="1,32")
    parser.add_argument("--generations", default="v5e,v6e")
    given = parser.parse_args()
    print(f"{HEAD}\n|{'---|' * HEAD[1:].count('|')}", flush=True)
    for batch in map(int, given.batches.split(",")):
        for generation in given.generations.split(","):
            print(_row(token(generation, batch), generation, batch), flush=True)


@functools.cache
def writing(batch: int) -> LoweredWriting:
    """Lowers the loop of GPT-2 small over rows with a full cache."""
    build = functools.partial(models.build, "gpt2_small")
    return lower_writing(build, batch, "mixed_bfloat16")


def token(generation: str, batch: int) -> Token:
    """Compiles the loop for one core, and prices a token of all rows.

    Raises:
        CompileError: the compiler rejects it.
    """
    loop = writing(batch)
    program, every = loop.step, loop.tokens
    target = one_replica_of(generation)
    compiled = compiler.compile_program(program, target)
    if compiled.error:
        raise CompileError(compiled.error[:200])
    cost = price(program, compiled, target)
    size = models.config("gpt2_small")
    weights = program.state_bytes.weights // 2  # of float32
    cache = batch * size.context * size.layers * 2 * size.width * 2
    least = weights + cache
    return Token(
        cost.seconds / every, least / target.bytes_per_s, cost.bytes_accessed / every, least
    )


def _row(found: Token, generation: str, batch: int) -> str:
    cells = [
        generation,
        str(batch),
        f"{1e3 * found.seconds:.2f}",
        f"{1e3 * found.floor:.2f}",
        f"{found.seconds / found.floor:.2f}",
        f"{found.bytes / 1e9:.2f}",
        f"{found.floor_bytes / 1e9:.2f}",
    ]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
