"""Checks the classes of an experiment's model and data; errors tell what to write instead."""

from typing import Any

from tftpu.config.data import DataConfig
from tftpu.config.model import ModelConfig
from tftpu.errors import UserError

_OWN_MODEL = (
    "A config describes how to build a model, because it is built on the devices of the run. Write "
    "@dataclasses.dataclass class MyModel(tftpu.ModelConfig) with `def build(self)` that returns "
    "the Keras model, and give model=MyModel()."
)
_OWN_DATA = (
    "A config describes how to read data, because they are read on the machine of the run. Write "
    "@dataclasses.dataclass class MyData(tftpu.DataConfig) with `def training(self, context)` that "
    "returns the tf.data.Dataset, and give data=MyData()."
)


def check_model_class(model: Any) -> None:
    """Raises `UserError` for anything but a dataclass derived from `ModelConfig`."""
    if isinstance(model, str):
        raise UserError(
            f"Experiment(model={model!r}) has a name as its model: write "
            f"tftpu.models.config({model!r})."
        )
    if not isinstance(model, ModelConfig):
        raise UserError(f"Experiment(model=…) is {_describe_value(model)}. {_OWN_MODEL}")
    _check_is_dataclass(model, ModelConfig)


def check_data_class(data: Any) -> None:
    """Raises `UserError` for anything but a dataclass derived from `DataConfig`."""
    if not isinstance(data, DataConfig):
        raise UserError(f"Experiment(data=…) is {_describe_value(data)}. {_OWN_DATA}")
    _check_is_dataclass(data, DataConfig)


def _describe_value(value: Any) -> str:
    if isinstance(value, type):
        return f"the class {value.__name__}, not an object: write {value.__name__}()"
    modules = {base.__module__.partition(".")[0] for base in type(value).__mro__}
    if {"keras", "tf_keras"} & modules:
        return f"a Keras object ({type(value).__name__})"
    return f"a {type(value).__name__}"


def _check_is_dataclass(value: ModelConfig | DataConfig, base: type) -> None:
    """Raises `UserError` for a class with fields but without the dataclass decorator."""
    cls = type(value)
    if "__annotations__" in vars(cls) and "__dataclass_fields__" not in vars(cls):
        raise UserError(
            f"The class {cls.__name__} is not a dataclass, so its fields "
            f"({', '.join(vars(cls)['__annotations__'])}) do not become fields of the config: "
            f"write @dataclasses.dataclass above `class {cls.__name__}(tftpu.{base.__name__})`."
        )
