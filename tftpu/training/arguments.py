"""The arguments of `fit`, `evaluate` and `predict`: Keras's meanings, checked, as typed objects."""

import dataclasses
import math
import warnings
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from tftpu.config import TrainConfig
from tftpu.engines.data.arrays import as_arrays
from tftpu.engines.data.py_dataset import PyBatches
from tftpu.engines.engine import Dataset, Epoch
from tftpu.errors import UserError
from tftpu.storage.files import StrPath, check_folder
from tftpu.tensors import Nest
from tftpu.training.timetable import Timetable

BATCH_SIZE = 32  # Keras's own default

CallbackArgument = keras.callbacks.Callback | Sequence[keras.callbacks.Callback] | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Length:
    """The length of a run, as the caller wrote it.

    Attributes:
        epochs: index of the epoch that the run ends before; None: `steps` governs, or there is
            one.
        steps: total length of the run; None: `epochs` governs.
        steps_per_epoch: None: an epoch is one pass over the data.
        initial_epoch: index of the epoch that the run begins with.
        eval_every: steps between two evaluations, with `steps`.

    Raises:
        UserError: arguments that contradict each other, or are not whole numbers in their range.
    """

    epochs: int | None
    steps: int | None
    steps_per_epoch: int | None
    initial_epoch: int
    eval_every: int | None

    def __post_init__(self) -> None:
        for name, least in (
            *(("epochs", 1), ("steps", 1), ("steps_per_epoch", 1)),
            *(("initial_epoch", 0), ("eval_every", 1)),
        ):
            refuse_fraction(name, getattr(self, name), least)
        if self.steps is None:
            if self.eval_every is not None:
                raise UserError(
                    "eval_every goes with steps=: with epochs= an evaluation follows each epoch. "
                    "steps_per_epoch= sets its length."
                )
            return
        if self.epochs is not None:
            raise UserError(
                f"epochs={self.epochs} and steps={self.steps} both say how long the run is: pass "
                "one of them."
            )
        if self.steps_per_epoch is not None:
            raise UserError(
                "steps_per_epoch goes with epochs=. With steps=, the total length of the run, "
                "eval_every= says how many steps lie between two evaluations."
            )
        if self.initial_epoch:
            raise UserError("initial_epoch goes with epochs=; with steps= leave it out.")

    @property
    def whole_epochs(self) -> bool:
        """True if an epoch is one pass over the data."""
        return self.steps is None and self.steps_per_epoch is None

    def timetable(self, options: TrainConfig, epoch: Epoch | None) -> Timetable:
        """Returns the timetable of the run.

        Args:
            options: of training.
            epoch: of the data, where `whole_epochs`.
        """
        if self.steps is not None:
            return Timetable(options, self.steps, self.eval_every or self.steps)
        each = epoch.steps if epoch is not None else self.steps_per_epoch or 1
        first = self.initial_epoch * each
        alone = epoch is not None and epoch.last is not None
        return Timetable(options, (self.epochs or 1) * each, each, first, alone)


def options_of(options: TrainConfig | None) -> TrainConfig:
    """Returns a validated copy of the options of a trainer; the defaults for None.

    Raises:
        UserError: they are no `TrainConfig`, or one is not allowed.
    """
    if not isinstance(options, TrainConfig | None):
        raise UserError(
            f"options is {type(options).__name__} {options!r}: pass "
            "tftpu.TrainConfig(steps_per_loop=…)."
        )
    options = TrainConfig() if options is None else dataclasses.replace(options)
    options.validate()
    return options


def check_length(options: TrainConfig, epochs: int | None, steps: int | None) -> None:
    """Raises `UserError` for a length that only the options give, where `fit` does not look."""
    given = {"epochs": options.epochs, "steps": options.steps}
    if epochs is None and steps is None and given != {"epochs": None, "steps": TrainConfig().steps}:
        shown = ", ".join(f"{name}={value}" for name, value in given.items() if value is not None)
        raise UserError(
            f"The options say {shown}, and fit() got no length: pass fit(…, {shown}), because "
            "the options of a Trainer leave it to fit()."
        )


