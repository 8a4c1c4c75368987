"""Weights that others have trained: into a model of the zoo, and out of it.

`load_weights` takes Hugging Face's safetensors layouts, `.weights.h5` files of keras.applications
and the checkpoints of tftpu; `save_weights` writes the first; `freeze` keeps weights as they are.
"""

import dataclasses
import fnmatch
import re

import keras
import numpy as np

from tftpu.errors import UserError, did_you_mean
from tftpu.models.layers.block_model import BlockModel
from tftpu.models.weights import files
from tftpu.models.weights.layouts import hugging_face, keras_applications
from tftpu.models.weights.layouts.entry import Entry, same

_HEAD = ("head/kernel", "head/bias")
_FORMATS = ("safetensors",)


@dataclasses.dataclass
class LoadReport:
    """What a file gave to a model.

    Args:
        loaded: the variables that have their value from the file, by path.
        missing: those that the file does not have; they are as they were.
        unused: the names of the file's arrays that the model has no place for.
        replaced: the variables of the head, of another shape in the file; they are as they were.
    """

    loaded: list[str]
    missing: list[str]
    unused: list[str]
    replaced: list[str]

    def __str__(self) -> str:
        lines = [f"{len(self.loaded)} variables loaded"]
        for said, names in (
            ("left as they were, for the file has them in another shape", self.replaced),
            ("left as they were, for the file has none", self.missing),
            ("of the file not used", self.unused),
        ):
            if names:
                lines.append(f"{len(names)} {said}: {_listed(names)}")
        return "; ".join(lines)


def load_weights(model: keras.Model, path: str, *, replace_head: bool = False) -> LoadReport:
    """Gives a model of the zoo the weights of a file, all that are in it or, on an error, none.

    Args:
        model: made by `tftpu.models.build`.
        path: as for `tftpu.models.weights.files.read`, or a checkpoint of tftpu: its folder.
        replace_head: a head of another shape, as for other classes, is left as it was.

    Returns:
        What was and what was not matched, on both sides.

    Raises:
        UserError: no such file, not one of this family, or an array of another shape.
    """
    config = _config(model)
    arrays = files.read(path)
    entries, known = _layout(config, model, str(path), arrays)
    variables = _variables(model)
    values, wrong, used = {}, [], set()
    for entry in entries:
        if not all(name in known for name in entry.theirs):
            continue
        used |= set(entry.theirs)
        there = [arrays[known[name]] for name in entry.theirs]
        here = tuple(variables[entry.ours].shape)
        try:
            values[entry.ours] = entry.read(*there)
        except ValueError:  # another number of dimensions
            values[entry.ours] = None
        if values[entry.ours] is None or values[entry.ours].shape != here:
            del values[entry.ours]
            shapes = " + ".join(f"{name} {array.shape}" for name, array in zip(entry.theirs, there))
            wrong.append((entry.ours, f"{entry.ours} {here} here, {shapes} there"))
    replaced = [ours for ours, _ in wrong if replace_head and ours in _HEAD]
    _refuse_mismatch(path, [said for ours, said in wrong if ours not in replaced])
    if replaced:  # a head is replaced whole
        replaced = [ours for ours in _HEAD if ours in variables]
        values = {ours: value for ours, value in values.items() if ours not in replaced}
    if not values:
        raise UserError(
            f"No array of {path!r} fits the model {model.name!r}: it has "
            f"{_listed(sorted(arrays))}. Is it of another family?"
        )
    for ours, value in values.items():
        variables[ours].assign(np.asarray(value, variables[ours].dtype))
    return LoadReport(
        loaded=[ours for ours in variables if ours in values],
        missing=[ours for ours in variables if ours not in values and ours not in replaced],
        unused=sorted(
            name
            for theirs, name in known.items()
            if theirs not in used and not hugging_face.is_duplicate(config, theirs)
        ),
        replaced=replaced,
    )


