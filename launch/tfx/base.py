"""The weights in a SavedModel of `run_fn`, from which a later run can begin."""

import tempfile
from collections.abc import Callable
from pathlib import Path

import keras

from tftpu.config import Experiment
from tftpu.errors import UserError
from tftpu.inference import export
from tftpu.launch.run.experiment import load_initial_weights
from tftpu.storage import files
from tftpu.training.trainer import Trainer

# The place that TensorFlow reserves in a SavedModel for other programs' files.
WEIGHTS = "assets.extra/tftpu.weights.h5"


def write(model: keras.Model, folder: str) -> None:
    """Writes the weights of a model into its SavedModel, as a Keras weights file."""
    export.write_weights(model, {}, files.join(folder, WEIGHTS))


def choose_initializer(base_model: str | None) -> Callable[[Experiment, Trainer], str]:
    """Returns a function that sets the first weights of a new run; see `launch.run.training.train`.

    Args:
        base_model: the SavedModel of an earlier run; None: the config chooses the first weights.

    Raises:
        UserError: `run_fn` did not write that SavedModel.
    """
    if not base_model:
        return load_initial_weights
    path = files.join(base_model, WEIGHTS)
    if not files.exists(path):
        raise UserError(
            f"The base model {base_model!r} has no {WEIGHTS}, so tftpu.launch.tfx.run_fn did not "
            "write it. Leave base_model out, or load weights from a file with model.init_from."
        )
    weights = files.read(path)

    def begin(experiment: Experiment, trainer: Trainer) -> str:
        if trainer.has_checkpoint():
            return ""
        with tempfile.TemporaryDirectory() as folder:
            local = Path(folder) / "base.weights.h5"
            local.write_bytes(weights)
            try:
                trainer.model.load_weights(str(local))
            except (ValueError, KeyError) as error:
                raise UserError(
                    f"The base model {base_model!r} differs from the config's model ({error}): "
                    "leave base_model out, or train the same model."
                ) from error
        return f"Weights from {path}."

    return begin