def workdir_of(workdir: StrPath | None) -> str | None:
    """Returns the path of a workdir; raises `UserError` for one that nothing can lock."""
    if workdir is not None:
        check_folder("workdir", str(workdir))
    return None if workdir is None else str(workdir)


def data_of_fit(
    arrays: tuple[Any, Any, Any], batch_size: int | None, steps_per_epoch: int | None,
    shuffle: bool, seed: int, validation: Any, fraction: float, validation_steps: int | None,
    validation_batch_size: int | None,
) -> tuple[Dataset, Dataset]:  # fmt: skip
    """Returns the data to train on, as an engine takes them, and those to validate on, or None.

    Args:
        arrays: `x`, `y` and `sample_weight` of `fit`.
        seed: of the order.
        validation, fraction: `validation_data` and `validation_split` of `fit`.
        batch_size, steps_per_epoch, shuffle, validation_steps, validation_batch_size: as for `fit`.

    Raises:
        UserError: neither arrays nor data sets, or arguments that do not go with them.
    """
    if fraction and validation is None:
        arrays, validation = split(*arrays, fraction)
    dataset = training_data(
        *arrays, batch_size=batch_size, steps_per_epoch=steps_per_epoch, shuffle=shuffle, seed=seed
    )
    size = validation_batch_size or batch_size
    return dataset, validation_data(validation, batch_size=size, steps=validation_steps)


def training_data(
    x: Any, y: Any, sample_weight: Any, *,
    batch_size: int | None, steps_per_epoch: int | None, shuffle: bool, seed: int,
) -> Dataset:  # fmt: skip
    """Returns the data to train on, as an engine takes them.

    Args:
        x, y, sample_weight, batch_size, steps_per_epoch, shuffle: as for `fit`.
        seed: of the order.

    Raises:
        UserError: neither arrays nor a data set, or arguments that do not go with it.
    """
    if shuffle not in (True, False):
        raise UserError(f"shuffle is {shuffle!r}: it must be True or False.")
    if not _is_arrays(x):
        _refuse_beside_dataset(x, y, sample_weight, batch_size, "fit")
        if isinstance(x, keras.utils.PyDataset):
            return PyBatches(x, shuffle, seed)
        return x
    if y is None and sample_weight is None and _is_like_pair(x):
        raise UserError(
            "The arrays came as one tuple: write fit(x, y, ...), with features and labels as two "
            "arguments (and several features as a list)."
        )
    if batch_size is None and steps_per_epoch is not None:
        batch_size = math.ceil(_count(x) / steps_per_epoch)
    refuse_fraction("batch_size", batch_size, 1)
    size = batch_size or BATCH_SIZE
    return as_arrays(x, y, sample_weight, batch_size=size, shuffle=shuffle, seed=seed)


def evaluation_data(
    x: Any, y: Any = None, sample_weight: Any = None, *,
    batch_size: int | None = None, steps: int | None = None, name: str = "evaluate",
) -> Dataset:  # fmt: skip
    """Returns the data of an evaluation or a prediction as a finite data set of batches.

    Args:
        x, y, sample_weight, batch_size, steps: as for `evaluate`.
        name: of the method that they were given to.

    Raises:
        UserError: neither arrays nor a data set, or arguments that do not go with it.
    """
    refuse_fraction("steps", steps, 1)
    if _is_arrays(x):
        refuse_fraction("batch_size", batch_size, 1)
        if batch_size is None and steps is not None:  # all examples, as in Keras
            batch_size, steps = math.ceil(_count(x) / steps), None
        dataset = as_arrays(x, y, sample_weight, batch_size=batch_size or BATCH_SIZE)
    else:
        _refuse_beside_dataset(x, y, sample_weight, batch_size, name)
        dataset = PyBatches(x) if isinstance(x, keras.utils.PyDataset) else x
    if steps is None:
        return dataset
    if not hasattr(dataset, "take"):
        raise UserError(f"steps= does not go with a {type(x).__name__}: leave it out.")
    return dataset.take(steps)


