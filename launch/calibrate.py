"""Compares preflight's predictions with published step times.

Run `python -m tftpu.launch.calibrate`. Each row compiles the published configuration with the
installed TPU compiler and prices it as `tftpu preflight` does. The first run takes about a minute
per row on two cores; later runs use the cached programs.
"""

import dataclasses
import os
from typing import TYPE_CHECKING

from tftpu.config import Optimizer

if TYPE_CHECKING:
    from tftpu.preflight import SliceReport

BATCH = 128  # images per core, in every row


@dataclasses.dataclass(frozen=True)
class Published:
    """A published run of ResNet-50 v1.5 on 224-pixel images in bfloat16.

    Attributes:
        slice: name of the slice.
        optimizer: name of the optimizer.
        step_ms: milliseconds per training step.
        source: publication.
        note: anything other than training steps that the time includes.
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


def predict(row: Published) -> "SliceReport":
    """Returns preflight's report for the configuration of a row."""
    import keras
    import tensorflow as tf

    from tftpu import models, preflight
    from tftpu.optim import optimizers
    from tftpu.tpu.slices import parse_slice

    def model_fn() -> keras.Model:
        # Groups of 32 images instead of all 128 of a core make the norms read their input, as the
        # published programs do; `models.layers.pointwise` has a faster way for whole batches.
        model = models.build("resnet50", norm_batch=32)
        model.compile(
            optimizer=optimizers.build(Optimizer(row.optimizer, weight_decay=1e-4), BATCH, 1000),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=[keras.metrics.SparseCategoricalAccuracy("accuracy")],
        )
        return model

    target = parse_slice(row.slice)
    examples = BATCH * target.chips * target.generation.counted
    batch = (
        tf.TensorSpec((examples, 224, 224, 3), tf.bfloat16),
        tf.TensorSpec((examples,), tf.int32),
    )
    return preflight.check(model_fn, batch, [row.slice]).slices[0]


def main() -> None:
    """Prints the predicted time, the published time and the error of each row."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    print(f"{'slice':8}{'predicted ms':>14}{'published ms':>14}{'error':>8}  source")
    errors = []
    for row in ROWS:
        report = predict(row)
        if report.step_ms is None:
            raise RuntimeError(f"The step of {row.slice} did not compile: {report.error}")
        predicted = report.step_ms
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
