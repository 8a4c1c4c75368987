"""Compiled metrics over a data set whose last batch is filled up with padding."""

import keras
import numpy as np
import pytest

import tftpu
from tftpu.engines.objectives.losses import RESERVED

# A function that makes the metric, the shape of its labels, and whether they are class ids.
METRICS = {
    "mean_io_u": (lambda: keras.metrics.MeanIoU(3, sparse_y_pred=False), (4, 5), True),
    "io_u_of_columns": (lambda: keras.metrics.MeanIoU(3, sparse_y_pred=False), (4, 5, 1), True),
    "one_hot_io_u": (lambda: keras.metrics.OneHotIoU(3, [0, 2]), (4, 5, 3), False),
    "auc": (lambda: keras.metrics.AUC(), (4, 5, 3), False),
    "precision": (lambda: keras.metrics.Precision(0.3), (4, 5, 3), False),
    "ignored_class": (
        lambda: keras.metrics.SparseCategoricalCrossentropy(ignore_class=0),
        (4, 5),
        True,
    ),
}


@pytest.mark.medium
@pytest.mark.parametrize("name", METRICS)
def test_metrics_of_images_are_keras_s_on_any_number_of_devices(name):
    make, shape, are_ids = METRICS[name]
    rng = np.random.default_rng(0)
    x = rng.normal(size=(5, 4, 5, 2)).astype("float32")
    y = rng.integers(0, 3 if are_ids else 2, (5, *shape))
    weights = [rng.normal(size=(1, 1, 2, 3)), np.zeros(3)]
    found = []
    for count in (1, 2):
        engine = tftpu.connect(virtual_devices=count)
        with engine.scope():
            layers = [keras.Input((4, 5, 2)), keras.layers.Conv2D(3, 1, activation="softmax")]
            model = keras.Sequential(layers)
            loss = "sparse_categorical_crossentropy" if are_ids else "mse"
            model.compile("sgd", loss, metrics=[make()])
        model.set_weights(weights)
        if count == 1:
            expected = model.evaluate(x, y, batch_size=4, verbose=0)
        found.append(tftpu.Trainer(model).evaluate(x, y, batch_size=4))
    np.testing.assert_allclose(found, [expected, expected], rtol=1e-5)


def _fit(tmp_path, model):
    x = np.zeros((8, 2), "float32")
    tftpu.Trainer(model, str(tmp_path)).fit(x, x[:, :1], batch_size=8, epochs=1, verbose=False)


@pytest.mark.medium
@pytest.mark.parametrize("name", RESERVED)
def test_a_metric_with_the_name_of_what_a_run_itself_logs_is_refused(name, tmp_path):
    """It had replaced the step in `metrics.jsonl`, or was lost."""
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", metrics=[keras.metrics.MeanSquaredError(name=name)])
    with pytest.raises(tftpu.UserError, match=rf"a metric named '{name}'.*give yours another name"):
        _fit(tmp_path, model)


@pytest.mark.medium
def test_the_metric_of_an_output_may_have_a_reserved_name(tmp_path):
    x = keras.Input((2,))
    model = keras.Model(x, {"a": keras.layers.Dense(1)(x), "b": keras.layers.Dense(1)(x)})
    metrics = {"a": keras.metrics.MeanSquaredError(name="step")}
    model.compile("sgd", {"a": "mse", "b": "mse"}, metrics=metrics)
    x, y = np.zeros((8, 2), "float32"), np.zeros((8, 1), "float32")
    trainer = tftpu.Trainer(model, str(tmp_path))
    trainer.fit(x, {"a": y, "b": y}, batch_size=8, epochs=1, verbose=False)
    assert '"a_step": 0.0' in (tmp_path / "metrics.jsonl").read_text()


class OwnStep(keras.Model):
    """A model whose own step returns a log with the name of a field of `metrics.jsonl`."""

    def __init__(self):
        super().__init__()
        self.layer = keras.layers.Dense(1)

    def call(self, x):
        return self.layer(x)

    def train_step(self, *args):
        found = super().train_step(*args)
        logs, *state = found if isinstance(found, tuple) else (found,)
        logs = {**logs, "step": logs["loss"]}
        return (logs, *state) if state else logs


@pytest.mark.medium
def test_a_log_of_an_own_step_with_the_name_of_a_field_of_the_file_is_refused(tmp_path):
    model = OwnStep()
    model.compile("sgd", "mse")
    with pytest.raises(tftpu.UserError, match=r"a log named 'step'.*give yours another name"):
        _fit(tmp_path, model)
