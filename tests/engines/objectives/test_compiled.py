"""Compiled metrics over a data set whose last batch is filled up with padding."""

import keras
import numpy as np
import pytest

import tftpu

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
