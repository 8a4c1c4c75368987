"""Models whose blocks run as a loop, for `tests/blocks/test_scanned.py`.

    KERAS_BACKEND=jax python -m tests.support.programs.jax_scan NAME ...

For each named model a line of JSON: how far outputs and gradients are from those of the same model
without a loop, relative to the largest number, and the length of its program relative to the other.
Then a line with the numbers that a model keeps for its backward pass, by `scan` and `remat`, and
one with the whole weights among them, of a model that is cut over four devices; one with the calls
of attention's kernel by `remat`, in a step that is traced for a TPU; and one with the outputs of
two calls in training of a model with dropout, by `scan`.
"""

import json
import sys
from typing import Any

import jax
import keras
import numpy as np
import tensorflow as tf
from jax.sharding import AbstractMesh

import tftpu
from tftpu import models
from tftpu.config.mesh import AXES
from tftpu.engines.jax.tracing import tracing_for

BATCH, TIME = 4, 16
TOKENS = {"vocabulary": 64, "context": TIME, "width": 32, "heads": 2, "layers": 8}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt": ("gpt2_small", {**TOKENS, "dropout": 0.2}),
    "gpt recomputed": ("gpt2_small", {**TOKENS, "dropout": 0.2, "remat": "block"}),
    "llama": ("llama_8b", {**TOKENS, "kv_heads": 1, "hidden": 48, "remat": "block"}),
    "gpt with its products": ("gpt2_small", {**TOKENS, "dropout": 0.2, "remat": "products"}),
    "gpt with inputs on the host": ("gpt2_small", {**TOKENS, "dropout": 0.2, "remat": "offload"}),
    "bert": ("bert_base", {**TOKENS, "dropout": 0.1}),
    "vit": ("vit_b16", {"width": 32, "heads": 2, "layers": 8, "image_size": 32, "num_classes": 5}),
}


def features(name: str) -> Any:
    """Returns a batch: rows that are packed with two documents, or images."""
    rng = np.random.default_rng(0)
    if name == "vit":
        return rng.normal(size=(BATCH, 32, 32, 3)).astype("float32")
    tokens = rng.integers(0, 64, (BATCH, TIME)).astype("int32")
    segments = np.repeat([[0] * 6 + [1] * (TIME - 6)], BATCH, axis=0).astype("int32")
    return {"tokens": tokens, "segments": segments}


def results(name: str, scan: str, training: bool) -> tuple[list[np.ndarray], int, bool]:
    """Returns output and gradients, the lines of their program, and whether it uses the host."""
    size, fields = MODELS[name]
    keras.utils.set_random_seed(1)
    model = models.build(size, scan=scan, **fields)
    x, variables = features(name), model.trainable_variables

    def loss(values: list[Any]) -> Any:
        with keras.StatelessScope(state_mapping=list(zip(variables, values))):
            found = model(x, training=training)
        rng = np.random.default_rng(2)
        return (found * rng.normal(size=found.shape)).sum(), found

    values = [v.value for v in variables]
    traced = jax.jit(jax.value_and_grad(loss, has_aux=True)).trace(values)
    lowered, on_host = traced.lower(), "MemorySpace.Host" in str(traced.jaxpr)
    (_, found), grads = lowered.compile()(values)
    return [np.asarray(one) for one in (found, *grads)], lowered.as_text().count("\n"), on_host


def kept(scan: str, remat: str) -> int:
    """Returns the number of values that a model keeps for its backward pass, besides weights."""
    keras.utils.set_random_seed(1)
    model = models.build("gpt2_small", scan=scan, remat=remat, **TOKENS)
    x, variables = features("gpt"), model.trainable_variables

    def outputs(values: list[Any]) -> Any:
        with keras.StatelessScope(state_mapping=list(zip(variables, values))):
            return model(x, training=True)

    _, backward = jax.vjp(outputs, [v.value for v in variables])
    found = [leaf for leaf in jax.tree.leaves(backward) if BATCH in leaf.shape[:2]]
    return sum(leaf.size for leaf in found)


