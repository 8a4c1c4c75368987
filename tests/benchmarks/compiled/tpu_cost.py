"""Compares the cost of the zoo's train steps on a TPU with that of their alternatives.

    python -m tests.benchmarks.compiled.tpu_cost [--rows=gpt2,vit] [--generations=v3,v5e]

Evidence: compiled. Each row compiles two complete train steps of one replica (forward, backward,
update; bfloat16) with the same compiler, batch, loss and optimizer, and compares:

- M cycles: the compiler's own estimate, with loops multiplied. Instructions without one (a Pallas
  kernel, the gradient of a maximum, padding between pixels) are priced by their FLOPs and bytes,
  as `tftpu.preflight.pricing.cost` does;
- GB accessed, counted by the same module, and MiB of HBM.

The rows decode_1 and decode_32 compare a token that GPT-2 writes for that many rows with the time
in which weights and cache are read once (`tests.benchmarks.compiled.decode_cost`).

The first compilation takes 1-3 minutes on 2 cores; its result is cached. KerasHub is installed by
`make test`. Flax is installed into a separate folder, without its dependencies.
"""

import argparse
import dataclasses
import functools
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

os.environ["KERAS_BACKEND"] = "tensorflow"
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ["JAX_PLATFORMS"] = "cpu"

import keras
import tensorflow as tf

from tests.benchmarks.compiled import decode_cost
from tests.benchmarks.compiled.cycles import CompileError, cycles_of, one_replica_of
from tests.support.steps.lowering import lower
from tftpu import models
from tftpu.engines.lowered import LoweredStep
from tftpu.optim.losses import SmoothedCrossentropy
from tftpu.preflight.compiling import compiler
from tftpu.preflight.pricing.cost import Cost, parse_memory_stats, price

GENERATIONS = ("v3", "v5e")
DECODE = {"decode_1": 1, "decode_32": 32}  # rows of text
DECODE_BAR = 1.5
FLAX = ("flax==0.12.8", "msgpack==1.1.2")


@dataclasses.dataclass(frozen=True)
class Row:
    """Two steps to compare, and the largest accepted ratios of ours to the peer's."""

    name: str
    title: str
    ours: Callable[[], LoweredStep]
    peer_name: str
    peer: Callable[[], LoweredStep]
    cycles: float
    hbm: float | None = None


@dataclasses.dataclass(frozen=True)
class Measured:
    """The cost of a compiled step: cycles, bytes accessed, bytes of HBM."""

    cycles: float
    bytes: float
    hbm: float
    cost: Cost


def measure(program: LoweredStep, generation: str) -> Measured:
    """Compiles and prices a program on one core of a generation.

    Raises:
        CompileError: the compiler rejects it.
    """
    target = one_replica_of(generation)
    compiled = compiler.compile_program(program, target)
    if compiled.error:
        raise CompileError(compiled.error[:200])
    cost = price(program, compiled, target)
    return Measured(
        cycles_of(cost, target),
        cost.bytes_accessed,
        parse_memory_stats(compiled.memory).total,
        cost,
    )


# Equal for a batch without weights: the loss of the zoo's configs, and the usual one of Keras.
LOSSES = {
    "tftpu": SmoothedCrossentropy,
    "keras": lambda: keras.losses.SparseCategoricalCrossentropy(from_logits=True),
}


# The steps: Keras models in the step of tftpu, so that only the models differ.


def keras_step(
    model: Callable[[], keras.Model], optimizer: Callable, batch: tuple, loss: str = "tftpu"
) -> LoweredStep:
    def compiled() -> keras.Model:
        built = model()
        built.compile(optimizer=optimizer(), loss=LOSSES[loss]())
        return built

    return lower(compiled, batch, 1, "mixed_bfloat16")


def sgd() -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(0.1, momentum=0.9)


def adamw() -> keras.optimizers.Optimizer:
    return keras.optimizers.AdamW(1e-3, weight_decay=0.1)


def images(count: int) -> tuple:
    return tf.TensorSpec((count, 224, 224, 3), tf.bfloat16), tf.TensorSpec((count,), tf.int32)


def tokens(count: int, time: int) -> tuple:
    return tf.TensorSpec((count, time), tf.int32), tf.TensorSpec((count, time), tf.int32)


