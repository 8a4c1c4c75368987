"""Models of others whose blocks are recomputed, or run as a loop, for `tests/models/blocks`.

    KERAS_BACKEND=jax python -m tests.support.models.blocks chain gemma

prints a line of JSON for each model, `train.remat` and `train.scan`: the largest difference of
weights and losses after a few steps from those of the plain model, and the length of the program of
a gradient, relative to the plain one.
"""

import functools
import itertools
import json
import sys
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

import tftpu
from tftpu.blocks import REMATS
from tftpu.blocks.running import running_blocks

WIDTH, TIME = 8, 6


@keras.saving.register_keras_serializable("tests")
class Block(keras.layers.Layer):
    """A block with all that a step may have to carry along.

    It has weights, two draws of one dropout, batch statistics, a loss of its own, and a second
    argument.

    Args:
        scale: what differs in every second block.
    """

    def __init__(self, scale: float, **kwargs: Any):
        super().__init__(**kwargs)
        self.scale = scale
        self.dense = keras.layers.Dense(WIDTH, "tanh")
        self.dropout = keras.layers.Dropout(0.3)
        self.norm = keras.layers.BatchNormalization()

    def build(self, x_shape: Any, shift_shape: Any = None) -> None:
        for layer in (self.dense, self.norm):
            layer.build(x_shape)

    def call(self, x: Any, shift: Any = None, training: bool | None = None) -> Any:
        y = self.dropout(self.norm(self.dense(x), training=training), training=training)
        self.add_loss(0.01 * keras.ops.mean(keras.ops.square(y)))
        return self.dropout(x, training=training) + self.scale * y + shift


@keras.saving.register_keras_serializable("tests")
class Encoder(keras.layers.Layer):
    """Blocks that a layer calls itself, without an argument for `training`."""

    def __init__(self, **kwargs: Any):
        super().__init__(**kwargs)
        self.blocks = [Block(1.0) for _ in range(3)]

    def build(self, x_shape: Any, shift_shape: Any = None) -> None:
        for block in self.blocks:
            block.build(x_shape)

    def call(self, x: Any, shift: Any = None) -> Any:
        for block in self.blocks:
            x = block(x, shift=shift)
        return x


def build_chain() -> keras.Model:
    """Returns a functional model of 9 blocks, of which every second one is another."""
    x = inputs = keras.Input((TIME, WIDTH))
    shift = keras.layers.Dense(WIDTH)(inputs)
    for index in range(9):
        x = Block(0.2 + 0.1 * (index % 2))(x, shift=shift)
    return keras.Model(inputs, keras.layers.Dense(3)(x[:, 0]))


def build_nested() -> keras.Model:
    """Returns a functional model whose blocks are inside one layer."""
    inputs = keras.Input((TIME, WIDTH))
    x = Encoder()(inputs, shift=keras.layers.Dense(WIDTH)(inputs))
    return keras.Model(inputs, keras.layers.Dense(3)(x[:, 0]))


def build_branching() -> keras.Model:
    """Returns a functional model without equal blocks, of layers and of a model of layers.

    It has one dropout for all layers, batch statistics, and losses of layers.
    """
    x = inputs = keras.Input((TIME, WIDTH))
    dropout = keras.layers.Dropout(0.3)
    for width in (8, 16, 24):
        y = keras.layers.BatchNormalization()(keras.layers.Dense(width, "tanh")(x))
        y = keras.layers.ActivityRegularization(l2=0.01)(dropout(y))
        x = keras.layers.Add()([keras.layers.Dense(width)(x), y])
    inner = [dropout, keras.layers.Dense(WIDTH, "tanh"), keras.layers.BatchNormalization()]
    x = keras.Sequential([keras.Input((TIME, 24)), *inner], name="inner")(x)
    return keras.Model(inputs, keras.layers.Dense(3)(x[:, 0]))


def build_gemma() -> keras.Model:
    """Returns a Gemma 3 of KerasHub, with windows in five of six layers, behind an embedding."""
    import keras_hub

    backbone = keras_hub.models.Gemma3Backbone(
        vocabulary_size=16,
        image_size=16,
        num_layers=13,
        num_query_heads=2,
        num_key_value_heads=1,
        hidden_dim=WIDTH,
        intermediate_dim=16,
        head_dim=4,
        use_sliding_window_attention=True,
        sliding_window_size=3,
        vision_encoder=None,
    )
    inputs = keras.Input((TIME, WIDTH))
    tokens = keras.ops.cast(keras.ops.argmax(keras.ops.concatenate([inputs] * 2, -1), -1), "int32")
    x = backbone({"token_ids": tokens, "padding_mask": keras.ops.ones_like(tokens)})
    return keras.Model(inputs, keras.layers.Dense(3)(x[:, 0]))


MODELS: dict[str, Callable[[], keras.Model]] = {
    "chain": build_chain,
    "nested": build_nested,
    "branching": build_branching,
    "gemma": build_gemma,
}


def draw_batches() -> tuple[np.ndarray, np.ndarray]:
    """Returns 32 examples with labels."""
    rng = np.random.default_rng(0)
    return rng.normal(size=(32, TIME, WIDTH)).astype("float32"), rng.integers(0, 3, 32)


@functools.cache
def train(name: str, remat: str, scan: str) -> list[np.ndarray]:
    """Returns the losses and the weights after four steps."""
    keras.utils.set_random_seed(1)
    with tftpu.connect().scope():
        model = MODELS[name]()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        # At ten times this rate, other last bits of Gemma's initial weights change them by 2e-4.
        model.compile(keras.optimizers.SGD(0.005), loss)
    options = tftpu.TrainConfig(remat=remat, scan=scan)
    trainer = tftpu.Trainer(model, options=options)
    history = trainer.fit(*draw_batches(), batch_size=16, epochs=2, shuffle=False, verbose=0)
    floats = [w for w in model.get_weights() if w.dtype.kind == "f"]
    return [np.asarray(history.history["loss"]), *floats]


def compare(name: str, remat: str, scan: str) -> float:
    """Returns the largest difference from the plain model's losses and weights."""
    plain, found = train(name, "none", "none"), train(name, remat, scan)
    return max(float(np.abs(one - other).max()) for one, other in zip(plain, found))


def describe(name: str, remat: str, scan: str) -> tuple[int, dict[str, Any]]:
    """Returns the lines of a gradient's program on JAX, and whether it recomputes and offloads."""
    import jax

    keras.utils.set_random_seed(1)
    model = MODELS[name]()
    x, _ = draw_batches()

    def compute(values: list[Any]) -> Any:
        mapping = list(zip(model.trainable_variables, values))
        with keras.StatelessScope(state_mapping=mapping), running_blocks(model, remat, scan):
            return keras.ops.sum(model(x, training=True))

    values = [v.value for v in model.trainable_variables]
    jaxpr = str(jax.make_jaxpr(jax.grad(compute))(values))
    return jaxpr.count("\n"), {
        "recomputed": jaxpr.count("prevent_cse"),
        "offloads": "MemorySpace.Host" in jaxpr,
    }


def main() -> None:
    for name in sys.argv[1:]:
        plain, _ = describe(name, "none", "none")
        for remat, scan in itertools.product(REMATS, ("none", "block")):
            if (remat, scan) == ("none", "none") or (
                name in ("nested", "branching") and scan == "block"
            ):
                continue
            lines, found = describe(name, remat, scan)
            case = {"name": name, "remat": remat, "scan": scan}
            measured = {"length": lines / plain, **found}
            print(json.dumps({**case, "difference": compare(name, remat, scan), **measured}))


if __name__ == "__main__":
    main()
