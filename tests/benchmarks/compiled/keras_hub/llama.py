"""Compiles Llama's train step as KerasHub shards it, and as tftpu does, for the same TPUs.

    KERAS_BACKEND=jax python -m tests.benchmarks.compiled.keras_hub.llama [--layers=N] [--tokens=N]

KerasHub's model is divided by its own layout map under `keras.distribution.ModelParallel`, and the
step is the one that Keras's JAX `fit` runs. Both have the same sizes, batch, optimizer and dtype
policy, and the same compiler and prices. A line for each mesh of KerasHub and for tftpu's.

Evidence: compiled.
"""

import os

os.environ["KERAS_BACKEND"] = "jax"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import sys
from collections.abc import Callable
from typing import Any

import jax
import keras
import tensorflow as tf

from tests.benchmarks.compiled.cycles import cycles_of
from tftpu import models
from tftpu.config import TrainConfig
from tftpu.engines.jax.lower import JaxLowering
from tftpu.engines.lowered import LoweredStep
from tftpu.kernels import jax_internals
from tftpu.preflight.compiling import compiler
from tftpu.preflight.pricing.cost import parse_memory_stats, price
from tftpu.tpu.slices import parse_slice

SLICE, PRECISION = "v5e-16", "mixed_bfloat16"
MESHES = ((8, 2), (4, 4))  # their axes "batch" and "model"; 8 key heads divide by no more
TIME_LIMIT = 3000.0


def main(arguments: list[str]) -> None:
    """Prints cycles and memory of each program."""
    given = dict(argument.removeprefix("--").split("=") for argument in arguments)
    layers, tokens = int(given.get("layers", 16)), int(given.get("tokens", 2048))
    devices = parse_slice(SLICE).replicas
    jax.config.update("jax_num_cpu_devices", devices)
    for mesh in MESHES:
        say(f"KerasHub, batch:{mesh[0]},model:{mesh[1]}", theirs(mesh, layers, tokens), {}, SLICE)
    lowering = JaxLowering("fsdp:-1")
    share = (tf.TensorSpec((1, tokens), tf.int32),) * 2
    step = lowering.build(
        lambda: ours(layers), share, devices, PRECISION, TrainConfig(log_every=1)
    ).lower()
    say("tftpu, fsdp:16", step, lowering.choose_compiler_options(parse_slice(SLICE)), SLICE)


def say(name: str, step: LoweredStep, options: dict[str, str], where: str) -> None:
    """Compiles and prices a step for a slice, and prints a line."""
    target = parse_slice(where)
    compiled = compiler.compile_program(step, target, options, TIME_LIMIT)
    if compiled.error:
        print(f"{name:30} does not compile: {compiled.error[:300]}", flush=True)
        return
    cost = price(step, compiled, target)
    print(
        f"{name:30} {parse_memory_stats(compiled.memory).total / 2**30:.2f} GiB; "
        f"{cycles_of(cost, target) / 1e6:,.0f} Mcycles; {cost.seconds:.3f} s a step, of which "
        f"exchange {cost.collective_seconds:.3f} s; compiled in {compiled.seconds:.0f} s",
        flush=True,
    )


def ours(layers: int) -> keras.Model:
    """Builds and compiles the model of tftpu."""
    built = models.build("llama_1b", layers=layers, attention="flash")
    return compile_model(built)


def compile_model(model: keras.Model) -> keras.Model:
    """Compiles a model with AdamW and a loss, without metrics."""
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.AdamW(1e-4, weight_decay=0.1), loss)
    return model


def theirs(mesh: tuple[int, int], layers: int, tokens: int) -> LoweredStep:
    """Lowers the step of Keras's JAX `fit` for KerasHub's model."""
    import keras_hub

    size: Any = models.config("llama_1b")
    devices = keras.distribution.DeviceMesh(
        mesh, ["batch", "model"], [f"cpu:{i}" for i in range(mesh[0] * mesh[1])]
    )
    layout = keras_hub.models.Llama3Backbone.get_layout_map(devices)
    distribution = keras.distribution.ModelParallel(layout_map=layout, batch_dim_name="batch")

    def build() -> keras.Model:
        backbone = keras_hub.models.Llama3Backbone(
            vocabulary_size=size.vocabulary,
            num_layers=layers,
            num_query_heads=size.heads,
            hidden_dim=size.width,
            intermediate_dim=size.hidden,
            num_key_value_heads=size.kv_heads,
            rope_max_wavelength=size.rope_base,
            tie_word_embeddings=True,
        )
        return compile_model(keras_hub.models.Llama3CausalLM(backbone=backbone, preprocessor=None))

    return lower_fit(build, distribution, mesh[0] * mesh[1], tokens)


def lower_fit(
    build: Callable[[], keras.Model], distribution: Any, examples: int, tokens: int
) -> LoweredStep:
    """Lowers the step of Keras's JAX `fit` for a causal language model of KerasHub.

    Args:
        build: builds and compiles the model.
        distribution: of `keras.distribution`.
        examples: in a batch.
        tokens: of an example.
    """
    made: list[Any] = []

    def create() -> Any:
        model = build()
        model.optimizer.build(model.trainable_variables)
        made.append(model)
        return tuple([v.value for v in group] for group in _groups(model))

    keras.config.set_dtype_policy(PRECISION)
    try:
        # KerasHub asks for the devices, and attends by Keras's kernel on a TPU.
        with distribution.scope(), jax_internals.reporting_devices("tpu"):
            shapes = jax.eval_shape(create)
            [model] = made
            return _lowered(model, shapes, distribution, examples, tokens)
    finally:
        keras.config.set_dtype_policy("float32")


def _groups(model: keras.Model) -> tuple[list[keras.Variable], ...]:
    """Returns the variables of the state of Keras's `train_step`."""
    return (
        model.trainable_variables,
        model.non_trainable_variables,
        model.optimizer.variables,
        model.metrics_variables,
    )


def _lowered(
    model: keras.Model, shapes: Any, distribution: Any, examples: int, tokens: int
) -> LoweredStep:
    def layout(variable: keras.Variable) -> Any:
        return distribution.get_variable_layout(variable).backend_layout

    groups = _groups(model)
    shardings = tuple([layout(v) for v in group] for group in groups)
    state = jax.tree.map(
        lambda s, sharding: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding),
        shapes,
        shardings,
    )
    rows = distribution.get_data_layout((examples, tokens)).backend_layout
    ids = jax.ShapeDtypeStruct((examples, tokens), "int32", sharding=rows)
    mask = jax.ShapeDtypeStruct((examples, tokens), "bool", sharding=rows)
    data = ({"token_ids": ids, "padding_mask": mask}, ids)

    def train(state: Any, data: Any) -> Any:
        return model.train_step(state, data)[1]

    kept: Any = (*shardings[:-1], None)  # a step adds states of metrics
    jitted = jax.jit(train, donate_argnums=0, out_shardings=kept, keep_unused=True)
    lowered = jitted.trace(state, data).lower(lowering_platforms=("tpu",))
    module: Any = lowered.compiler_ir("stablehlo")
    text = module.operation.get_asm(enable_debug_info=True)
    names = [v.path for group in groups for v in group]
    names += ["batch"] * (text.count("%arg") + 1)  # the batch, and constants of the program
    return LoweredStep(
        program=text.encode(),
        partitioned=True,
        forward="HloModule none\n\nENTRY main { ROOT nothing = f32[] constant(0) }\n",
        arguments=names,
        layers={layer.name: type(layer).__name__ for layer in model.layers},
        numbered=False,
        precision=PRECISION,
    )


if __name__ == "__main__":
    main(sys.argv[1:])
