"""`result.json` in the workdir of a run or a search: the result, for other programs."""

import json
import math
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict, cast

from tftpu.storage import files, side_files
from tftpu.storage.own_files import OwnFile

if TYPE_CHECKING:
    from tftpu.training.trainer import Trainer

FILE = "result.json"


class BestCheckpoint(NamedTuple):
    """The checkpoint that is marked as the best, as in `checkpoints/best`.

    Attributes:
        step: the step of the checkpoint.
        metric: the name of the evaluation metric.
        value: the value of the metric.
    """

    step: int
    metric: str
    value: float


class RunResult(TypedDict):
    """The result of a run that is over.

    Attributes:
        steps: the number of training steps that were done.
        seconds: wall time of the run, summed over its starts.
        usd: the cost in dollars at the on-demand list price; null if the machine's price is
            unknown.
        evaluation: the metrics of the last evaluation by name; null for a value that is not finite.
        best: the step, the metric and the value of the best checkpoint; null if none is marked.
    """

    steps: int
    seconds: float
    usd: float | None
    evaluation: dict[str, float | None]
    best: dict[str, Any] | None


class BestTrial(TypedDict):
    """The best trial of a search.

    Attributes:
        trial: the number of the trial.
        metric: the metric that the search compares.
        value: the value of the metric.
        overrides: arguments of `tftpu train` that set the trial's values.
    """

    trial: int
    metric: str
    value: float | None
    overrides: list[str]


class SearchResult(TypedDict):
    """The result of a search with at least one complete trial.

    Attributes:
        trials: the number of trials.
        complete: the number of complete trials.
        best: the best trial.
    """

    trials: int
    complete: int
    best: BestTrial


def write(trainer: "Trainer", evaluation: dict[str, float], workdir: str) -> None:
    """Writes the result of a run that is over.

    Args:
        trainer: the trainer after `fit`.
        evaluation: metrics of the last evaluation; a value that is not finite becomes null.
        workdir: folder of the run, locked by this process.
    """
    best = read_best(workdir)
    record: RunResult = {
        "steps": trainer.step,
        "seconds": round(sum(trainer.account.sum_seconds().values()), 1),
        "usd": trainer.account.facts.usd,
        "evaluation": {
            name: value if math.isfinite(value) else None for name, value in evaluation.items()
        },
        "best": best._asdict() if best else None,
    }
    OwnFile(workdir, FILE).write(_encode(record))


def read(workdir: str) -> RunResult | None:
    """Returns the result of a run; None if it is not over."""
    found = side_files.read(files.join(workdir, FILE), steps=int, evaluation=dict)
    return cast(RunResult | None, found)


def read_best(workdir: str) -> BestCheckpoint | None:
    """Returns the checkpoint that is marked as the best; None if none is."""
    path = files.join(workdir, "checkpoints", "best")
    found = side_files.read(path, step=int, metric=str, value=float)
    return BestCheckpoint(found["step"], found["metric"], found["value"]) if found else None


def write_search(record: SearchResult, workdir: str) -> None:
    """Writes the result of a search."""
    files.write_whole(files.join(workdir, FILE), _encode(record))


def read_search(workdir: str) -> SearchResult:
    """Returns the result of a search. Raises `OSError` if no trial is complete yet."""
    return json.loads(files.read(files.join(workdir, FILE)))


def _encode(record: Any) -> bytes:
    return (json.dumps(record, indent=2) + "\n").encode()