def validation_data(
    given: Any, *, batch_size: int | None, steps: int | None
) -> Dataset:  # fmt: skip
    """Returns the data of `validation_data=` as a finite data set of batches; None if None.

    Args:
        given: `(x, y)`, `(x, y, sample_weight)`, or a data set.
        batch_size: for arrays.
        steps: number of batches; None: all.

    Raises:
        UserError: neither arrays nor a data set.
    """
    if given is None:
        if steps is not None:
            raise UserError("validation_steps needs validation_data=.")
        return None
    if isinstance(given, list | tuple):
        if len(given) not in (2, 3):
            raise UserError(
                f"validation_data has {len(given)} parts: pass (x, y) or "
                "(x, y, sample_weight), or a data set."
            )
        return evaluation_data(*given, batch_size=batch_size, steps=steps)
    if _is_arrays(given):
        raise UserError(
            "validation_data holds features without labels: pass (x, y) or (x, y, sample_weight)."
        )
    return evaluation_data(given, steps=steps)


def split(x: Any, y: Any, sample_weight: Any, fraction: float) -> tuple[tuple, tuple]:
    """Returns the arrays to train on, and the last part of them, to validate on.

    Args:
        x, y, sample_weight: as for `fit`.
        fraction: `validation_split`.

    Raises:
        UserError: no arrays, or a fraction that leaves one part empty.
    """
    if not 0 < fraction < 1:
        raise UserError(f"validation_split is {fraction}: it must be between 0 and 1.")
    if not _is_arrays(x):
        raise UserError(
            f"validation_split cuts arrays, and the data is a {type(x).__name__}: pass "
            "validation_data=, such as dataset.take(n), and train on dataset.skip(n)."
        )
    given = (x, y, sample_weight)
    count = as_arrays(x, y, sample_weight, batch_size=1).count
    at = math.floor(count * (1.0 - fraction))
    if not 0 < at < count:
        raise UserError(
            f"validation_split={fraction} of {count} examples leaves one part empty: choose "
            "another fraction."
        )

    def part(start: int, end: int) -> tuple:
        return tuple(None if p is None else _slice_part(p, start, end) for p in given)

    return part(0, at), part(at, count)


def callback_list(callbacks: Any) -> list[keras.callbacks.Callback]:
    """Returns callbacks as a list.

    Args:
        callbacks: one, several, Keras's `CallbackList`, or None.

    Raises:
        UserError: something else is among them.
    """
    if isinstance(callbacks, keras.callbacks.CallbackList):
        callbacks = callbacks.callbacks
    if callbacks is None:
        return []
    listed = [callbacks] if not isinstance(callbacks, list | tuple) else list(callbacks)
    for callback in listed:
        if not isinstance(callback, keras.callbacks.Callback):
            what = "a class" if isinstance(callback, type) else f"a {type(callback).__name__}"
            raise UserError(
                f"callbacks holds {what}: pass keras.callbacks.Callback objects, such as "
                "[keras.callbacks.EarlyStopping(patience=3)]."
            )
    # The history is made anew for each run.
    return [callback for callback in listed if type(callback) is not keras.callbacks.History]


