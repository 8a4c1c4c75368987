"""Models that Keras quantized are evaluated, and trained through adapters alone."""

import keras
import numpy as np
import pytest

import tftpu
from tests.support.models.training import compiled


@pytest.mark.medium
def test_integers_without_adapters_are_not_trained():
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4, name="out")])
    model.quantize("int8")
    trainer = tftpu.Trainer(compiled(model))
    x, y = np.ones((16, 8), "float32"), np.zeros(16, int)
    with pytest.raises(tftpu.UserError, match="out' is quantized to int8, and integers cannot"):
        trainer.fit(x, y)
    np.testing.assert_allclose(trainer.predict(x), model(x), atol=1e-6)
    assert trainer.evaluate(x, y, return_dict=True)["loss"] > 0
    model.get_layer("out").enable_lora(2)
    tftpu.Trainer(compiled(model)).fit(x, y, verbose=0)