def save_weights(model: keras.Model, path: str, *, format: str = "safetensors") -> None:
    """Writes the weights of a model in the layout of Hugging Face Transformers.

    Args:
        model: made by `tftpu.models.build`.
        path: of the file, local or `gs://`; Transformers looks for "model.safetensors" in a folder,
            beside its own config.json.
        format: "safetensors", the only one.

    Raises:
        UserError: Transformers has no such model.
    """
    if format not in _FORMATS:
        raise UserError(
            f"There is no format {format!r} of weights.{did_you_mean(format, _FORMATS)}"
        )
    config = _config(model)
    entries = hugging_face.layout(config)
    if entries is None:
        raise UserError(
            f"Transformers has no model like {model.name!r}: keep its weights with Keras's own "
            "model.save_weights('name.weights.h5')."
        )
    variables = _variables(model)
    arrays = {}
    for entry in entries:
        value = keras.ops.convert_to_numpy(variables[entry.ours])
        arrays |= dict(zip(entry.theirs, entry.write(value), strict=True))
    files.write_safetensors(path, arrays)


def freeze(model: keras.Model, patterns: str) -> list[str]:
    """Keeps weights as they are in training.

    A layer all of whose variables are frozen runs as in evaluation: a batch normalisation uses its
    moving statistics and leaves them alone.

    Args:
        model: not yet trained.
        patterns: globs over the paths of variables, with commas between: "stem*,stage1_*".

    Returns:
        The paths of the variables that are frozen.

    Raises:
        UserError: a pattern that no variable matches, or nothing is left to train.
    """
    globs = [glob.strip() for glob in patterns.split(",") if glob.strip()]
    paths = list(_variables(model))
    for glob in globs:
        if not fnmatch.filter(paths, glob):
            layers = sorted({path.split("/")[0] for path in paths})
            raise UserError(
                f"model.freeze: no variable matches {glob!r}. The layers with variables are "
                f"{_listed(layers, 12)}."
            )
    frozen = {path for path in paths if any(fnmatch.fnmatchcase(path, glob) for glob in globs)}
    for layer in model.layers:
        own = [weight.path for weight in layer.weights]
        if own and frozen.issuperset(own):
            layer.trainable = False
    for variable in model.weights:
        if variable.path in frozen:
            variable.trainable = False
    if not model.trainable_variables:
        raise UserError(f"model.freeze={patterns!r} leaves nothing to train.")
    return [path for path in paths if path in frozen]


def _layout(config, model, path: str, arrays: dict) -> tuple[list[Entry], dict[str, str]]:
    """The entries of a file's layout, and the name there of each array that the layout knows."""
    if all(re.match(r"\d{5} ", name) for name in arrays):  # a checkpoint of tftpu
        return [same(ours, ours) for ours in _variables(model)], {
            name.split(" ", 1)[1]: name for name in arrays
        }
    if path.endswith(".h5"):
        entries, known = keras_applications.layout(config), keras_applications.known_names
        other = "keras.applications"
    else:
        entries, other = hugging_face.layout(config), "Hugging Face Transformers"
        known = hugging_face.known_names
    if entries is None:
        raise UserError(f"{other} has no model like {model.name!r}, so {path!r} is not for it.")
    return entries, known(config, list(arrays))


def _config(model: keras.Model):
    config = model.hyperparameters if isinstance(model, BlockModel) else None
    if config is None:
        raise UserError(
            f"The model {model.name!r} was not made by tftpu.models.build, which knows where each "
            "weight belongs: use Keras's own load_weights and save_weights."
        )
    return config


def _variables(model: keras.Model) -> dict[str, keras.Variable]:
    return {variable.path: variable for variable in model.weights}


def _refuse_mismatch(path: str, wrong: list[str]) -> None:
    if wrong:
        raise UserError(
            f"Nothing was loaded from {path!r}: {len(wrong)} shapes differ. "
            f"{_listed(wrong, 4, '; ')}."
        )


def _listed(names: list[str], shown: int = 5, between: str = ", ") -> str:
    """The first of many, for a sentence."""
    rest = f"{between}and {len(names) - shown} more" if len(names) > shown else ""
    return between.join(names[:shown]) + rest
