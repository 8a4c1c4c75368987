"""The model zoo: `names()` lists its models, `build(name)` returns a Keras model.

Importing this file, `sizes.py` or `checks.py` does not import Keras, so configs load in
milliseconds.
"""

import copy
import dataclasses
import importlib
import pkgutil
import zipfile
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tftpu.config import ModelConfig, PerReplicaBatch
from tftpu.config.validation import check_types
from tftpu.errors import UserError, did_you_mean
from tftpu.models import sizes

if TYPE_CHECKING:
    import keras
    import numpy as np

    from tftpu.models.weights.loading import LoadReport


def names() -> list[str]:
    """Returns the names of the published sizes, sorted."""
    return sorted(sizes.SIZES)


def parameters(name: str) -> int:
    """Returns the number of trainable parameters of a published size, without building it.

    Raises:
        UserError: the name is unknown.
    """
    config(name)
    return sizes.PARAMETERS[name]


def config(name: str, **fields: Any) -> ModelConfig:
    """Returns the hyper-parameters of a published size, with `fields` changed.

    Raises:
        UserError: the name or a field is unknown; the message suggests the most similar one.
    """
    if name not in sizes.SIZES:
        raise UserError(f"There is no model {name!r}.{did_you_mean(name, sizes.SIZES)}")
    model = copy.copy(sizes.SIZES[name])
    allowed = {field.name for field in dataclasses.fields(model)}
    for field, value in fields.items():
        if field not in allowed:
            raise UserError(f"Model {name!r} has no field {field!r}.{did_you_mean(field, allowed)}")
        setattr(model, field, tuple(value) if isinstance(value, list) else value)
    return model


def build(model: str | ModelConfig, **fields: Any) -> "keras.Model":
    """Builds a Keras model, not compiled.

    Args:
        model: the name of a published size; or a config, of the zoo or a custom one.
        fields: hyper-parameters to change, if `model` is a name.

    Raises:
        UserError: a name or field is unknown, a value is not allowed, or the config's `build`
            returns no Keras model.

    Example:
        >>> model = tftpu.models.build("vit_s16", num_classes=10)
    """
    if isinstance(model, str):
        model = config(model, **fields)
    elif fields:
        raise UserError(
            f"build() takes fields ({', '.join(fields)}) only together with a model's name: set "
            "them in the config instead."
        )
    if type(model).__module__ == sizes.__name__:
        check_types("model", model)
        _check_name(model)
        model.validate(_choose_fitting_batch(model))
    built = model.build()
    import keras

    if not isinstance(built, keras.Model):
        raise UserError(
            f"{type(model).__name__}.build() returns a {type(built).__name__}: return a "
            "keras.Model that is not compiled."
        )
    return built


# The hyper-parameters that define a published size; see `_check_name`.
_SHAPE = ("layers", "width", "blocks", "widths")


def _check_name(model: ModelConfig) -> None:
    """Raises `UserError` if a config has a published size's name, but default sizes."""
    published = sizes.SIZES.get(model.name)
    if type(published) is not type(model):
        return
    own = [
        field
        for field in dataclasses.fields(model)
        if field.name in _SHAPE and getattr(published, field.name) != field.default
    ]
    if own and all(getattr(model, field.name) == field.default for field in own):
        kind = type(model).__name__
        raise UserError(
            f"{kind}({model.name!r}) only sets the name, not the sizes of {model.name}: write "
            f"tftpu.models.config({model.name!r})."
        )


def _choose_fitting_batch(model: ModelConfig) -> PerReplicaBatch:
    """Returns a batch size on one replica that suits a model, to validate its config alone."""
    group = getattr(model, "norm_batch", 1)
    return PerReplicaBatch(group if isinstance(group, int) and group > 0 else 1, replicas=1)


def load_model(path: str, **options: Any) -> "keras.Model":
    """Loads a model of the zoo from the `.keras` file that its `save` wrote.

    Unlike `keras.models.load_model`, this works for families that the process has not imported.

    Args:
        path: the path of the file.
        options: further arguments of `keras.models.load_model`.

    Raises:
        UserError: the file is damaged.
    """
    import keras

    from tftpu.models import families
    from tftpu.models.layers import pixels  # noqa: F401 (layers that may precede any model)

    for module in pkgutil.iter_modules(families.__path__, f"{families.__name__}."):
        importlib.import_module(module.name)
    try:
        model: Any = keras.models.load_model(path, **options)
    except zipfile.BadZipFile as error:
        raise UserError(f"{path} is damaged ({error}): copy or save it again.") from error
    return model


def load_weights(model: "keras.Model", path: str, *, replace_head: bool = False) -> "LoadReport":
    """Loads a file of weights into a model; see `tftpu.models.weights.load_weights`."""
    from tftpu.models.weights import loading

    return loading.load_weights(model, path, replace_head=replace_head)


def save_weights(model: "keras.Model", path: str, *, format: str = "safetensors") -> None:
    """Writes the weights of a model to a file; see `tftpu.models.weights.save_weights`."""
    from tftpu.models.weights import loading

    loading.save_weights(model, path, format=format)


def enable_lora(model: "keras.Model", rank: int, targets: str = "", base: str = "") -> list[str]:
    """Adds LoRA adapters to layers, and freezes the others; see `tftpu.models.adapters`."""
    from tftpu.models import adapters

    return adapters.enable_lora(model, rank, targets, base)


def save_adapters(model: "keras.Model", path: str) -> int:
    """Writes only an adapted model's trained weights; returns how many values these are."""
    from tftpu.models.weights import adapter_files

    return adapter_files.save_adapters(model, path)


def load_adapters(model: "keras.Model", path: str) -> None:
    """Loads a file that `save_adapters` wrote; see `tftpu.models.weights.adapter_files`."""
    from tftpu.models.weights import adapter_files

    adapter_files.load_adapters(model, path)


def base_of(model: "keras.Model") -> tuple[str, ...]:
    """Returns the paths of the frozen weights of an adapted model; () without adapters."""
    from tftpu.models import adapters

    return adapters.list_base(model)


def assign_merged(
    plain: "keras.Model", model: "keras.Model", replaced: "Mapping[str, np.ndarray] | None" = None
) -> None:
    """Copies an adapted model's merged weights into `plain`; see `tftpu.models.adapters`."""
    from tftpu.models import adapters

    adapters.assign_merged(plain, model, replaced)


def switch_adapters_off(model: "keras.Model") -> None:
    """Sets adapters to zero, so that they have no effect; see `tftpu.models.adapters`."""
    from tftpu.models import adapters

    adapters.switch_off(model)


def freeze(model: "keras.Model", patterns: str) -> list[str]:
    """Freezes the weights whose paths match globs; see `tftpu.models.weights.freeze`."""
    from tftpu.models.weights import loading

    return loading.freeze(model, patterns)
