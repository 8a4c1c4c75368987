"""Loads published weights into a model of the zoo, saves a model's weights, and freezes them.

`load_weights` reads Hugging Face's safetensors layouts, `.weights.h5` files of keras.applications,
and checkpoints and exported weights of tftpu; `save_weights` writes Hugging Face's.
"""

import dataclasses
import fnmatch
import functools
import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

import keras
import numpy as np

from tftpu.config import ModelConfig
from tftpu.errors import UserError, did_you_mean
from tftpu.kernels.assignment import assign
from tftpu.models import adapters
from tftpu.models.blocks.block_model import BlockModel
from tftpu.models.weights import files
from tftpu.models.weights.files import StoredArray
from tftpu.models.weights.layouts import hugging_face, hugging_face_config, keras_applications
from tftpu.models.weights.layouts.entry import Entry, map_same

_HEAD = ("head/kernel", "head/bias")
_FORMATS = ("safetensors",)


@dataclasses.dataclass
class LoadReport:
    """The result of loading a file into a model.

    Attributes:
        loaded: paths of the variables whose values were read from the file.
        missing: paths of variables of the head or of random generators that the file lacks; they
            keep their values.
        unused: names of the file's arrays that belong to heads which the model does not have.
        replaced: paths of the head's variables, if their arrays in the file have other shapes;
            they keep their values.
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
                lines.append(f"{len(names)} {said}: {_format_names(names)}")
        return "; ".join(lines)


def load_weights(model: keras.Model, path: str, *, replace_head: bool = False) -> LoadReport:
    """Loads the weights of a file into a zoo model; on a mismatch, raises before loading any.

    Arrays are read one after the other, and each device receives only its shard of a variable. If
    reading fails in the middle of a file, the arrays before that place are already loaded.

    Args:
        model: built by `tftpu.models.build`.
        path: see `tftpu.models.weights.files.read`, or the folder of a checkpoint of tftpu.
        replace_head: whether a head whose shape differs, as for another number of classes, keeps
            its values; otherwise, this is an error.

    Returns:
        A report of the matched and unmatched names on both sides.

    Raises:
        UserError: the model is not of the zoo; the file does not exist or cannot be read; or it
            belongs to another network: a shape differs, file or model has weights below the head
            that the other lacks, or `config.json` beside the weights describes another network.

    Example:
        >>> model = tftpu.models.build("resnet50", num_classes=10)
        >>> print(tftpu.models.load_weights(model, "resnet-50/", replace_head=True))
    """
    config = _find_config(model)
    arrays = files.read(path)
    layout = _choose_layout(config, model, str(path), arrays)
    entries, known = layout.entries, layout.known
    variables = _map_variables(model)
    quantized = adapters.find_quantized(model)
    fitting: dict[str, Entry] = {}
    wrong, used = [], set()
    for entry in entries:
        if not all(name in known for name in entry.theirs):
            continue
        used |= set(entry.theirs)
        there = [arrays[known[name]] for name in entry.theirs]
        layer = quantized.get(entry.ours)
        here = (
            tuple(variables[entry.ours].shape)
            if layer is None
            else adapters.compute_kernel_shape(layer)
        )
        if _compute_shape(entry, there) == here:
            fitting[entry.ours] = entry
        else:
            shapes = " + ".join(f"{name} {array.shape}" for name, array in zip(entry.theirs, there))
            wrong.append((entry.ours, f"{entry.ours} {here} here, {shapes} there"))
    replaced = [ours for ours, _ in wrong if replace_head and ours in _HEAD]
    _check_shapes(path, [said for ours, said in wrong if ours not in replaced])
    if replaced:  # the head's kernel and bias are replaced together
        replaced = [ours for ours in _HEAD if ours in variables]
        fitting = {ours: entry for ours, entry in fitting.items() if ours not in replaced}
    if not fitting:
        raise UserError(
            f"No array of {path!r} fits the model {model.name!r}: the file has "
            f"{_format_names(sorted(arrays))}. Does it belong to another family?"
        )
    added = adapters.list_added_weights(model)
    missing = [v for v in variables if v not in fitting and v not in replaced and v not in added]
    unused = [
        name
        for name in known
        if not (name in used or name in layout.tied or hugging_face.is_buffer(name))
    ]
    differences = [f"it has {known[n]}" for n in unused if not layout.is_head(n)]
    differences += [f"it lacks {ours}" for ours in missing if not _is_head(ours)]
    _check_network(model, path, differences + layout.list_untied(arrays))
    for ours, entry in fitting.items():
        value = entry.read(*(arrays[known[name]].content() for name in entry.theirs))
        if ours in quantized:
            adapters.assign_quantized(quantized[ours], value)
        else:
            assign(variables[ours], value)
    return LoadReport(
        loaded=[ours for ours in variables if ours in fitting],
        missing=missing,
        unused=sorted(known[theirs] for theirs in unused),
        replaced=replaced,
    )


def save_weights(model: keras.Model, path: str, *, format: str = "safetensors") -> None:
    """Writes the weights of a model in the layout of Hugging Face Transformers.

    Adapters are merged into their kernels, and quantized kernels become floats.

    Args:
        model: built by `tftpu.models.build`.
        path: the path of the file, local or `gs://`. Transformers looks for "model.safetensors" in
            a folder, beside its own config.json.
        format: "safetensors", the only one.

    Raises:
        UserError: the format is unknown, or the zoo or Transformers has no such model.
    """
    if format not in _FORMATS:
        raise UserError(
            f"There is no format {format!r} for weights.{did_you_mean(format, _FORMATS)}"
        )
    config = _find_config(model)
    entries = hugging_face.build_layout(config)
    if entries is None:
        raise UserError(
            f"Transformers has no model like {model.name!r}: save its weights with Keras's own "
            "model.save_weights('name.weights.h5')."
        )
    values = adapters.merge_weights(model)
    arrays = {}
    for entry in entries:
        if entry.write is None:
            raise UserError(f"{entry.ours} cannot be written in the layout of Transformers.")
        arrays |= dict(zip(entry.theirs, entry.write(values[entry.ours]), strict=True))
    files.write_safetensors(path, arrays)


def freeze(model: keras.Model, patterns: str) -> list[str]:
    """Excludes weights from training.

    In a layer of `model.layers` whose variables are all frozen, batch normalisation uses its moving
    statistics, and does not update them; dropout stays active.

    Args:
        model: not yet trained.
        patterns: comma-separated globs over the paths of variables: "stem*,stage1_*".

    Returns:
        The paths of the frozen variables.

    Raises:
        UserError: a pattern matches no variable, or nothing is left to train.
    """
    globs = [glob.strip() for glob in patterns.split(",") if glob.strip()]
    paths = list(_map_variables(model))
    for glob in globs:
        if not fnmatch.filter(paths, glob):
            layers = sorted({path.split("/")[0] for path in paths})
            raise UserError(
                f"model.freeze: no variable matches {glob!r}. The layers with variables are "
                f"{_format_names(layers, 12)}."
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


def _compute_shape(entry: Entry, arrays: list[StoredArray]) -> tuple[int, ...] | None:
    """Returns the shape of an entry's value; None if the arrays have too few dimensions."""
    try:
        return entry.read(*(array.build_outline() for array in arrays)).shape
    except ValueError:
        return None


