"""Loads published weights into a model of the zoo, saves a model's weights, and freezes them.

`load_weights` reads Hugging Face's safetensors layouts, `.weights.h5` files of keras.applications,
and checkpoints and exported weights of tftpu; `save_weights` writes Hugging Face's.
"""

import dataclasses
import fnmatch
import re

import keras

from tftpu.config import Model
from tftpu.errors import UserError, did_you_mean
from tftpu.models import adapters
from tftpu.models.layers.block_model import BlockModel
from tftpu.models.weights import files
from tftpu.models.weights.assignment import assign
from tftpu.models.weights.files import StoredArray
from tftpu.models.weights.layouts import hugging_face, keras_applications
from tftpu.models.weights.layouts.entry import Entry, same

_HEAD = ("head/kernel", "head/bias")
_FORMATS = ("safetensors",)


@dataclasses.dataclass
class LoadReport:
    """The result of loading a file into a model.

    Attributes:
        loaded: paths of the variables that now have their value from the file.
        missing: paths of variables that the file lacks; they keep their values.
        unused: names of the file's arrays that the model has no place for.
        replaced: paths of the head's variables, if the file's have another shape; they keep their
            values.
    """

    loaded: list[str]
    missing: list[str]
    unused: list[str]
    replaced: list[str]

    def __str__(self) -> str:
        lines = [f"{len(self.loaded)} variables loaded"]
        for said, names in (
            ("not loaded, because the file has another shape", self.replaced),
            ("not loaded, because the file lacks them", self.missing),
            ("of the file's arrays not used", self.unused),
        ):
            if names:
                lines.append(f"{len(names)} {said}: {_listed(names)}")
        return "; ".join(lines)


def load_weights(model: keras.Model, path: str, *, replace_head: bool = False) -> LoadReport:
    """Loads the weights of a file into a model of the zoo: all that match, or none on an error.

    Arrays are read one after the other, and a device that holds a part of a variable is given that
    part alone. A file that cannot be read to its end leaves the first of them loaded.

    Args:
        model: built by `tftpu.models.build`.
        path: as for `tftpu.models.weights.files.read`, or the folder of a checkpoint of tftpu.
        replace_head: whether a head of another shape, as for other classes, keeps its values
            instead of being an error.

    Returns:
        A report of the matched and unmatched names on both sides.

    Raises:
        UserError: there is no such file, it is of another family, or a shape differs.

    Example:
        >>> model = tftpu.models.build("resnet50", num_classes=10)
        >>> print(tftpu.models.load_weights(model, "resnet-50/", replace_head=True))
    """
    config = _config(model)
    arrays = files.read(path)
    entries, known = _layout(config, model, str(path), arrays)
    variables = _variables(model)
    quantized = adapters.quantized_layers(model)
    fitting: dict[str, Entry] = {}
    wrong, used = [], set()
    for entry in entries:
        if not all(name in known for name in entry.theirs):
            continue
        used |= set(entry.theirs)
        there = [arrays[known[name]] for name in entry.theirs]
        layer = quantized.get(entry.ours)
        here = tuple(variables[entry.ours].shape) if layer is None else adapters.shape(layer)
        if _shape(entry, there) == here:
            fitting[entry.ours] = entry
        else:
            shapes = " + ".join(f"{name} {array.shape}" for name, array in zip(entry.theirs, there))
            wrong.append((entry.ours, f"{entry.ours} {here} here, {shapes} there"))
    replaced = [ours for ours, _ in wrong if replace_head and ours in _HEAD]
    _refuse_mismatch(path, [said for ours, said in wrong if ours not in replaced])
    if replaced:  # kernel and bias together
        replaced = [ours for ours in _HEAD if ours in variables]
        fitting = {ours: entry for ours, entry in fitting.items() if ours not in replaced}
    if not fitting:
        raise UserError(
            f"No array of {path!r} fits the model {model.name!r}: the file has "
            f"{_listed(sorted(arrays))}. Does it belong to another family?"
        )
    for ours, entry in fitting.items():
        value = entry.read(*(arrays[known[name]].content() for name in entry.theirs))
        if ours in quantized:
            adapters.assign_quantized(quantized[ours], value)
        else:
            assign(variables[ours], value)
    added = adapters.added_weights(model)
    return LoadReport(
        loaded=[ours for ours in variables if ours in fitting],
        missing=[v for v in variables if v not in fitting and v not in replaced and v not in added],
        unused=sorted(
            name
            for theirs, name in known.items()
            if theirs not in used and not hugging_face.is_duplicate(config, theirs)
        ),
        replaced=replaced,
    )


