"""Models, batches and options of a train step, the same on every engine."""

import dataclasses
import itertools
import math
from typing import Any

import keras
import numpy as np

from tests.support.models import zoo
from tests.support.models.strategies import random_batches
from tests.support.steps import reference
from tftpu.optim.optimizers import LARS, NO_DECAY

STEPS = 5
# Fields that make every family large enough to be cut, and free of ties between equal inputs.
FIELDS: dict[str, dict[str, Any]] = {
    "resnet": {"width": 32, "norm_batch": 2},
    "convnext": {"widths": (32, 64)},
    "efficientnetv2": {"widths": (16, 16, 32), "norm_batch": 2},
    "vit": {"width": 64},
    "bert": {"width": 64, "vocabulary": 64},
    "gpt": {"width": 64, "vocabulary": 128},
    "llama": {"width": 64, "hidden": 128, "vocabulary": 128},
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A model on a mesh, and the options of its step."""

    model: str = "mlp"
    mesh: str = "data:8"
    optimizer: str = "sgd"
    gradient_accumulation_steps: int = 1
    global_clipnorm: float | None = None
    weighted: bool = False
    ema_momentum: float | None = None
    remat: str = "none"
    scan: str = "none"


def model_of(case: Case) -> keras.Model:
    """Returns the compiled model of a case, with the same weights at every call."""
    keras.utils.set_random_seed(3)
    if case.model == "mlp":
        model = _mlp()
    else:
        scan = {"scan": case.scan} if case.scan != "none" else {}
        model = zoo.build(case.model, remat=case.remat, **FIELDS[case.model], **scan)
    loss = keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, reduction="mean_with_sample_weight"
    )
    model.compile(optimizer_named(case.optimizer), loss, weighted_metrics=["accuracy"])
    return model


def devices_of(case: Case) -> int:
    """Returns the number of devices that a case's mesh has."""
    sizes = [int(part.partition(":")[2]) for part in case.mesh.split(",")]
    return 8 if -1 in sizes else math.prod(sizes)


def batches_of(case: Case) -> list[tuple]:
    """Returns the batches of a case, (x, y, weight or None)."""
    if case.model == "mlp":
        return random_batches(STEPS, 64, case.weighted)
    x, y = zoo.batch(case.model, 16 * STEPS)
    rng = np.random.default_rng(11)
    w = rng.uniform(0.1, 3.0, y.shape).astype("float32") if case.weighted else None
    parts = [slice(16 * step, 16 * step + 16) for step in range(STEPS)]
    return [(x[part], y[part], None if w is None else w[part]) for part in parts]


def optimizer_named(name: str) -> keras.optimizers.Optimizer:
    """Returns an optimizer of `reference.Reference`, by Keras or tftpu."""
    rate, decay = reference.LEARNING_RATE, reference.WEIGHT_DECAY
    optimizer = {
        "sgd": lambda: keras.optimizers.SGD(rate, momentum=0.9),
        "adamw": lambda: keras.optimizers.AdamW(rate, weight_decay=decay),
        "lamb": lambda: keras.optimizers.Lamb(rate),
        "lars": lambda: LARS(rate, trust=0.02, trust_weight_decay=decay),
    }[name]()
    optimizer.exclude_from_weight_decay(var_names=[NO_DECAY])
    return optimizer


def _mlp() -> keras.Model:
    """Returns two dense layers whose kernels are large enough to be cut."""
    bias = keras.initializers.RandomNormal(stddev=0.1, seed=5)
    return keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(1024, activation="tanh", bias_initializer=bias, name="first"),
            keras.layers.Dense(4, bias_initializer=bias, dtype="float32", name="last"),
        ],
        name="mlp",
    )


OPTIONS = {
    "replicas": (1, 2, 4, 8),
    "gradient_accumulation_steps": (1, 4),
    "optimizer": ("sgd", "adamw", "lamb", "lars"),
    "global_clipnorm": (None, 0.1),  # the gradient's norm is about 0.5, so this clips it
    "weighted": (False, True),
    "ema_momentum": (None, reference.EMA),
}


PRODUCT = list(itertools.product(*OPTIONS.values()))


def covering_set() -> list[tuple]:
    """Returns a small set of combinations that covers every pair of options, chosen greedily."""

    def pairs(case):
        return set(itertools.combinations(enumerate(case), 2))

    missing = set().union(*map(pairs, PRODUCT))
    chosen = []
    while missing:
        best = max(PRODUCT, key=lambda case: len(pairs(case) & missing))
        chosen.append(best)
        missing -= pairs(best)
    return chosen
