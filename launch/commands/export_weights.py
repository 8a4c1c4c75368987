"""`tftpu export-weights`: the best weights of a run in one file, without the optimizer."""

from tftpu.errors import UserError
from tftpu.launch.commands import evaluate


def run(workdir: str | None, to: str | None) -> None:
    """Writes the weights of the best checkpoint, or of the newest if none is best."""
    if not to or not to.endswith((".weights.h5", ".safetensors")):
        raise UserError(
            "tftpu export-weights needs --to=FILE, which ends in .weights.h5 or .safetensors."
        )
    experiment = evaluate.experiment_of("export-weights", workdir, "auto", None)
    trainer, step, _ = evaluate.restored(experiment, workdir)
    trainer.export_weights(to)
    print(f"step {step}: {trainer.model.count_params():,} weights in {to}")