def save_weights(model: keras.Model, path: str, *, format: str = "safetensors") -> None:
    """Writes the weights of a model in the layout of Hugging Face Transformers.

    Adapters are merged into their kernels, and quantized kernels become floats.

    Args:
        model: built by `tftpu.models.build`.
        path: of the file, local or `gs://`. Transformers looks for "model.safetensors" in a folder,
            beside its own config.json.
        format: "safetensors", the only one.

    Raises:
        UserError: an unknown format, or Transformers has no such model.
    """
    if format not in _FORMATS:
        raise UserError(
            f"There is no format {format!r} for weights.{did_you_mean(format, _FORMATS)}"
        )
    config = _config(model)
    entries = hugging_face.layout(config)
    if entries is None:
        raise UserError(
            f"Transformers has no model like {model.name!r}: save its weights with Keras's own "
            "model.save_weights('name.weights.h5')."
        )
    values = adapters.merged_weights(model)
    arrays = {}
    for entry in entries:
        if entry.write is None:
            raise UserError(f"{entry.ours} cannot be written in the layout of Transformers.")
        arrays |= dict(zip(entry.theirs, entry.write(values[entry.ours]), strict=True))
    files.write_safetensors(path, arrays)


def freeze(model: keras.Model, patterns: str) -> list[str]:
    """Excludes weights from training.

    A layer whose variables are all frozen runs as in evaluation: a batch normalisation uses its
    moving statistics and does not update them.

    Args:
        model: not yet trained.
        patterns: comma-separated globs over the paths of variables: "stem*,stage1_*".

    Returns:
        The paths of the frozen variables.

    Raises:
        UserError: a pattern matches no variable, or nothing is left to train.
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


def _shape(entry: Entry, arrays: list[StoredArray]) -> tuple[int, ...] | None:
    """Returns the shape of an entry's value; None if the arrays lack dimensions."""
    try:
        return entry.read(*(array.outline() for array in arrays)).shape
    except ValueError:
        return None


def _layout(
    config: Model, model: keras.Model, path: str, arrays: dict[str, StoredArray]
) -> tuple[list[Entry], dict[str, str]]:
    """Returns the entries of a file's layout, and the file's names by those of the layout."""
    if all(re.match(r"\d{5} ", name) for name in arrays):  # a checkpoint of tftpu
        _refuse_adapters(path, arrays)
        return [same(ours, ours) for ours in _variables(model)], {
            name.split(" ", 1)[1]: name for name in arrays
        }
    if arrays.keys() & _variables(model).keys():  # as `Trainer.export_weights` names them
        return [same(ours, ours) for ours in _variables(model)], {name: name for name in arrays}
    if path.endswith(".h5"):
        entries, known = keras_applications.layout(config), keras_applications.known_names
        other = "keras.applications"
    else:
        entries, other = hugging_face.layout(config), "Hugging Face Transformers"
        known = hugging_face.known_names
    if entries is None:
        raise UserError(
            f"{other} has no model like {model.name!r}, so {path!r} cannot be its weights."
        )
    return entries, known(config, list(arrays))


def _config(model: keras.Model) -> Model:
    config = model.hyperparameters if isinstance(model, BlockModel) else None
    if config is None:
        raise UserError(
            f"The model {model.name!r} was not built by tftpu.models.build, so its layout is "
            "unknown: use Keras's own load_weights and save_weights."
        )
    return config


def _variables(model: keras.Model) -> dict[str, keras.Variable]:
    return {variable.path: variable for variable in model.weights}


def _refuse_adapters(path: str, arrays: dict[str, StoredArray]) -> None:
    names = {name.split(" ", 1)[1] for name in arrays}
    kernels = {re.sub("lora_kernel_a$", "kernel", v) for v in names if v.endswith("lora_kernel_a")}
    if kernels - names:
        raise UserError(
            f"{path!r} is a checkpoint of adapters alone, without the weights below them: write "
            "both as one file by `tftpu export-weights --merge`, and give that."
        )


def _refuse_mismatch(path: str, wrong: list[str]) -> None:
    if wrong:
        raise UserError(
            f"Nothing was loaded from {path!r}: {len(wrong)} shapes differ. "
            f"{_listed(wrong, 4, '; ')}."
        )


def _listed(names: list[str], shown: int = 5, between: str = ", ") -> str:
    """Lists the first names, and the number of the others."""
    rest = f"{between}and {len(names) - shown} more" if len(names) > shown else ""
    return between.join(names[:shown]) + rest
