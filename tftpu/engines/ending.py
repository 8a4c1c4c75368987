"""Ends data set iterators at exit, so that the interpreter neither hangs nor ends slowly."""

import atexit
import contextlib
import functools
import gc

import tensorflow as tf
from tensorflow.python.data.ops.multi_device_iterator_ops import OwnedMultiDeviceIterator

_KINDS = (tf.data.Iterator, OwnedMultiDeviceIterator)


@functools.cache
def end_iterators_at_exit() -> None:
    """Registers a function that ends all open data set iterators at exit.

    It also makes the interpreter collect garbage only once at its exit, rather than several times:
    with TensorFlow's objects, that takes three to five seconds.

    After an error, the frames of its traceback may keep an iterator alive until the interpreter has
    shut down. By then the iterator's threads cannot run Python code, such as a user's generator,
    and TensorFlow would wait for them forever.
    """
    atexit.register(_end)


def _end() -> None:
    _end_iterators()
    gc.freeze()


def _end_iterators() -> None:
    """Ends all iterators and waits for their threads, which can still run Python code."""
    with contextlib.suppress(KeyboardInterrupt):  # the process ends anyway
        objects = gc.get_objects()
        kinds = {kind for kind in set(map(type, objects)) if issubclass(kind, _KINDS)}
        iterators = [item for item in objects if type(item) in kinds]
        del objects
        for iterator in iterators:
            # Clears the data set as well, because its functions hold a resource that iterators
            # share.
            vars(iterator).clear()
        gc.collect()