@functools.cache
def resnet50() -> LoweredStep:
    return keras_step(lambda: models.build("resnet50", norm_batch=128), sgd, images(128))


@functools.cache
def gpt2(**fields) -> LoweredStep:
    return keras_step(lambda: models.build("gpt2_small", **fields), adamw, tokens(8, 1024))


@functools.cache
def vit(**fields) -> LoweredStep:
    return keras_step(lambda: models.build("vit_b16", **fields), adamw, images(64))


# The peers


def keras_resnet50() -> LoweredStep:
    def model() -> keras.Model:
        return keras.applications.ResNet50(weights=None, classifier_activation=None)

    return keras_step(model, sgd, images(128), "keras")


@functools.cache
def hub_gpt2() -> LoweredStep:
    def model() -> keras.Model:
        import keras_hub

        backbone = keras_hub.models.GPT2Backbone(
            vocabulary_size=50257,
            num_layers=12,
            num_heads=12,
            hidden_dim=768,
            intermediate_dim=3072,
            dropout=0.0,
            max_sequence_length=1024,
        )
        ids = keras.Input((1024,), dtype="int32")
        inputs = {"token_ids": ids, "padding_mask": keras.ops.ones_like(ids)}
        logits = backbone.token_embedding(backbone(inputs), reverse=True)
        return keras.Model(ids, logits)

    return keras_step(model, adamw, tokens(8, 1024), "keras")


@functools.cache
def hub_vit() -> LoweredStep:
    def model() -> keras.Model:
        import keras_hub

        backbone = keras_hub.models.ViTBackbone(
            image_shape=(224, 224, 3),
            patch_size=16,
            num_layers=12,
            num_heads=12,
            hidden_dim=768,
            mlp_dim=3072,
        )
        head = keras.layers.Dense(1000, dtype="float32")
        return keras.Model(backbone.inputs, head(backbone.output[:, 0]))

    return keras_step(model, adamw, images(64), "keras")


def flax_resnet50() -> LoweredStep:
    """Lowers the ResNet-50 of Flax's ImageNet example, in flax.linen, by JAX itself."""
    _install_flax()
    import jax
    import jax.numpy as jnp

    from tests.benchmarks.compiled import flax_resnet

    state = jax.eval_shape(flax_resnet.init, jax.random.key(0))
    batch = (
        jax.ShapeDtypeStruct((128, 224, 224, 3), jnp.bfloat16),
        jax.ShapeDtypeStruct((128,), jnp.int32),
    )
    # As with TensorFlow's variables, the update overwrites the weights.
    lowered = jax.jit(flax_resnet.train_step, donate_argnums=0).lower(state, *batch)
    hlo = lowered.compiler_ir("hlo").as_serialized_hlo_module_proto()
    arguments = ["argument"] * len(jax.tree.leaves((state, batch)))
    return LoweredStep(program=hlo, arguments=arguments, precision="bfloat16")


def _install_flax() -> None:
    """Installs Flax into a folder at the end of the path, so that it shadows nothing."""
    folder = Path(os.environ.get("TFTPU_CACHE") or Path.home() / ".cache" / "tftpu") / "peers"
    if not (folder / "flax").exists():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target"]
        subprocess.run([*pip, str(folder), *FLAX], check=True)
    sys.path.append(str(folder))


