"""A plugin of pytest that puts `Trainer`'s `fit`, `evaluate` and `predict` in place of Keras's.

PEER_DEVICES is the number of virtual devices.
"""

import functools
import os
from typing import Any
from unittest import mock

import keras
import pytest
from keras.src.testing import test_case
from keras.src.trainers import trainer as keras_trainer

import tftpu

_ENGINE = tftpu.connect("none", virtual_devices=int(os.environ.get("PEER_DEVICES", "1")))
_TRAINERS: dict[int, tuple[Any, tftpu.Trainer]] = {}


def _find_trainer(model: Any) -> tftpu.Trainer:
    """Returns the trainer of a model, a new one after each `compile`."""
    if id(model) not in _TRAINERS:
        _TRAINERS[id(model)] = model, tftpu.Trainer(model, engine=_ENGINE)
    return _TRAINERS[id(model)][1]


def _forward(name: str) -> Any:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(_find_trainer(self), name)(*args, **kwargs)

    return call


_compile_model = keras_trainer.Trainer.compile


@functools.wraps(_compile_model)
def _compile(self: Any, *args: Any, **kwargs: Any) -> Any:
    _TRAINERS.pop(id(self), None)
    return _compile_model(self, *args, **kwargs)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: Any) -> Any:
    """Runs a test in the scope, in which models for several replicas are built."""
    if keras.config.backend() == "jax":  # a mesh takes any model
        return (yield)
    # Keras's `setUp` does this, which would end the scope.
    with mock.patch.object(test_case, "clear_session"):
        keras.utils.clear_session(free_memory=False)
        with _ENGINE.scope():
            return (yield)


def pytest_runtest_teardown(item: Any) -> None:
    """Forgets the models of a test."""
    _TRAINERS.clear()


for _kind in {keras_trainer.Trainer, *(cls for cls in keras.Model.__mro__ if "fit" in vars(cls))}:
    for _name in {"fit", "evaluate", "predict"} & {*vars(_kind)}:
        setattr(_kind, _name, _forward(_name))
keras_trainer.Trainer.compile = _compile
