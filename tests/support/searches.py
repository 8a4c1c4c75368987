"""Searches of a model that compiles in a second, in this process and in others."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.support import warm
from tftpu.launch.search import space
from tftpu.launch.search.plan import Plan
from tftpu.launch.search.trials import Trials
from tftpu.launch.settings import config_flags

SPACE = "--space=optimizer.learning_rate=log:1e-3..1"
TINY = (
    *("search", "--config=digits_resnet", "--config.cluster.tpu=none"),
    *("--config.model.width=8", "--config.model.blocks=(1,)", "--config.model.norm_batch=8"),
    *("--config.data.global_batch_size=16", "--config.train.steps=20"),
    *("--config.train.eval_every=5", "--config.train.steps_per_loop=5", SPACE),
)


def started(*words: str, environment: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
    """Starts the command line in its own process."""
    return warm.Popen(
        [sys.executable, "-m", "tftpu.launch.main", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | dict(environment or {}),
        start_new_session=True,  # a signal to its group is none to the tests
    )


def table(workdir: str) -> list[dict[str, Any]]:
    """Returns what the journal itself says of each trial, read without Optuna.

    Each has "state", "told" (how often it was finished), "overrides", "value" and "reports".
    """
    from tftpu.storage import files

    folder = files.join(workdir, "study")
    entries = []
    for name in sorted(name for name in files.list_names(folder) if name.endswith(".jsonl")):
        lines = files.read(files.join(folder, name)).decode().splitlines()
        entries += [json.loads(line) for line in lines]
    trials: list[dict[str, Any]] = []
    for entry in entries:
        if "trial_id" not in entry:
            if entry["op_code"] == _CREATE:
                trials.append({"told": 0, "reports": {}, "overrides": None, "value": None})
            continue
        trial = trials[entry["trial_id"]]
        if "state" in entry:
            trial |= {"state": entry["state"], "value": (entry["values"] or [None])[0]}
            trial["told"] += entry["state"] != 0
        elif "intermediate_value" in entry:
            assert entry["step"] not in trial["reports"]
            trial["reports"][entry["step"]] = entry["intermediate_value"]
        elif "overrides" in entry.get("user_attr", {}):
            trial["overrides"] = entry["user_attr"]["overrides"]
    return trials


_CREATE = 4


def result(workdir: Path, number: int) -> dict[str, Any]:
    """Returns the result of a trial's run."""
    return json.loads((workdir / "trials" / f"{number:04d}" / "run" / "result.json").read_text())


SPACE = ("optimizer.learning_rate=log:1e-4..1", "model.width=uniform:8..1000")


def plan(**fields):
    known = {"config": "digits_resnet", "overrides": (), "space": SPACE, "trials": 12}
    return Plan(**{**known, "metric": "accuracy", "fields": {}, **fields})


def trials_of(one, workdir):
    dimensions = space.parse(one.space, config_flags.load(one.config, []))
    study = one.open_study(str(workdir))
    return study, Trials(one, str(workdir), study, dimensions)
