"""A run in a workdir: its experiment, and its trainer with the best checkpoint."""

from typing import TYPE_CHECKING, Any, NamedTuple

from tftpu.config import Experiment, from_json
from tftpu.errors import UserError
from tftpu.launch.startup import import_tensorflow
from tftpu.storage import files

if TYPE_CHECKING:
    import tensorflow as tf

    from tftpu.training.trainer import Trainer


class Restored(NamedTuple):
    """A run with its best checkpoint.

    Attributes:
        trainer: with the weights of the checkpoint.
        step: of the checkpoint.
        evaluation: the evaluation split.
    """

    trainer: "Trainer"
    step: int
    evaluation: "tf.data.Dataset | Any"


def experiment_of(workdir: str) -> Experiment:
    """Loads the experiment of a workdir; its devices are selected again.

    Raises:
        UserError: there is no run in the workdir.
    """
    path = files.join(workdir, "config.json")
    if not files.exists(path):
        raise UserError(f"There is no run in {workdir!r}: it has no config.json.")
    experiment = from_json(files.read(path))
    experiment.cluster.tpu, experiment.cluster.virtual_devices = "auto", None
    return experiment


def restored(experiment: Experiment, workdir: str) -> Restored:
    """Restores the best checkpoint of a run, or the newest if none is best.

    Raises:
        UserError: there is no checkpoint yet.
    """
    import_tensorflow()
    import tftpu
    from tftpu import input_pipelines
    from tftpu.launch import experiment as build

    engine = tftpu.connect(experiment.cluster.tpu, experiment.cluster.virtual_devices)
    tftpu.set_precision(experiment.train.precision)
    with engine.scope():
        trainer = build.build_trainer(experiment, workdir)
    evaluation = input_pipelines.evaluation(experiment.data)
    found = trainer.restore_for_evaluation(evaluation)
    if found is None:
        raise UserError(f"There is no complete checkpoint in {workdir!r} yet.")
    return Restored(trainer, found.step, evaluation)
