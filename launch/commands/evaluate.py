"""`tftpu evaluate`: the best checkpoint of a run over the whole evaluation split."""

from tftpu.config import Experiment, from_json
from tftpu.errors import UserError
from tftpu.storage import files


def run(workdir: str | None, tpu: str, virtual_devices: int | None) -> None:
    """Prints the loss and the metrics of the best checkpoint, or of the newest if none is best."""
    experiment = experiment_of("evaluate", workdir, tpu, virtual_devices)
    trainer, step, test = restored(experiment, workdir)
    results = trainer.evaluate(test)
    numbers = "  ".join(f"{name} {value:.4f}" for name, value in results.items())
    print(f"step {step}  {numbers}")


def experiment_of(
    command: str, workdir: str | None, tpu: str, virtual_devices: int | None
) -> Experiment:
    """The experiment of a workdir, on other hardware.

    Raises:
        UserError: there is no run in the workdir.
    """
    if not workdir:
        raise UserError(f"tftpu {command} needs --workdir=DIR, as runs/digits_resnet.")
    path = files.join(workdir, "config.json")
    if not files.exists(path):
        raise UserError(f"There is no run in {workdir!r}: it has no config.json.")
    experiment = from_json(files.read(path).decode())
    experiment.cluster.tpu, experiment.cluster.virtual_devices = tpu, virtual_devices
    experiment.cluster.validate()
    return experiment


def restored(experiment: Experiment, workdir: str) -> tuple:
    """The trainer with the best checkpoint of a run, its step, and the evaluation data.

    Raises:
        UserError: there is no checkpoint yet.
    """
    import tftpu
    from tftpu import input_pipelines
    from tftpu.launch import experiment as build

    engine = tftpu.connect(experiment.cluster.tpu, experiment.cluster.virtual_devices)
    tftpu.set_precision(experiment.train.precision)
    with engine.scope():
        trainer = build.build_trainer(experiment, workdir)
    test = input_pipelines.evaluation(experiment.data)
    found = trainer.restore_for_evaluation(test)
    if found is None:
        raise UserError(f"There is no whole checkpoint in {workdir!r} yet.")
    return trainer, found.step, test
