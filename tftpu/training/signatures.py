"""Arguments of Keras's methods that those of a trainer lack."""

import functools
import inspect
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from tftpu.errors import UserError

P = ParamSpec("P")
R = TypeVar("R")

_OF_PY_DATASET = "pass it to the keras.utils.PyDataset, PyDataset(...)"
# Arguments of Keras's methods that these lack, and what to write instead.
_INSTEAD = {
    "validation_freq": "an evaluation follows every epoch; with steps=, eval_every= says how many "
    "steps lie between two",
    "nb_epoch": "write epochs=",
    "workers": _OF_PY_DATASET,
    "use_multiprocessing": _OF_PY_DATASET,
    "max_queue_size": _OF_PY_DATASET,
}


def keras_arguments(method: Callable[P, R]) -> Callable[P, R]:
    """Decorates a method of Keras's name: an argument of Keras that it lacks is a `UserError`."""

    @functools.wraps(method)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        known = inspect.signature(method).parameters
        for name in kwargs:
            if name in _INSTEAD and name not in known:
                raise UserError(f"{method.__name__} has no {name}: {_INSTEAD[name]}.")
        return method(*args, **kwargs)

    return checked
