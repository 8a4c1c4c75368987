"""Loads models and preprocessors from presets of KerasHub.

Tried with KerasHub 0.32.
"""

import contextlib
import inspect
import os
import pathlib
import re
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import keras

from tftpu.errors import UserError, did_you_mean, find_nearest
from tftpu.installation import command

if TYPE_CHECKING:
    from tftpu.models.keras_hub.config import KerasHub

_VERSION = "0.32.0"


def load_model(config: "KerasHub") -> keras.Model:
    """Returns the task or the backbone of a config, without its preprocessor.

    Raises:
        UserError: KerasHub is not installed, has no such preset or task, or cannot load it.
    """
    hub = _import_keras_hub()
    given: dict[str, Any] = {"load_weights": config.weights == "preset"}
    with _explaining(hub, config):
        if not config.task:
            return _load_backbone(hub, config, given)
        if config.overrides:
            given["backbone"] = _load_backbone(hub, config, given)
        if config.num_classes:
            given["num_classes"] = config.num_classes
        return _find_task(hub, config.task).from_preset(config.preset, preprocessor=None, **given)


def _load_backbone(hub: Any, config: "KerasHub", given: dict[str, Any]) -> Any:
    found = hub.models.Backbone.from_preset(config.preset, **given, **config.overrides)
    known = found.get_config()
    for name in config.overrides:  # KerasHub ignores unknown arguments
        if name not in known:
            raise UserError(
                f"model.overrides: {type(found).__name__} has no argument {name!r}."
                f"{did_you_mean(name, known)}"
            )
    return found


def load_preprocessor(config: "KerasHub") -> Any:
    """Returns the preprocessor of a config's task; None if it has none.

    Raises:
        UserError: as for `load_model`.
    """
    hub = _import_keras_hub()
    if not config.task:
        return None
    kind = getattr(hub.models, f"{_find_task(hub, config.task).__name__}Preprocessor", None)
    given = {"sequence_length": config.sequence_length} if config.sequence_length else {}
    with _explaining(hub, config):
        return None if kind is None else kind.from_preset(config.preset, **given)


def find_limit(config: "KerasHub") -> int | None:
    """Returns the number of positions in the preset's position embedding; None if it has none.

    Raises:
        UserError: as for `load_model`.
    """
    hub = _import_keras_hub()
    from keras_hub.src.utils import preset_utils

    tables = (hub.layers.PositionEmbedding, hub.layers.TokenAndPositionEmbedding)
    with _explaining(hub, config):
        loader: Any = preset_utils.get_preset_loader(config.preset)
        modules = [sys.modules[one.__module__] for one in loader.check_backbone_class().__mro__]
        # Rotary backbones may have a `max_sequence_length`, too, and read longer texts.
        if not any(getattr(m, one.__name__, None) is one for m in modules for one in tables):
            return None
        if (given := loader.config.get("config")) is None:  # a Transformers preset: convert it
            given = loader.load_backbone(dict, load_weights=False)
    given = {**given, **config.overrides}
    rotates = given.get("position_embedding_type") == "rotary"
    return None if rotates else given.get("max_sequence_length")


def check_length(config: "KerasHub", length: int) -> None:
    """Raises `UserError` if texts of `length` tokens are longer than the model can read."""
    limit = find_limit(config)
    if limit is not None and length > limit:
        whose = "" if config.sequence_length else ", as the preset's preprocessor says"
        raise UserError(
            f"model.sequence_length is {length:,}{whose}, but the backbone of {config.preset!r} "
            f"reads {limit:,} tokens at most (its max_sequence_length): type "
            f"--config.model.sequence_length={limit} or less."
        )


def _import_keras_hub() -> Any:
    try:
        import keras_hub
    except ImportError as error:
        raise UserError(
            f"Models of KerasHub need further packages ({error}): run `{command('hub')}` and `pip "
            f"install --no-deps keras-hub=={_VERSION}`, which keeps the TensorFlow that is "
            "installed."
        ) from error
    return keras_hub


def _find_task(hub: Any, name: str) -> Any:
    """Returns the class of a task by its name, such as "causal_lm" (older runs: "CausalLM").

    Other spellings are rejected, because a run can be resumed only with the recorded spelling.
    """
    base = hub.models.Task
    tasks = inspect.getmembers(
        hub.models, lambda kind: inspect.isclass(kind) and issubclass(kind, base)
    )
    known = {_separate_words(key): kind for key, kind in tasks if kind is not base}
    recorded = {kind.__name__: kind for kind in known.values()}
    if name not in known | recorded:
        same = [key for key in known if key.replace("_", "") == name.replace("_", "").lower()]
        # Suggests general tasks only, not those of one architecture, such as Gemma3CausalLM.
        general = [key for key, kind in known.items() if kind.backbone_cls is None]
        near = f" Did you mean {same[0]!r}?" if same else did_you_mean(name, general)
        raise UserError(f"model.task={name!r}: KerasHub has no such task.{near}")
    return (known | recorded)[name]


def _separate_words(name: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z\d])|(?<=\d)(?=[A-Z])", "_", name).lower()


def _list_local_presets(preset: str) -> list[str]:
    """Returns the presets in a path's parent folder, to suggest one if the path is mistyped."""
    found = pathlib.Path(preset).parent.glob("*/config.json")
    return [str(path.parent) for path in found]


@contextlib.contextmanager
def _explaining(hub: Any, config: "KerasHub") -> Iterator[None]:
    """Turns the errors of loading a preset into `UserError`."""
    preset, known = config.preset, hub.models.Backbone.presets
    if "://" not in preset and preset not in known and not os.path.isdir(preset):
        near = find_nearest(preset, [*known, *_list_local_presets(preset)])
        advice = "If its folder has moved, give the new path: --config.model.preset=PATH."
        if near is not None:
            advice = f"Did you mean {near!r}? {advice}"
        raise UserError(
            f"model.preset={preset!r} is neither a folder nor a preset of KerasHub. {advice}"
        )
    try:
        yield
    except (ValueError, TypeError, OSError, ImportError) as error:  # failed downloads raise OSError
        said = str(error).strip()
        if isinstance(error, FileNotFoundError) and "tokenizer" in said.partition(" ")[0]:
            said += (
                " The preset lacks its tokenizer: write it with save_to_preset of the task with "
                "its preprocessor, and give that folder, --config.model.preset=FOLDER."
            )
        raise UserError(
            f"KerasHub cannot load {config.task or 'the backbone'} from the preset {preset!r}: "
            f"{said}"
        ) from error
