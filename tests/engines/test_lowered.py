"""Lowered steps: the layers of their ops, and the memory that lowering takes."""

import sys

import pytest

from tests.support import warm
from tftpu.engines.lowered import find_layer_path


def test_an_op_belongs_to_the_layers_in_its_name():
    layers = ["resnet", "block1", "qkv", "dense_1"]
    assert find_layer_path("gradient_tape/model_1/block1_1/qkv_1/MatMul", layers) == "block1/qkv"
    assert find_layer_path("model_1/dense_1_2/MatMul", layers) == "dense_1"
    assert find_layer_path("sub/add", layers) == ""


# Its optimizer's state is twice as large as its weights.
HELD = """
import keras, tensorflow as tf
from pathlib import Path
from tftpu.config import TrainConfig
from tests.support.steps.lowering import lower

def model():
    dense = [keras.layers.Dense(2048) for _ in range(8)]
    built = keras.Sequential([keras.Input((2048,)), *dense])
    built.compile("adam", "mse")
    return built

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

batch = tf.TensorSpec((8, 2048)), tf.TensorSpec((8, 2048))
keras.Sequential([keras.Input((8,)), keras.layers.Dense(8)]).compile("adam", "mse")
before = resident()
step = lower(model, batch, 1, "float32", TrainConfig(ema_momentum=0.99))
print((resident() - before) / (8 * 2048 * 2049))
"""


@pytest.mark.slow
def test_a_model_is_lowered_without_its_values():
    done = warm.run(
        [sys.executable, "-c", HELD], capture_output=True, text=True, check=True, timeout=200
    )
    # Weights, two moments and averages would take 16 bytes a parameter, and gradients 4.
    assert float(done.stdout) < 5, done.stdout
