"""Checks a model on the JAX engine for slices, for `tests/preflight/compiling/test_jax_steps.py`.

KERAS_BACKEND=jax python -m tests.support.programs.jax_preflight MESH SLICE,... [OPTIONS] > FILE
"""

import functools
import json
import re
import sys

import keras
import tensorflow as tf

from tests.support.sums_over_devices import sums
from tftpu import models, preflight
from tftpu.config import TrainConfig
from tftpu.engines.jax.lower import JaxLowering
from tftpu.errors import UserError
from tftpu.preflight.compiling import compiler
from tftpu.preflight.pricing import cost
from tftpu.tpu.compiler_options import AUTO
from tftpu.tpu.slices import parse_slice

INPUTS, HIDDEN, CLASSES, BATCH = 1024, 4096, 16, 4096
WIDTH = 40960


def model() -> keras.Model:
    """Returns a compiled model of two layers."""
    built = keras.Sequential(
        [
            keras.Input((INPUTS,)),
            keras.layers.Dense(HIDDEN, "relu", name="hidden"),
            keras.layers.Dense(CLASSES, dtype="float32", name="head"),
        ],
        name="mlp",
    )
    built.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return built


def wide() -> keras.Model:
    """Returns a model whose state is larger than a chip of v5e: 20 GB."""
    built = keras.Sequential([keras.Input((WIDTH,)), keras.layers.Dense(WIDTH, use_bias=False)])
    built.compile("adam", "mse")
    return built


def gpt(width: int = 256, layers: int = 1, remat: str = "none") -> keras.Model:
    """Returns a compiled model with the flash kernel, and heads of 64."""
    sizes = {"layers": layers, "vocabulary": 512, "width": width, "heads": width // 64}
    built = models.build("gpt2_small", attention="flash", remat=remat, **sizes)
    built.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return built


def constraints() -> list[str]:
    """Returns the shapes that a program for two devices along `tensor` cuts in the middle."""
    share = (tf.TensorSpec((2, 512), tf.int32),) * 2
    step = JaxLowering("tensor:2").build(gpt, share, 2, "mixed_bfloat16", TrainConfig()).lower()
    cut = r'sharding_constraint .*\[\{\?\}, \{"tensor"\}, \{\?\}\]> : tensor<([\dx]+)x'
    return re.findall(cut, step.program.decode())


def kernels() -> list[int]:
    """Returns the FLOPs of the kernels of a device of a mesh."""
    slice_ = parse_slice("v5e-8")
    share = (tf.TensorSpec((2, 512), tf.int32),) * 2
    lowering = JaxLowering("fsdp:4,tensor:2")
    step = lowering.build(gpt, share, 8, "mixed_bfloat16", TrainConfig()).lower()
    compiled = compiler.compile_program(step, slice_)
    found = cost.price(step, compiled, slice_).instructions
    return sorted(p.flops for p in found if p.kind == "kernel" and p.flops)


def scattered() -> list[tuple[str, str]]:
    """Returns how the gradients of a model that is cut over a v6e-8 are added up."""
    slice_ = parse_slice("v6e-8")
    share = (tf.TensorSpec((2, 512), tf.int32),) * 2
    lowering = JaxLowering("fsdp:8")
    step = lowering.build(lambda: gpt(2048), share, 8, "mixed_bfloat16", TrainConfig()).lower()
    return sums(compiler.compile_program(step, slice_).text)


def offloaded() -> list[int]:
    """Returns what a device keeps on its host, with `remat="block"` and with "offload"."""
    share = (tf.TensorSpec((2, 512), tf.int32),) * 2
    slice_, found = parse_slice("v5e-8"), []
    for remat in ("block", "offload"):
        build = functools.partial(gpt, layers=3, remat=remat)
        lowering = JaxLowering("fsdp:8")
        step = lowering.build(build, share, 8, "mixed_bfloat16", TrainConfig()).lower()
        found.append(cost.count_host_bytes(compiler.compile_program(step, slice_).memory))
    return found


def moved() -> list[bool]:
    """Returns whether a step is the same program if its code moves in its file, and has names."""
    source = """
class Own(keras.layers.Layer):
    def call(self, x):
        return keras.ops.tanh(x)

def build():
    layers = [keras.Input((64,)), keras.layers.Dense(8), Own(name="own")]
    made = keras.Sequential(layers)
    made.compile("sgd", "mse")
    return made
"""
    batch = tf.TensorSpec((8, 64)), tf.TensorSpec((8, 8))
    programs = []
    for lines in (0, 9):
        code: dict = {"keras": keras}
        exec(compile("\n" * lines + source, "/own.py", "exec"), code)
        built = JaxLowering("fsdp:8").build(
            code["build"], batch, 8, "mixed_bfloat16", TrainConfig()
        )
        programs.append(built.lower().program)
    return [programs[0] == programs[1], b"own/tanh" in programs[0]]


def rounded() -> list:
    """Returns the bytes of weights with adapters, in floats and in 8 bits, and 4 bits' refusal."""
    batch, found = (tf.TensorSpec((8, 512), tf.int32),) * 2, []
    for base in ("", "int8", "int4"):

        def build(base: str = base) -> keras.Model:
            built = gpt()
            models.enable_lora(built, 4, base=base)
            built.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
            return built

        try:
            step = JaxLowering("fsdp:8").build(build, batch, 8, "mixed_bfloat16", TrainConfig())
            found.append(step.state_bytes.weights)
        except UserError as error:
            found.append(str(error))
    return found


def main(mesh: str, slices: str = "", compiler_options: str = AUTO) -> None:
    """Prints the report, or the FLOPs, as JSON."""
    for part in (kernels, constraints, scattered, offloaded, moved, rounded):
        if mesh == part.__name__:
            print(json.dumps(part()))
            return
    if slices == "wide":
        images = tf.TensorSpec((64, WIDTH))
        options = preflight.PreflightOptions(precision="auto", engine="jax", mesh=mesh)
        print(preflight.check(wide, (images, images), ["v5e-8"], options).to_json())
        return
    batch = tf.TensorSpec((BATCH, INPUTS)), tf.TensorSpec((BATCH,), tf.int32)
    train = TrainConfig(gradient_accumulation_steps=2, global_clipnorm=1.0)
    options = preflight.PreflightOptions(
        precision="auto", train=train, engine="jax", mesh=mesh, compiler_options=compiler_options
    )
    print(preflight.check(model, batch, slices.split(","), options).to_json())


if __name__ == "__main__":
    main(*sys.argv[1:])
