"""Prices a token that GPT-2 writes on a TPU, beside the time to read weights and cache once.

    python -m tests.benchmarks.decode_cost [--batches=1,32] [--generations=v5e,v6e]

The compiled program is the loop of `tftpu.inference.generate` over 64 tokens, bfloat16, with
a full cache of 1,024 tokens, on one core. The floor is the time in which all weights, in bfloat16,
and the whole cache come from the memory at its full bandwidth; a prediction rests on 0.8 of it.

Evidence: compiled.
"""

import argparse
import os

os.environ["KERAS_BACKEND"] = "tensorflow"
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ["JAX_PLATFORMS"] = "cpu"

import functools

from tests.benchmarks.tpu_cost import CompileError, one_replica_of
from tftpu import models
from tftpu.engines.tensorflow.lower_writing import Writing, lower_writing
from tftpu.preflight.compiling import compiler
from tftpu.preflight.pricing.cost import price

HEAD = "| generation | batch | ms a token | floor, ms | ratio | GB a token | floor, GB |"


def main() -> None:
    """Prints a row for each generation and batch."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", default="1,32")
    parser.add_argument("--generations", default="v5e,v6e")
    given = parser.parse_args()
    print(f"{HEAD}\n|{'---|' * HEAD[1:].count('|')}", flush=True)
    for batch in map(int, given.batches.split(",")):
        build = functools.partial(models.build, "gpt2_small")
        writing = lower_writing(build, batch, "mixed_bfloat16")
        for generation in given.generations.split(","):
            print(_row(writing, generation, batch), flush=True)


def _row(writing: Writing, generation: str, batch: int) -> str:
    program, every = writing.step, writing.tokens
    target = one_replica_of(generation)
    compiled = compiler.compile_program(program, target)
    if compiled.error:
        raise CompileError(compiled.error[:200])
    cost = price(program, compiled, target)
    size = models.config("gpt2_small")
    weights = program.held.weights // 2  # of float32
    cache = batch * size.context * size.layers * 2 * size.width * 2
    spent, floor = cost.seconds / every, (weights + cache) / target.bytes_per_s
    cells = [
        generation,
        str(batch),
        f"{1e3 * spent:.2f}",
        f"{1e3 * floor:.2f}",
        f"{spent / floor:.2f}",
    ]
    cells += [f"{cost.bytes_accessed / every / 1e9:.2f}", f"{(weights + cache) / 1e9:.2f}"]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
