"""Models of a large vocabulary, whose tables stay sharded, for `tests/engines/jax/placement`.

    KERAS_BACKEND=jax python -m tests.support.models.vocabulary

prints a line of JSON for each model and mesh: the tables that the step left sharded, whether the
loss took some tokens at a time instead of some classes, and the largest difference of weights,
losses and metrics from Keras's own `fit`.
"""

import json
from typing import Any
from unittest import mock

import keras
import numpy as np

import tftpu
from tftpu.engines.jax import cluster
from tftpu.engines.jax.step import objective_step
from tftpu.optim import chunked as chunks

CLASSES, WIDTH, BATCH = 6160, 16, 16
CASES = [  # mesh, microbatches, and tokens of a text
    ("fsdp:8", 1, 4),
    ("data:2,fsdp:4", 1, 4),
    ("data:2,fsdp:4", 2, 4),
    ("fsdp:4,tensor:2", 1, 4),  # `tensor` shards the rows, and is not left to this
    ("fsdp:8", 1, 60),  # more tokens than a device has classes
    ("fsdp:8", 2, 124),
]


@keras.saving.register_keras_serializable("tests")
class LanguageModel(keras.Model):
    """Logits of each token from its embedding alone.

    Args:
        tied: whether the logits are computed with the table of the embedding.
    """

    def __init__(self, tied: bool, **kwargs: Any):
        super().__init__(**kwargs)
        self.tied = tied
        self.embedding = keras.layers.Embedding(CLASSES, WIDTH, name="embedding")
        self.dense = keras.layers.Dense(WIDTH, "tanh", name="dense")
        self.head = None if tied else keras.layers.Dense(CLASSES, use_bias=False, name="head")

    def build(self, input_shape: Any) -> None:
        self.embedding.build(input_shape)
        for layer in (self.dense, self.head):
            if layer is not None:
                layer.build((None, None, WIDTH))

    def call(self, x: Any, training: bool = False) -> Any:
        hidden = self.dense(self.embedding(x))
        if self.head is not None:
            return self.head(hidden)
        return keras.ops.matmul(hidden, keras.ops.transpose(self.embedding.embeddings))


def build(tied: bool) -> keras.Model:
    """Returns the compiled and built model, always with the same weights."""
    keras.utils.set_random_seed(1)
    model = LanguageModel(tied, name="model")
    model.build((None, 4))
    model.compile(
        keras.optimizers.SGD(5.0, momentum=0.9),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        weighted_metrics=[keras.metrics.SparseCategoricalAccuracy()],
    )
    return model


def fit(trained: Any, time: int) -> list[np.ndarray]:
    """Returns the history of a short `fit`."""
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, CLASSES, (2, 2 * BATCH, time))
    options = {"batch_size": BATCH, "epochs": 3, "shuffle": False, "verbose": 0}
    weight = rng.random(x.shape).astype("float32")
    history = trained.fit(x, y, sample_weight=weight, **options).history
    return [np.asarray(values) for values in history.values()]


def train(tied: bool, mesh: str, microbatches: int, time: int) -> tuple[list[np.ndarray], Any]:
    """Returns the history and weights of our `fit`, and facts of its step."""
    with cluster.connect("none", 8, mesh).scope():
        model = build(tied)
    tables: list[str] = []
    real = objective_step.find_tables

    def find(*arguments: Any) -> list[keras.Variable]:
        found = real(*arguments)
        tables.extend(variable.path for variable in found)
        return found

    summed = mock.patch.object(chunks, "summed_crossentropy", wraps=chunks.summed_crossentropy)
    with mock.patch.object(objective_step, "find_tables", find), summed as calls:
        options = tftpu.TrainConfig(gradient_accumulation_steps=microbatches)
        history = fit(tftpu.Trainer(model, options=options), time)
    return [*history, *model.get_weights()], {"tables": tables, "by_token": calls.called}


def main() -> None:
    for tied in (True, False):
        for mesh, microbatches, time in CASES:
            with cluster.connect("none", 8, None).scope():  # the same initial weights
                model = build(tied)
            expected = [*fit(model, time), *model.get_weights()]
            with mock.patch.object(chunks, "CHUNK", 2000):
                found, facts = train(tied, mesh, microbatches, time)
            difference = max(float(np.abs(a - b).max()) for a, b in zip(found, expected))
            case = {"tied": tied, "mesh": mesh, "microbatches": microbatches, "time": time}
            print(json.dumps({**case, **facts, "difference": difference}))


if __name__ == "__main__":
    main()
