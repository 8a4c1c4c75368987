"""Small projects of a user's own: a config file with its model and data beside it."""

from pathlib import Path

MODEL = '''
import dataclasses
import tftpu

@dataclasses.dataclass
class Linear(tftpu.ModelConfig):
    """One dense layer that starts at zero."""

    outputs: int = 1
    scales: tuple[float, ...] = (1.0,)

    def build(self):
        import keras
        inputs = keras.Input((4,))
        dense = keras.layers.Dense(self.outputs, kernel_initializer="zeros")
        return keras.Model(inputs, dense(inputs * sum(self.scales)))
'''
DATA = '''
import dataclasses
import numpy as np
import tftpu

def sums(examples, seed=0):
    x = np.random.default_rng(seed).normal(size=(examples, 4)).astype("float32")
    return x, x.sum(axis=1, keepdims=True)

@dataclasses.dataclass
class Sums(tftpu.DataConfig):
    """Rows of four numbers, and their sums."""

    examples: int = 96
    global_batch_size: int = 16

    def training(self, context):
        import tensorflow as tf
        return tf.data.Dataset.from_tensor_slices(sums(self.examples)).batch(
            context.global_batch_size
        )

    def evaluation(self, context):
        import tensorflow as tf
        return tf.data.Dataset.from_tensor_slices(sums(40, seed=1)).batch(16)
'''
LOSSES = """
import keras

def half(y_true, y_pred):
    return keras.ops.mean(keras.ops.square(y_true - y_pred), axis=-1) / 2

class Scaled(keras.losses.Loss):
    def __init__(self, scale=1.0, **kwargs):
        super().__init__(**kwargs)
        self.scale = scale

    def call(self, y_true, y_pred):
        return self.scale * keras.ops.mean(keras.ops.square(y_true - y_pred), axis=-1)

    def get_config(self):
        return {**super().get_config(), "scale": self.scale}
"""
CONFIG = """
import tftpu
from data import Sums
from model import Linear

def get_config():
    return tftpu.Experiment(Linear(), Sums(), {rest})
"""


def write(folder: Path, rest: str, name: str = "mine", **files: str) -> Path:
    """Writes a project; returns its config file.

    Args:
        folder: of the project.
        rest: the arguments of the `Experiment` after model and data.
        name: of the config file.
        files: texts of modules, instead of the usual ones or in addition to them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    texts = {"model": MODEL, "data": DATA, "losses": LOSSES, name: CONFIG.format(rest=rest)}
    for module, text in (texts | files).items():
        (folder / f"{module}.py").write_text(text)
    return folder / f"{name}.py"
