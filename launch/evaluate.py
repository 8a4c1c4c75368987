"""`tftpu evaluate`: the best checkpoint of a run over the whole evaluation split."""

from tftpu import files
from tftpu.config import Experiment, from_json
from tftpu.errors import UserError


def run(workdir: str | None, tpu: str, replicas: int | None) -> None:
    """Prints the loss and the metrics of the best checkpoint, or of the newest if none is best."""
    if not workdir:
        raise UserError("tftpu evaluate needs --workdir=DIR, as runs/digits_resnet.")
    path = files.join(workdir, "config.json")
    if not files.exists(path):
        raise UserError(f"There is no run in {workdir!r}: it has no config.json.")
    experiment = from_json(files.read(path).decode())
    experiment.cluster.tpu, experiment.cluster.replicas = tpu, replicas
    experiment.cluster.validate()
    _evaluate(experiment, workdir)


def _evaluate(experiment: Experiment, workdir: str) -> None:
    import tftpu
    from tftpu import input_pipelines
    from tftpu.launch import experiment as build

    strategy = tftpu.connect(experiment.cluster.tpu, experiment.cluster.replicas)
    tftpu.set_precision(experiment.train.precision)
    with strategy.scope():
        trainer = build.build_trainer(experiment, workdir, verbose=False)
    test = input_pipelines.evaluation(experiment.data)
    restored = trainer.restore_for_evaluation(test)
    if restored is None:
        raise UserError(f"There is no whole checkpoint in {workdir!r} yet.")
    results = trainer.evaluate(test)
    numbers = "  ".join(f"{name} {value:.4f}" for name, value in results.items())
    print(f"step {restored.step}  {numbers}")
