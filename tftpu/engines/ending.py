"""Ends the iterators of data sets before the interpreter ends, and then the interpreter soon."""

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

    The interpreter then looks for garbage once, not after each step of its end: among all objects
    of TensorFlow that takes three to five seconds.

    An error keeps its frames alive, and with them an iterator, until the interpreter is gone. By
    then the iterator's threads cannot run Python code, such as a user's generator, and TensorFlow
    would wait for them forever.
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