ROWS = (
    Row(
        *("resnet50", "ResNet-50, 128 x 224 px, SGD momentum", resnet50),
        *("keras.applications", keras_resnet50, 0.72),
    ),
    Row(
        *("resnet50_flax", "ResNet-50, 128 x 224 px, SGD momentum", resnet50),
        *("Flax's example", flax_resnet50, 0.97),
    ),
    Row(
        *("gpt2", "GPT-2 small, 8 x 1024, AdamW, plain attention"),
        *(lambda: gpt2(attention="plain"), "KerasHub", hub_gpt2, 0.75),
    ),
    Row(
        *("gpt2_flash", "the same, as by default", gpt2),
        *("KerasHub", hub_gpt2, 0.55, 0.60),
    ),
    Row(
        *("vit", "ViT-B/16, 64 x 224 px, AdamW, plain attention"),
        *(lambda: vit(attention="plain"), "KerasHub", hub_vit, 0.80),
    ),
    Row(
        *("vit_flash", "the same, as by default", vit),
        *("KerasHub", hub_vit, 0.80),
    ),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = [*(row.name for row in ROWS), *DECODE]
    parser.add_argument("--rows", default=",".join(names), help="any of " + ",".join(names))
    parser.add_argument("--generations", default=",".join(GENERATIONS))
    parser.add_argument("--explain", action="store_true", help="list our longest instructions")
    args = parser.parse_args()
    unknown = set(args.rows.split(",")) - set(names)
    if unknown:
        parser.error(f"no row {', '.join(sorted(unknown))}: choose from {', '.join(names)}")
    print(f"libtpu {compiler.read_libtpu_version()}, one replica, mixed_bfloat16", flush=True)
    header = f"{'step':<40} {'on':<4} {'':<20} {'M cycles':>9} {'GB':>7} {'HBM MiB':>8}"
    print(header, flush=True)
    failed = 0
    for row in (row for row in ROWS if row.name in args.rows.split(",")):
        start = time.monotonic()
        ours, peer = row.ours(), row.peer()
        for generation in args.generations.split(","):
            try:
                a, b = measure(ours, generation), measure(peer, generation)
            except CompileError as error:
                print(f"{row.title:<40} {generation:<4} MISSED, does not compile: {error}")
                failed += 1
                continue
            for who, m in (("ours", a), (row.peer_name, b)):
                print(
                    f"{row.title:<40} {generation:<4} {who:<20} {m.cycles / 1e6:9.1f} "
                    f"{m.bytes / 1e9:7.1f} {m.hbm / 2**20:8.0f}",
                    flush=True,
                )
            ratio, hbm = a.cycles / b.cycles, a.hbm / b.hbm
            reached = ratio <= row.cycles and (row.hbm is None or hbm <= row.hbm)
            bar = f"bar {row.cycles}" + (f", HBM {row.hbm}" if row.hbm else "")
            print(
                f"{'':<45} ratio {ratio:.3f}, bytes {a.bytes / b.bytes:.3f}, HBM {hbm:.3f} "
                f"({bar}: {'reached' if reached else 'MISSED'})",
                flush=True,
            )
            failed += not reached
            if args.explain:
                explain(a.cost)
        print(f"{'':<45} {time.monotonic() - start:.0f} s", flush=True)
    chosen = [batch for name, batch in DECODE.items() if name in args.rows.split(",")]
    for generation, batch in itertools.product(args.generations.split(","), chosen):
        failed += not decodes(generation, batch)
    return min(failed, 1)


def decodes(generation: str, batch: int) -> bool:
    """Prints what a token costs; returns whether it reaches the bar."""
    title = f"GPT-2 small writes {batch} x a token"
    try:
        token = decode_cost.token(generation, batch)
    except CompileError as error:
        print(f"{title:<40} {generation:<4} MISSED, does not compile: {error}")
        return False
    ratio = token.seconds / token.floor
    reached = ratio <= DECODE_BAR
    print(
        f"{title:<40} {generation:<4} {1e3 * token.seconds:.2f} ms, floor "
        f"{1e3 * token.floor:.2f} ms, ratio {ratio:.2f} (bar {DECODE_BAR}: "
        f"{'reached' if reached else 'MISSED'})",
        flush=True,
    )
    return reached


def explain(cost: Cost, count: int = 40) -> None:
    """Prints the time of a step by kind and by instruction."""
    for kind, seconds, cycles in cost.group_by("kind"):
        print(f"  {kind:<14} {seconds * 1e3:8.2f} ms {cycles / 1e6:8.2f} M cycles")
    for p in sorted(cost.instructions, key=lambda p: -(p.cycles or p.seconds * 1e9))[:count]:
        print(
            f"  {p.cycles / 1e6:7.3f} M {p.seconds * 1e3:7.3f} ms {p.hbm_bytes / 1e6:7.0f} MB "
            f"{p.flops / 1e9:7.1f} GF x{p.times} {p.kind:<12} {p.name:<40} {p.op_name[-90:]}"
        )


if __name__ == "__main__":
    sys.exit(main())
