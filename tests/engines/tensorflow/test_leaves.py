"""Variables of Keras and TensorFlow are saved and restored through leaves."""

import keras
import numpy as np
import tensorflow as tf

from tests.support.models.leaves import assign, value
from tftpu.checkpoint.store import Checkpoints
from tftpu.engines.tensorflow.leaves import build_leaves


def test_keras_variables_of_every_dtype_are_restored(tmp_path):
    checkpoints = Checkpoints(str(tmp_path))
    kinds = ("float32", "bfloat16", "float16", "int32", "bool")
    saved = [keras.Variable(np.ones(3), dtype=kind, name=kind) for kind in kinds]
    checkpoints.save(1, build_leaves({"model": saved}), {})
    target = [keras.Variable(np.zeros(3), dtype=kind, name=kind) for kind in kinds]
    checkpoints.restore(build_leaves({"model": target}))
    for variable in target:
        assert (keras.ops.convert_to_numpy(variable.value).astype("float32") == 1).all()


def test_a_leaf_has_the_path_the_shape_and_the_dtype_of_its_variable():
    layer = keras.layers.Dense(2, name="head", dtype="bfloat16")
    layer.build((None, 3))
    step = tf.Variable(5, dtype=tf.int64, name="step")
    found = build_leaves({"model": layer.weights, "step": [step]})
    described = [(leaf.name, leaf.shape, leaf.dtype) for group in found.values() for leaf in group]
    assert described == [
        ("head/kernel", (3, 2), "bfloat16"),
        ("head/bias", (2,), "bfloat16"),
        ("step", (), "int64"),
    ]
    assign(found["step"][0], np.array(7))
    assert int(value(found["step"][0])) == 7
