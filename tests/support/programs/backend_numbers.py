"""Computes the zoo's numbers on this process's Keras backend, for `tests/models/test_backends.py`.

    KERAS_BACKEND=jax python -m tests.support.programs.backend_numbers WEIGHTS.npz NUMBERS.npz

It writes the weights where there is no such file, and reads them where there is one. The name of a
number is "CASE KIND PATH".
"""

import dataclasses
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np

from tests.support.models import zoo
from tftpu.engines import keras_internals
from tftpu.engines.objectives.compiled import CompiledLosses
from tftpu.engines.objectives.losses import compute_shard_divisor, sum_weighted
from tftpu.models.layers.stochastic_depth import ExampleSeed
from tftpu.optim.losses import SmoothedCrossentropy

Numbers = dict[str, np.ndarray]
SMOOTHING = 0.1
LARGE = 6000  # a vocabulary whose logits are computed in chunks


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, and a batch for it."""

    family: str
    fields: dict[str, Any] = dataclasses.field(default_factory=dict)
    batch: tuple[Any, np.ndarray] | None = None

    def model(self, remat: str) -> keras.Model:
        return zoo.build(self.family, remat=remat, **self.fields)

    def x_y(self) -> tuple[Any, np.ndarray]:
        return self.batch or zoo.batch(self.family)


def _images(size: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(7)
    return rng.normal(size=(8, size, size, 3)).astype("float32"), rng.integers(0, 5, 8, "int32")


def _packed() -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Returns rows of two documents and padding, from a large vocabulary."""
    tokens = np.random.default_rng(3).integers(0, LARGE, (4, 12), "int32")
    segments = np.array([[1] * 5 + [2] * 5 + [0] * 2] * 4, "int32")
    positions = np.array([[*range(5), *range(5), 0, 1]] * 4, "int32")
    features = {"tokens": tokens, "segments": segments, "positions": positions}
    return features, (3 * tokens + 1) % LARGE


CASES = {
    **{family: Case(family) for family in zoo.TINY},
    # Statistics of fewer pixels amplify rounding.
    "efficientnetv2": Case("efficientnetv2", {"image_size": 32}, _images(32)),
    # Products and statistics computed from their factors.
    "resnet_factored": Case("resnet", {"norm_batch": 64}, zoo.batch("resnet", 64)),
    "resnet_global": Case("resnet", {"norm_batch": "global"}),
    "gpt_packed": Case("gpt", {"vocabulary": LARGE}, _packed()),
    "llama_packed": Case("llama", {"vocabulary": LARGE}, _packed()),
    "llama_tied": Case("llama", {"vocabulary": LARGE, "tied": True}, _packed()),
    "vit_random": Case("vit", {"stochastic_depth": 0.5}),
}
# Of every family, and of what is random.
REMAT = (*(family for family in zoo.TINY if family not in zoo.VARIANTS), "vit_random")


def main(weights: Path, numbers: Path) -> None:
    """Writes the numbers of all cases, and the weights unless they are there."""
    given = dict(np.load(weights)) if weights.exists() else None
    used: Numbers = {}
    found = {"draws": np.stack([_numpy(ExampleSeed(seed).draw_uniform(5)) for seed in (0, 10**9)])}
    for name, case in CASES.items():
        keras.utils.set_random_seed(1)
        model = case.model("none")
        found |= {f"{name} initial {v.path}": _numpy(v) for v in model.weights}
        rng = np.random.default_rng(2)
        for v in model.weights:
            key, value = f"{name} {v.path}", _numpy(v)
            if v.dtype == "float32":  # a branch that starts at zero would pass no gradient
                value = value + rng.uniform(-0.2, 0.2, v.shape).astype("float32")
            used[key] = given[key] if given else value
        for remat in ("none", "block") if name in REMAT else ("none",):
            model = case.model(remat)
            for v in model.weights:
                v.assign(used[f"{name} {v.path}"])
            kind = name if remat == "none" else f"{name}+remat"
            found |= {f"{kind} {n}": value for n, value in _numbers(model, *case.x_y()).items()}
    np.savez(numbers, **found)
    if given is None:
        np.savez(weights, **used)


def _numbers(model: keras.Model, x: Any, y: np.ndarray) -> Numbers:
    """Returns logits in evaluation, and in training loss, gradients and states afterwards."""
    model.compile(loss=SmoothedCrossentropy(SMOOTHING))
    spec = keras.tree.map_structure(lambda a: keras.KerasTensor(a.shape, a.dtype.name), (x, y))
    keras_internals.build(model, (*spec, None))
    losses = CompiledLosses(model)
    others = model.non_trainable_variables

    def loss_and_more(values):
        mapping = list(zip(model.trainable_variables, values))
        with keras.StatelessScope(state_mapping=mapping) as scope:
            computed = losses.compute((x, y), True, None, list)
            states = [scope.get_current_value(v) for v in others]
        (elements,), (term,) = computed.elements, losses.terms
        total = sum_weighted(elements) / compute_shard_divisor(term, elements, 1)
        return total, (computed.y_pred, states)

    def evaluation_logits(values):  # as Keras's own trainers compute them, not by `__call__`
        return model.stateless_call(values, [v.value for v in others], x, training=False)[0]

    values = [_numpy(v) for v in model.trainable_variables]
    if keras.config.backend() == "jax":
        import jax

        evaluated = jax.jit(evaluation_logits)(values)
        with_gradients = jax.jit(jax.value_and_grad(loss_and_more, has_aux=True))
        (loss, (trained, states)), gradients = with_gradients(values)
        # What the backward pass reads, from JAX's own account.
        backward = jax.eval_shape(lambda v: jax.vjp(loss_and_more, v, has_aux=True)[1], values)
        kept = np.array(sum(leaf.size for leaf in jax.tree.leaves(backward)))
    else:
        import tensorflow as tf

        kept = np.array(np.nan)  # TensorFlow does not tell
        values = [tf.constant(value) for value in values]
        evaluated = evaluation_logits(values)
        with tf.GradientTape() as tape:
            tape.watch(values)
            loss, (trained, states) = loss_and_more(values)
        gradients = [tf.convert_to_tensor(g) for g in tape.gradient(loss, values)]
    return {
        "evaluation logits": _numpy(evaluated),
        "training logits": _numpy(trained),
        "training kept": kept,
        "training loss": _numpy(loss),
        **{f"gradient {v.path}": _numpy(g) for v, g in zip(model.trainable_variables, gradients)},
        **{f"state {v.path}": _numpy(s) for v, s in zip(others, states)},
    }


def _numpy(value: Any) -> np.ndarray:
    return np.asarray(keras.ops.convert_to_numpy(value))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
