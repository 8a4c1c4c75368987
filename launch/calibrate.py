"""Preflight's predictions beside published step times: `python -m tftpu.launch.calibrate`.

Each row compiles the published configuration with today's TPU compiler and prices it as
`tftpu preflight` does. ResNet-50 takes about a minute a row on two cores, the first time.
"""

import dataclasses
import os

from tftpu.config import Optimizer

BATCH = 128  # images on each core, in every row


@dataclasses.dataclass(frozen=True)
class Published:
    """A published run of ResNet-50 v1.5 on 224-pixel images in bfloat16.

    Attributes:
        step_ms: milliseconds a training step.
        note: what the time includes besides the steps.
    """

    slice: str
    optimizer: str
    step_ms: float
    source: str
    note: str = ""


ROWS = (
    Published("v2-8", "sgd", 228.9, "MLPerf training v0.5, Google"),
    Published("v3-8", "sgd", 137.3, "MLPerf training v0.5, Google"),
    Published("v3-32", "lars", 125.6, "MLPerf training v0.7, Google"),
    Published("v4-16", "lars", 73.6, "MLPerf training v0.7, Google", "evaluation every 4 epochs"),
)


def predict(row: Published):
    """The `tftpu.preflight.SliceReport` of a row."""
    import keras
    import tensorflow as tf

    from tftpu import models, preflight
    from tftpu.optim import optimizers
    from tftpu.tpu.slices import parse_slice

    def model_fn() -> keras.Model:
        # Batch statistics over 32 images, not the 128 of a core: the norms then read what they
        # normalise, as in the published programs; see `models.pointwise` for the shorter way.
        model = models.build("resnet50", norm_batch=32)
        model.compile(
            optimizer=optimizers.build(Optimizer(row.optimizer, weight_decay=1e-4), BATCH, 1000),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=[keras.metrics.SparseCategoricalAccuracy("accuracy")],
        )
        return model

    examples = BATCH * parse_slice(row.slice).replicas
    batch = (
        tf.TensorSpec((examples, 224, 224, 3), tf.bfloat16),
        tf.TensorSpec((examples,), tf.int32),
    )
    return preflight.check(model_fn, batch, [row.slice]).slices[0]


def main() -> None:
    """Prints predicted, published and error for each row."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    print(f"{'slice':8}{'predicted ms':>14}{'published ms':>14}{'error':>8}  source")
    errors = []
    for row in ROWS:
        predicted = predict(row).step_ms
        errors.append(predicted / row.step_ms - 1)
        note = f" ({row.note})" if row.note else ""
        print(
            f"{row.slice:8}{predicted:14.1f}{row.step_ms:14.1f}{errors[-1]:+8.1%}"
            f"  {row.source}{note}",
            flush=True,
        )
    print(f"largest error {max(map(abs, errors)):.1%}")


if __name__ == "__main__":
    main()