def whole_weights_kept(remat: str) -> int:
    """Returns how many weights a block of a loop gathers and keeps for the backward pass."""
    engine: Any = tftpu.connect("none", 4, mesh="fsdp:4")
    fields = {**TOKENS, "width": 128}
    with engine.scope():
        model = models.build("gpt2_small", scan="block", remat=remat, **fields)
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    tokens = tf.TensorSpec((BATCH, TIME), "int32")
    state = engine.prepare(model, tftpu.TrainConfig(), (tokens, tokens)).variables
    variables, x = model.trainable_variables, features("gpt")

    def outputs(values: list[Any]) -> Any:
        with keras.StatelessScope(state_mapping=list(zip(variables, values))):
            return model(x, training=True)

    with tracing_for("cpu", engine.mesh), state.gathering.reading():
        traced = jax.make_jaxpr(lambda values: jax.vjp(outputs, values)[1])(
            [v.value for v in variables]
        )
    [loop] = [eqn for eqn in traced.jaxpr.eqns if eqn.primitive.name == "scan"]
    body = loop.params["jaxpr"].jaxpr
    makers = {var: eqn for eqn in body.eqns for var in eqn.outvars}
    kept = [_maker(var, makers) for var in body.outvars[loop.params["num_carry"] :]]
    assert any(eqn is None for eqn in kept)  # the parts, from which they are gathered again
    return sum(
        eqn is not None and eqn.primitive.name in ("name", "sharding_constraint") for eqn in kept
    )


def count_kernels(remat: str) -> int:
    """Returns how often the step of a block, traced for a TPU, calls a kernel of attention."""
    fields = {**TOKENS, "width": 128, "heads": 2, "layers": 1, "context": 128}
    with tracing_for("tpu", AbstractMesh((1,) * len(AXES), AXES)):
        model = models.build("gpt2_small", attention="flash", remat=remat, **fields)
        variables = model.trainable_variables

        def compute_loss(values: list[Any]) -> Any:
            with keras.StatelessScope(state_mapping=list(zip(variables, values))):
                return model(np.zeros((1, 128), "int32"), training=True).sum()

        traced = jax.make_jaxpr(jax.grad(compute_loss))([v.value for v in variables]).jaxpr
    return _count_used_kernels(traced)


def _count_used_kernels(jaxpr: Any) -> int:
    """Returns the calls of kernels whose results are used: XLA drops the others."""
    read = {id(v) for v in jaxpr.outvars} | {id(v) for eqn in jaxpr.eqns for v in eqn.invars}
    kernels = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "pallas_call"]
    count = sum(any(id(v) in read for v in eqn.outvars) for eqn in kernels)
    called = [v for eqn in jaxpr.eqns if eqn not in kernels for v in eqn.params.values()]
    inner = [getattr(value, "jaxpr", value) for value in called]
    return count + sum(_count_used_kernels(one) for one in inner if hasattr(one, "eqns"))


def _maker(var: Any, makers: dict[Any, Any]) -> Any:
    """Returns the operation whose result is kept, in whatever form; None: it was given."""
    forms = ("reduce_precision", "reshape", "squeeze", "slice", "transpose", "convert_element_type")
    found = makers.get(var)
    while found is not None and found.primitive.name in forms:
        found = makers.get(found.invars[0])
    return found


def draw_dropout(scan: str) -> list[Any]:
    """Returns the outputs of two calls in training, outside of any engine."""
    keras.utils.set_random_seed(0)
    model = models.build("gpt2_small", scan=scan, **TOKENS, dropout=0.5)
    return [np.asarray(model(features("gpt"), training=True)).tolist() for _ in range(2)]


def main() -> None:
    """Prints the comparisons."""
    # Before anything else uses JAX: it splits the CPU.
    whole = {remat: whole_weights_kept(remat) for remat in ("none", "block")}
    for name in sys.argv[1:]:
        # Only dropout differs without training.
        for training in (True, False) if name == "gpt" else (True,):
            plain, length, on_host = results(name, "none", training)
            looped, shorter, too = results(name, "block", training)
            differences = [
                np.abs(a - b).max() / max(np.abs(b).max(), 1e-3) for a, b in zip(looped, plain)
            ]
            line = {"difference": float(max(differences)), "length": shorter / length}
            line["host"] = [on_host, too]
            print(json.dumps({"model": name, "training": training, **line}))
    modes = [(scan, remat) for scan in ("none", "block") for remat in ("none", "products", "block")]
    print(json.dumps({" ".join(mode): kept(*mode) for mode in modes}))
    print(json.dumps(whole))
    print(json.dumps({remat: count_kernels(remat) for remat in ("none", "attention", "block")}))
    print(json.dumps({scan: draw_dropout(scan) for scan in ("none", "block")}))


if __name__ == "__main__":
    main()
