"""Eight virtual CPU devices, before anything uses TensorFlow; a cache folder for the tests."""

import os
import tempfile

# Python's own dropped caches stay between runs: preparing a data set takes seconds.
os.environ.setdefault("TFTPU_CACHE", os.path.join(tempfile.gettempdir(), "tftpu-test-cache"))
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ["KERAS_BACKEND"] = "tensorflow"
os.environ["CUDA_VISIBLE_DEVICES"] = "-1"

import keras
import pytest
import tensorflow as tf

tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 8
)


@pytest.fixture(autouse=True)
def _float32():
    """Resets the dtype policy to float32 after every test."""
    yield
    keras.config.set_dtype_policy("float32")


@pytest.fixture(autouse=True)
def _nothing_connected():
    """Forgets the engine that a test connected to: the next one may build models outside it."""
    yield
    from tftpu.engines.tensorflow import cluster

    cluster.forget_connected()
