"""Ends the iterators of data sets before the interpreter ends."""

import atexit
import functools
import gc

import tensorflow as tf
from tensorflow.python.data.ops.multi_device_iterator_ops import OwnedMultiDeviceIterator

_KINDS = (tf.data.Iterator, OwnedMultiDeviceIterator)


@functools.cache
def end_iterators_at_exit() -> None:
    """Ends, at the interpreter's exit, all iterators of data sets that are left.

    An error keeps the frames that it passed, and so an iterator, until the interpreter is gone.
    The threads of the iterator can run no Python code any more by then, such as a user's generator,
    and TensorFlow waits for them without end.
    """
    atexit.register(_end_iterators)


def _end_iterators() -> None:
    """Ends all iterators, and waits for their threads, which may still run Python code."""
    objects = gc.get_objects()
    kinds = {kind for kind in set(map(type, objects)) if issubclass(kind, _KINDS)}
    iterators = [item for item in objects if type(item) in kinds]
    del objects
    for iterator in iterators:
        vars(iterator).clear()  # also the data set, whose functions hold a resource of several
    gc.collect()
