"""The weights beside a SavedModel of `run_fn`, with which a later run begins."""

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

# Where TensorFlow leaves room for what others keep in a SavedModel.
WEIGHTS = "assets.extra/tftpu.weights.h5"


def write(model: keras.Model, folder: str) -> None:
    """Writes the weights of a model into its SavedModel, as Keras names them."""
    export.write_weights(model, {}, files.join(folder, WEIGHTS))


def choose_initializer(base_model: str | None) -> Callable[[Experiment, Trainer], str]:
    """Returns what gives a new run its first weights, as `launch.training.train` takes it.

    Args:
        base_model: SavedModel of an earlier run; None: there is none, and the config decides.

    Raises:
        UserError: `run_fn` did not write that SavedModel.
    """
    if not base_model:
        return load_initial_weights
    path = files.join(base_model, WEIGHTS)
    if not files.exists(path):
        raise UserError(
            f"The base model {base_model!r} has no {WEIGHTS}, so that tftpu.launch.tfx.run_fn did "
            "not write it: begin with weights of a file, by model.init_from, or leave base_model "
            "out."
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
                    f"The base model {base_model!r} is another model than that of the config: "
                    f"leave base_model out, or train the same ({error})."
                ) from error
        return f"Weights from {path}."

    return begin
