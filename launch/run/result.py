"""`result.json` in the workdir: what a run came to, for programs that read it."""

import json
import math
from typing import TYPE_CHECKING, Any

from tftpu.storage import files, side_files
from tftpu.storage.own_files import OwnFile

if TYPE_CHECKING:
    from tftpu.training.trainer import Trainer

FILE = "result.json"


def write(trainer: "Trainer", evaluation: dict[str, float], workdir: str) -> None:
    """Writes the result of a run that is over.

    Args:
        trainer: after `fit`.
        evaluation: metrics of the last evaluation; a value that is not finite becomes null.
        workdir: folder of the run, claimed by this process.
    """
    record = {
        "steps": trainer.step,
        "seconds": round(sum(trainer.account.seconds().values()), 1),
        "usd": trainer.account.facts.usd,
        "evaluation": {
            name: value if math.isfinite(value) else None for name, value in evaluation.items()
        },
        "best": read_best(workdir),
    }
    OwnFile(workdir, FILE).write((json.dumps(record, indent=2) + "\n").encode())


def read(workdir: str) -> dict[str, Any] | None:
    """Returns the result of a run; None if it is not over."""
    return side_files.read(files.join(workdir, FILE), steps=int, evaluation=dict)


def read_best(workdir: str) -> dict[str, Any] | None:
    """Returns the step, metric and value of the checkpoint that is marked as the best."""
    return side_files.read(
        files.join(workdir, "checkpoints", "best"), step=int, metric=str, value=float
    )