def refuse_misplaced(y: Any, sample_weight: Any, class_weight: Any, own_loss: bool) -> None:
    """Raises `UserError` for a length where the labels belong, and for weights of a wrong kind.

    Args:
        y, sample_weight, class_weight: of `fit`.
        own_loss: whether a loss function computes the loss, which tftpu cannot weigh.
    """
    if isinstance(y, int | float):
        raise UserError(f"The length of a run is a keyword: write fit(data, steps={y}).")
    if sample_weight is not None and class_weight is not None:
        raise UserError("sample_weight and class_weight exclude each other: multiply them.")
    if sample_weight is not None and own_loss:
        warnings.warn(
            "sample_weight goes to the loss function as batch[2], which must apply it itself.",
            stacklevel=4,
        )
    if class_weight is None:
        return
    if own_loss:
        raise UserError(
            "class_weight goes with a compiled loss: a loss function weighs its examples itself, "
            "loss * weights_of(labels)."
        )
    if not isinstance(class_weight, dict):
        raise UserError(
            f"class_weight is {class_weight!r}: it must be a dict, such as {{0: 1.0, 1: 5.0}}."
        )
    for label, weight in class_weight.items():
        is_number = isinstance(label, int | float | np.number)
        if not is_number or not 0 <= label < math.inf or np.floor(label) != label:
            raise UserError(
                f"class_weight has the label {label!r}: labels are whole numbers from 0 on."
            )
        if not isinstance(weight, int | float | np.number) or not 0 <= weight < math.inf:
            raise UserError(
                f"class_weight has the weight {weight!r} for the label {label}: it must be a "
                "finite number, 0 or more."
            )


def refuse_list(return_dict: bool) -> None:
    """Raises `UserError` for results that were asked for as a list, Keras's default."""
    if not return_dict:
        raise UserError("evaluate returns a dictionary: leave return_dict out.")


def verbosity(verbose: Any) -> int:
    """Returns Keras's `verbose` as 0, 1 or 2.

    Raises:
        UserError: a value that Keras does not have.
    """
    if verbose not in ("auto", 0, 1, 2):  # False is 0, and True is 1
        raise UserError(f"verbose is {verbose!r}: it must be 'auto', 0, 1 or 2.")
    return 1 if verbose == "auto" else int(verbose)


def refuse_fraction(name: str, value: Any, least: int) -> None:
    """Raises `UserError` unless a number is whole and at least `least`, or None."""
    if value is None:
        return
    if isinstance(value, bool) or not hasattr(value, "__index__") or value < least:
        raise UserError(
            f"{name} is {value!r}: it must be a whole number, {least} or more, or None."
        )


def _is_arrays(x: Any) -> bool:
    """Returns whether data are arrays, or nests of them, and not a data set of its own kind."""
    return isinstance(x, list | tuple | dict) or (hasattr(x, "shape") and hasattr(x, "__array__"))


def _is_like_pair(x: Any) -> bool:
    return isinstance(x, tuple) and len(x) in (2, 3)


def _count(x: Nest) -> int:
    return as_arrays(x, batch_size=1).count


def _slice_part(part: Nest, start: int, end: int) -> Nest:
    if isinstance(part, list | tuple):
        return [_slice_part(item, start, end) for item in part]
    if isinstance(part, dict):
        return {key: _slice_part(item, start, end) for key, item in part.items()}
    return part[start:end]  # rows, of a pandas frame as well


def _refuse_beside_dataset(x: Any, y: Any, sample_weight: Any, batch_size: Any, name: str) -> None:
    """Raises `UserError` for what is not a data set, and for arguments that one holds."""
    kind = type(x).__name__
    if isinstance(x, type) or x is None or isinstance(x, str | bytes | int | float):
        raise UserError(f"The data is {x!r}: pass arrays or a data set, {name}(x, y).")
    if hasattr(x, "__next__"):
        raise UserError(
            f"The data is a {kind}, which cannot start at any step: wrap it in a "
            "keras.utils.PyDataset, or in tf.data.Dataset.from_generator(...).batch(size)."
        )
    for argument, value in (("y", y), ("sample_weight", sample_weight)):
        if value is not None:
            raise UserError(
                f"{argument} goes with arrays, and the data is a {kind}: its batches must hold "
                "(x, y) or (x, y, sample_weight) themselves."
            )
    if batch_size is not None:
        raise UserError(
            f"batch_size goes with arrays, and the data is a {kind}, which is batched itself: "
            "leave it out."
        )