def _choose_layout(
    config: ModelConfig, model: keras.Model, path: str, arrays: dict[str, StoredArray]
) -> "_FileLayout":
    """Returns the layout of a file, from the names of its arrays and the ending of its path.

    Raises:
        UserError: the file's library has no such model, or the config beside the weights describes
            another network.
    """
    if all(re.match(r"\d{5} ", name) for name in arrays):  # names as in a checkpoint of tftpu
        _check_adapters(path, arrays)
        return _build_own_layout(model, {name.split(" ", 1)[1]: name for name in arrays})
    # Names as `Trainer.export_weights` writes them.
    if arrays.keys() & _map_variables(model).keys():
        return _build_own_layout(model, {name: name for name in arrays})
    from_keras = path.endswith(".h5")
    there = keras_applications if from_keras else hugging_face
    entries = there.build_layout(config)
    if entries is None:
        other = "keras.applications" if from_keras else "Hugging Face Transformers"
        raise UserError(
            f"{other} has no model like {model.name!r}, so {path!r} cannot be its weights."
        )
    tied = {}
    if not from_keras:
        hugging_face_config.check(config, model.name, path)
        tied = hugging_face.list_tied_arrays(config)
    known = there.map_known_names(config, list(arrays))
    return _FileLayout(entries, known, functools.partial(there.is_head, config), tied)


