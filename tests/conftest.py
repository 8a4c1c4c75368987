"""Eight virtual CPU devices, before anything uses TensorFlow; a cache folder for the tests."""

import gc
import os
import tempfile

# Python's own dropped caches stay between runs: preparing a data set takes seconds.
os.environ.setdefault("TFTPU_CACHE", os.path.join(tempfile.gettempdir(), "tftpu-test-cache"))
# Nothing of what tests name as their configs is trusted by the developer's own commands.
os.environ["XDG_STATE_HOME"] = os.path.join(os.environ["TFTPU_CACHE"], "state")
# What one process of the tests compiles, no other compiles again.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", os.path.join(os.environ["TFTPU_CACHE"], "jax"))
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ["KERAS_BACKEND"] = "tensorflow"
os.environ["CUDA_VISIBLE_DEVICES"] = "-1"

import pytest

from tests.support.programs.jax_process import QUICK  # whose server of processes keeps these
from tests.support.repository import durations
from tftpu.quick_import import uncollected

os.environ.setdefault("XLA_FLAGS", QUICK)

with uncollected():
    import keras
    import tensorflow as tf

tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 8
)

TIERS = ("exhaustive", "parity", "slow")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sorts the files, the longest first by recorded seconds; their tests stay in order."""
    seconds, folder = durations.read(), os.path.dirname(os.path.dirname(__file__))
    files = [os.path.relpath(item.path, folder) for item in items]
    tiers: dict[str, set[str]] = {file: set() for file in files}
    for item, file in zip(items, files):
        marked = (tier for tier in TIERS if item.get_closest_marker(tier))
        tiers[file].add(next(marked, "fast"))
    total = {file: sum(seconds.get(f"{t} {file}", 0) for t in tiers[file]) for file in tiers}
    order = {file: (-total[file], file) for file in tiers}
    items.sort(key=lambda item: order[os.path.relpath(item.path, folder)])


@pytest.fixture(autouse=True, scope="module")
def _frozen():
    """Takes what earlier files left behind out of the search for garbage.

    Keras collects garbage whenever a layer is quantized, among all objects: in a process that has
    run hundreds of tests that costs more than what is tested.
    """
    gc.collect()
    gc.freeze()


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


@pytest.fixture(autouse=True)
def _keras_3():
    """Removes the variable that tensorflow_transform sets when a test imports it."""
    yield
    os.environ.pop("TF_USE_LEGACY_KERAS", None)


@pytest.fixture(scope="module")
def slice_of_eight():
    """Returns an engine of a simulated slice of eight cores, on which steps are traced."""
    import tftpu

    return tftpu.simulated_slice("v3-8")
