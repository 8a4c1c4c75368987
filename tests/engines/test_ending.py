"""The interpreter ends, whatever still reads ahead."""

import os
import sys

import numpy as np
import pytest
import tensorflow as tf

import tftpu
from tests.support import warm
from tftpu.engines import ending
from tftpu.engines.tensorflow import feed


@pytest.mark.parametrize("devices", [1, 4])
def test_an_iterator_that_is_still_held_ends_its_generator(devices):
    ended = []

    def read():
        try:
            while True:
                yield np.ones(3, np.float32)
        finally:
            ended.append(True)

    spec = tf.TensorSpec((3,), tf.float32)
    data = tf.data.Dataset.from_generator(read, output_signature=spec).batch(8)
    strategy = tftpu.connect(virtual_devices=devices).strategy
    held = iter(feed.distribute(data, strategy))
    next(held)
    del data
    assert not ended
    ending._end_iterators()
    assert ended and held is not None


@pytest.mark.slow  # processes that import TensorFlow
@pytest.mark.parametrize("backend", ["tensorflow", "jax"])
@pytest.mark.parametrize(("devices", "place"), [(1, "evaluation"), (4, "training")])
def test_a_process_ends_after_a_fit_that_an_error_ended(backend, devices, place):
    done = warm.run(
        [sys.executable, "-m", "tests.support.programs.failing_fit", str(devices), place],
        env={**os.environ, "KERAS_BACKEND": backend},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 1
    assert done.stderr.rstrip().endswith("RuntimeError: the end")


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["tensorflow", "jax"])
def test_a_script_does_not_look_for_garbage_among_all_of_tensorflow_as_it_ends(backend):
    code = (
        "import atexit, gc\n"
        "before = gc.get_freeze_count()\n"
        "atexit.register(lambda: print(gc.get_freeze_count() - before, flush=True))\n"
        "import tftpu\n"
        "tftpu.connect()\n"
        "made = [[number] for number in range(1000)]"
    )
    done = warm.run(
        [sys.executable, "-c", code],
        env={**os.environ, "KERAS_BACKEND": backend},
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(done.stdout) > 1000, done.stderr