def _build_own_layout(model: keras.Model, known: dict[str, str]) -> "_FileLayout":
    return _FileLayout(
        [map_same(ours, ours) for ours in _map_variables(model)], known, _is_head, {}
    )


class _FileLayout(NamedTuple):
    """The layout of a file.

    Attributes:
        entries: the arrays that hold each variable of the model.
        known: the names of the arrays in the file, by their names in `entries`.
        is_head: a function that returns whether an array, by its name in `entries`, belongs to a
            head: files may have or lack those, whatever the task of the model.
        tied: the array that each array of a tied head repeats, by name, in files that have both.
    """

    entries: list[Entry]
    known: dict[str, str]
    is_head: Callable[[str], bool]
    tied: Mapping[str, str]

    def list_untied(self, arrays: dict[str, StoredArray]) -> list[str]:
        """Describes arrays that the model ties to others, but that differ from them in the file."""
        both = [pair for pair in self.tied.items() if self.known.keys() >= set(pair)]
        names = [(self.known[repeated], self.known[tied]) for repeated, tied in both]
        return [
            f"its {repeated} differs from its {tied}, but the model ties them"
            for repeated, tied in names
            if not np.array_equal(arrays[repeated].content(), arrays[tied].content())
        ]


def _is_head(path: str) -> bool:
    """Returns whether a variable belongs to a head or to a random generator."""
    return bool(re.match(r"(head|head_\w+|pool)/", path) or re.search(r"seed(_\w+)?$", path))


def _find_config(model: keras.Model) -> ModelConfig:
    config = model.hyperparameters if isinstance(model, BlockModel) else None
    if config is None:
        raise UserError(
            f"The model {model.name!r} was not built by tftpu.models.build, so its layout is "
            "unknown. Use Keras's own load_weights and save_weights. For a model with adapters, "
            "model.save (in KerasHub, also save_to_preset) merges them into the weights; "
            "tftpu.models.save_adapters writes only the adapters, and load_adapters reads them."
        )
    return config


def _map_variables(model: keras.Model) -> dict[str, keras.Variable]:
    return {variable.path: variable for variable in model.weights}


def _check_adapters(path: str, arrays: dict[str, StoredArray]) -> None:
    names = {name.split(" ", 1)[1] for name in arrays}
    kernels = {re.sub("lora_kernel_a$", "kernel", v) for v in names if v.endswith("lora_kernel_a")}
    if kernels - names:
        raise UserError(
            f"{path!r} holds only adapters, without the weights that they adapt. For a checkpoint, "
            "write both into one file with `tftpu export-weights --merge`, and give that file. "
            "Load a file of tftpu.models.save_adapters with tftpu.models.load_adapters."
        )


def _check_shapes(path: str, wrong: list[str]) -> None:
    if wrong:
        raise UserError(
            f"Nothing was loaded from {path!r}: {len(wrong)} shapes differ. "
            f"{_format_names(wrong, 4, '; ')}."
        )


def _check_network(model: keras.Model, path: str, differences: list[str]) -> None:
    if differences:
        raise UserError(
            f"Nothing was loaded from {path!r}, whose weights do not fit the network "
            f"{model.name!r}: {_format_names(differences, 4, '; ')}. Choose the model that the "
            "weights belong to."
        )


def _format_names(names: list[str], shown: int = 5, between: str = ", ") -> str:
    """Joins the first names, and the number of the others."""
    rest = f"{between}and {len(names) - shown} more" if len(names) > shown else ""
    return between.join(names[:shown]) + rest
