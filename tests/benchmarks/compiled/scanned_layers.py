"""Compares unrolled and scanned transformer layers: the reason why the zoo unrolls them.

    python -m tests.benchmarks.compiled.scanned_layers [--layers=12] [--generations=v3,v5e]

Evidence: compiled. The blocks of GPT-2 small over 8 x 1024 tokens, in bfloat16, with AdamW: once
one after the other, as in the zoo, and once as a device loop over one block with stacked weights.
Prints the seconds that TensorFlow (building, tracing) and the TPU compiler take, and the result: M
cycles, with loops multiplied, and MiB of HBM. The cache is not used.
"""

import argparse
import os
import tempfile
import time

os.environ["KERAS_BACKEND"] = "tensorflow"
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ["JAX_PLATFORMS"] = "cpu"

import keras
import tensorflow as tf

from tests.benchmarks.compiled.cycles import cycles_of, one_replica_of
from tests.benchmarks.compiled.tpu_cost import adamw
from tests.support.steps.lowering import lower
from tftpu import models
from tftpu.models.families.gpt import _apply_block
from tftpu.preflight.compiling import compiler
from tftpu.preflight.pricing.cost import parse_memory_stats, price

BATCH, TIME, WIDTH = 8, 1024, 768


def unrolled(layers: int) -> keras.Model:
    config = models.config("gpt2_small", layers=layers)
    x = tokens = keras.Input((TIME, WIDTH))
    for index in range(layers):
        x = _apply_block(x, None, config, name=f"block{index + 1}")
    return keras.Model(tokens, x)


def scanned(layers: int) -> keras.Model:
    tokens = keras.Input((TIME, WIDTH))
    return keras.Model(tokens, Scanned(layers)(tokens))


class Scanned(keras.layers.Layer):
    """One block, run `count` times with different weights."""

    def __init__(self, count: int):
        super().__init__()
        self.count = count

    def build(self, shape):
        self.block = unrolled(1)
        self.block.trainable = False  # its own weights are never used
        self.stacks = [
            self.add_weight(shape=(self.count, *v.shape), name=v.path.replace("/", "_"))
            for v in self.block.variables
        ]

    def call(self, x):
        stacks = [keras.ops.convert_to_tensor(v) for v in self.stacks]

        def body(index, x):
            weights = zip(self.block.variables, [stack[index] for stack in stacks])
            with keras.StatelessScope(state_mapping=list(weights)):
                return index + 1, self.block(x, training=True)

        _, y = tf.while_loop(
            lambda index, _: index < self.count,
            body,
            (tf.constant(0), x),
            maximum_iterations=self.count,  # or there is no gradient on a TPU
        )
        return y


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--generations", default="v3,v5e")
    args = parser.parse_args()
    tokens = tf.TensorSpec((BATCH, TIME, WIDTH), tf.bfloat16)
    for make in (unrolled, scanned):

        def model(make=make) -> keras.Model:
            built = make(args.layers)
            built.compile(adamw(), keras.losses.MeanSquaredError())
            return built

        start = time.monotonic()
        program = lower(model, (tokens, tokens), 1, "mixed_bfloat16")
        print(f"{make.__name__:<9} TensorFlow {time.monotonic() - start:5.0f} s", flush=True)
        for generation in args.generations.split(","):
            target = one_replica_of(generation)
            with tempfile.TemporaryDirectory() as os.environ["TFTPU_CACHE"]:
                compiled = compiler.compile_program(program, target)
            if compiled.error:
                print(f"{'':<9} {generation:<4} does not compile: {compiled.error[:200]}")
                continue
            cycles = cycles_of(price(program, compiled, target), target)
            print(
                f"{'':<9} {generation:<4} compiler {compiled.seconds:5.0f} s  {cycles / 1e6:7.1f} "
                f"M cycles  {parse_memory_stats(compiled.memory).total / 2**20:6.0f} MiB",
                flush=True,
            )


if __name__ == "__main__":
    main()
