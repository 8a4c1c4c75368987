"""Columns of a prediction: logits, the likeliest classes, an embedding."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from tftpu.errors import UserError
from tftpu.optim.losses import SmoothedCrossentropy
from tftpu.tensors import Nest

LOGITS, CLASSES, TOP5, EMBEDDING = OUTPUTS = ("logits", "classes", "top5", "embedding")

Columns = dict[str, Any]


def add_embedding(model: keras.Model) -> keras.Model:
    """Returns a model of the same layers that also returns the input of its last layer.

    Args:
        model: a functional model; its last layer may belong to a model inside it.

    Returns:
        A model with the outputs {"embedding", "logits"}.

    Raises:
        UserError: the model is not functional, or does not end in one layer with one input.
    """
    embedding, logits = _trace_outputs(model)
    given = model.inputs[0] if isinstance(model, keras.Sequential) else model.input
    return keras.Model(given, {EMBEDDING: embedding, LOGITS: logits}, name=model.name)


def build_columns(
    wanted: Sequence[str], probabilities: bool, class_names: Sequence[str] | None
) -> Callable[[Nest], Columns]:
    """Returns a function that maps a model's outputs to columns (examples, ...) by name.

    Args:
        wanted: any of "logits", "classes", "top5" and "embedding".
        probabilities: whether the model returns probabilities; otherwise it returns logits.
        class_names: the class names by class id; None: unknown.
    """

    def columns(outputs: Nest) -> Columns:
        found: Columns = {}
        if EMBEDDING in wanted:
            found[EMBEDDING] = _to_float32(outputs[EMBEDDING])
            outputs = outputs[LOGITS]
        for name in wanted:
            if name == LOGITS:
                found.update(_name_columns(outputs))
            elif name in (CLASSES, TOP5):
                logits = _check_class_scores(outputs)
                scores = logits if probabilities else _softmax(logits)
                pick = _find_likeliest if name == CLASSES else _find_top5
                found.update(pick(logits, scores, class_names))
        return found

    return columns


def name_columns(shape: Any, wanted: Sequence[str], class_names: Sequence[str] | None) -> list[str]:
    """Returns the names of the columns, in order, before anything is predicted.

    Args:
        shape: the shape of the model's outputs, nested as these are; (): unknown.
        wanted, class_names: as for `build_columns`.
    """
    none = np.zeros((0, 2), np.float32)  # (examples, classes)
    scores = keras.tree.map_shape_structure(lambda _: none, shape) if shape else none
    outputs = {EMBEDDING: none, LOGITS: scores} if EMBEDDING in wanted else scores
    return list(build_columns(wanted, True, class_names)(outputs))


def check_kept(kept: Iterable[str], columns: Collection[str]) -> None:
    """Raises `UserError` if a kept field of the input has the name of a column.

    Args:
        kept: the names of the fields.
        columns: the names of the columns.
    """
    for name in kept:
        if name in columns:
            raise UserError(
                f"The input's field {name!r} has the name of a column of the predictions: do not "
                "keep it, and join it by the file and the number of the record, or rename it in "
                "the input."
            )


def has_probabilities(model: keras.Model) -> bool:
    """Returns whether a model returns probabilities; otherwise it returns logits for a softmax.

    The model's loss decides this; if it does not say, the activation of the last layer does.

    Raises:
        UserError: the model's loss allows several labels for each example.
    """
    loss: Any = getattr(model, "loss", None)
    if isinstance(loss, keras.losses.BinaryCrossentropy | keras.losses.BinaryFocalCrossentropy):
        raise UserError(
            "--outputs=classes and top5 need a single class for each example, but this model's "
            "loss allows several: ask for logits."
        )
    if isinstance(loss, str) and loss.endswith("categorical_crossentropy"):
        return True  # Keras's default for a loss given by name: outputs are probabilities
    from_logits = getattr(loss, "from_logits", None)
    if isinstance(from_logits, bool):
        return not from_logits
    last = _find_last_layer(model)
    known = (keras.activations.softmax, keras.activations.sigmoid)
    return isinstance(last, keras.layers.Softmax) or getattr(last, "activation", None) in known


def choose_default(model: keras.Model) -> str:
    """Returns the default output of a model: "classes" for a classifier, otherwise "logits".

    A classifier returns the scores of several classes for each example, and its loss compares them
    with one class.
    """
    loss: Any = getattr(model, "loss", None)
    name = loss if isinstance(loss, str) else getattr(loss, "name", "")
    compares = str(name).endswith(("categorical_crossentropy", "categorical_focal_crossentropy"))
    compares = compares or isinstance(loss, SmoothedCrossentropy)
    shape = getattr(model, "output_shape", None)
    several = isinstance(shape, tuple) and len(shape) == 2 and (shape[-1] or 0) > 1
    return CLASSES if compares and several else LOGITS


def _find_last_layer(model: keras.Model) -> Any:
    last: Any = model.layers[-1] if model.layers else model
    return _find_last_layer(last) if isinstance(last, keras.Model) else last


def _trace_outputs(model: keras.Model) -> tuple[Any, Any]:
    """Returns the embedding and the output of a functional model, as tensors of its graph."""
    last: Any = model.layers[-1] if getattr(model, "layers", None) else None
    functional = isinstance(model, keras.Sequential) or hasattr(model, "operations")
    if last is None or not functional or not hasattr(model, "outputs"):
        raise UserError(
            f"--outputs=embedding needs a functional model, but {model.name!r} is not one: leave "
            "embedding out."
        )
    given = last.input
    if isinstance(last, keras.Model):
        inner = add_embedding(last)(given)
        return inner[EMBEDDING], inner[LOGITS]
    if isinstance(given, list | tuple | dict) or len(model.outputs) != 1:
        raise UserError(
            "--outputs=embedding needs a model that ends in one layer with one input, but "
            f"{model.name!r} does not: leave embedding out."
        )
    return given, model.outputs[0]


def _name_columns(outputs: Nest, name: str = LOGITS) -> Columns:
    """Returns a column for each output: "logits", or "logits_NAME" if there are several.

    Outputs in others have all their names: "logits_NAME_NAME".
    """
    if not isinstance(outputs, Mapping | list | tuple):
        return {name: _to_float32(outputs)}
    parts = outputs.items() if isinstance(outputs, Mapping) else enumerate(outputs)
    found: Columns = {}
    for part, value in parts:
        found |= _name_columns(value, f"{name}_{part}")
    return found


def _check_class_scores(outputs: Nest) -> np.ndarray:
    """Returns outputs as an array, (examples, ..., classes); floats become float32.

    Raises:
        UserError: the outputs are not scores of classes.
    """
    if isinstance(outputs, Mapping | list | tuple) or outputs.ndim < 2 or outputs.shape[-1] < 2:
        raise UserError(
            "The model does not return a score for each of several classes: leave out "
            "--outputs=classes and top5, and ask for logits."
        )
    return _to_float32(outputs)


def _find_likeliest(logits: np.ndarray, scores: np.ndarray, names: Sequence[str] | None) -> Columns:
    best = logits.argmax(-1)
    found: Columns = {"probability": np.take_along_axis(scores, best[..., None], -1)[..., 0]}
    unknown = np.isnan(found["probability"])  # where logits are not finite
    if names is not None:
        found = {"class_name": _find_names(np.where(unknown, -1, best), [*names, ""])} | found
    return {"class": np.where(unknown, -1, best).astype(np.int32)} | found


def _find_top5(logits: np.ndarray, scores: np.ndarray, names: Sequence[str] | None) -> Columns:
    best = np.argsort(-logits, axis=-1, kind="stable")[..., :5]
    found: Columns = {"top5_classes": best.astype(np.int32)}
    if names is not None:
        found["top5_names"] = _find_names(best, names)
    found["top5_probabilities"] = np.take_along_axis(scores, best, -1)
    return found


def _find_names(classes: np.ndarray, names: Sequence[str]) -> Any:
    found = np.array(names, object)[classes]
    return found.tolist() if found.ndim == 1 else found


def _softmax(logits: np.ndarray) -> np.ndarray:
    powers = np.exp(logits - logits.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def _to_float32(value: Any) -> np.ndarray:
    array = np.asarray(value)
    narrow = array.dtype.kind not in "biu" and array.dtype != np.float32
    return array.astype(np.float32) if narrow else array
