"""The zoo: `names()` lists it, `build(name)` makes a Keras model.

This file and `sizes.py` import no Keras, so that configs load in milliseconds; `build` does.
"""

import copy
import dataclasses
import importlib
from typing import TYPE_CHECKING

from tftpu.config import Model
from tftpu.errors import UserError, did_you_mean
from tftpu.models import sizes

if TYPE_CHECKING:
    import keras

    from tftpu.models.weights.loading import Report

_BUILDERS = {
    sizes.ResNet: "resnet",
    sizes.ConvNeXt: "convnext",
    sizes.EfficientNetV2: "efficientnetv2",
    sizes.ViT: "vit",
    sizes.BERT: "bert",
    sizes.GPT: "gpt",
    sizes.Llama: "llama",
}


def names() -> list[str]:
    """The names of the published sizes, sorted."""
    return sorted(sizes.SIZES)


def config(name: str, **fields) -> Model:
    """The hyper-parameters of a published size, with `fields` in place of its own.

    Raises:
        UserError: an unknown name or field; it says what was likely meant.
    """
    if name not in sizes.SIZES:
        raise UserError(f"There is no model {name!r}.{did_you_mean(name, sizes.SIZES)}")
    model = copy.copy(sizes.SIZES[name])
    allowed = {field.name for field in dataclasses.fields(model)}
    for field, value in fields.items():
        if field not in allowed:
            raise UserError(f"Model {name!r} has no field {field!r}.{did_you_mean(field, allowed)}")
        setattr(model, field, value)
    return model


def build(model: str | Model, **fields) -> "keras.Model":
    """A Keras model, not compiled.

    Args:
        model: a name of the zoo, or its hyper-parameters.
        fields: with a name, hyper-parameters to change.

    Raises:
        UserError: an unknown name or field.
    """
    if isinstance(model, str):
        model = config(model, **fields)
    for family, module in _BUILDERS.items():
        if isinstance(model, family):
            built = importlib.import_module(f"tftpu.models.families.{module}").build(model)
            built.hyperparameters = model  # `load_weights` asks them where each weight belongs
            return built
    raise UserError(f"{type(model).__name__} is no family of the zoo: build the model yourself.")


def load_weights(model: "keras.Model", path: str, *, replace_head: bool = False) -> "Report":
    """`tftpu.models.weights.load_weights`: weights of others into a model of the zoo."""
    from tftpu.models.weights import loading

    return loading.load_weights(model, path, replace_head=replace_head)


def save_weights(model: "keras.Model", path: str, *, format: str = "safetensors") -> None:
    """`tftpu.models.weights.save_weights`: the weights of a model, as Transformers has them."""
    from tftpu.models.weights import loading

    loading.save_weights(model, path, format=format)


def freeze(model: "keras.Model", patterns: str) -> list[str]:
    """`tftpu.models.weights.freeze`: keeps the weights that the globs name as they are."""
    from tftpu.models.weights import loading

    return loading.freeze(model, patterns)
