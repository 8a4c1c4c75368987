"""A writer for trials of hyper-parameter tuning jobs on Vertex AI.

The service's agent reads a local file of JSON lines, in the format of Google's package
cloudml-hypertune. The service names the file and the trial in the environment.
"""

import json
import math
import os
import time
from collections.abc import Mapping
from typing import Any

from tftpu.errors import UserError
from tftpu.observe.writers import Writer

FILE = "/tmp/hypertune/output.metrics"  # the agent's default path, if the environment names no file
NEWEST = 100  # number of last lines to keep, as in Google's package


class Hypertune(Writer):
    """A writer that reports one metric of every evaluation.

    The file has one line for each step: a resumed run, or one that rolled back, replaces the lines
    of the evaluations that it repeats.

    Args:
        metric: the evaluation metric by which the job compares trials. An evaluation without it is
            a failed write.
    """

    failures = (UserError,)

    def __init__(self, metric: str):
        self._metric = metric
        self._path = os.environ.get("CLOUD_ML_HP_METRIC_FILE", FILE)
        self._trial = os.environ.get("CLOUD_ML_TRIAL_ID", "0")
        try:
            os.makedirs(os.path.dirname(self._path) or ".", exist_ok=True)
            self._lines = _read(self._path, self._trial)
        except OSError as error:
            raise UserError(
                f"The writer 'hypertune' cannot use {self._path}: {error}. Set "
                "CLOUD_ML_HP_METRIC_FILE to another file, or remove 'hypertune' from the option "
                "train.writers."
            ) from error

    def write(self, step: int, split: str, scalars: Mapping[str, float]) -> None:
        if split != "eval":
            return
        if self._metric not in scalars:  # a model's own `test_step` may log anything
            raise UserError(
                f"the evaluation has no {self._metric!r}: set train.best_metric to what it has, "
                f"{', '.join(scalars)}"
            )
        # The service compares values, so it gets none that is not finite.
        if not math.isfinite(scalars[self._metric]):
            return
        earlier = [line for line in self._lines if int(line["global_step"]) < step]
        line = {
            "checkpoint_path": "",
            "global_step": str(step),
            "timestamp": time.time(),
            "trial": self._trial,
            self._metric: str(float(scalars[self._metric])),
        }
        self._lines = [*earlier, line][-NEWEST:]
        text = "".join(json.dumps(line, sort_keys=True) + "\n" for line in self._lines)
        # Written in place, as Google's package does, because the agent may keep the file open.
        with open(self._path, "w") as file:
            file.write(text)


def _read(path: str, trial: str) -> list[dict[str, Any]]:
    """Returns the lines that an earlier process of the trial wrote on this machine."""
    if not os.path.exists(path):
        return []
    found = []
    with open(path, encoding="utf-8", errors="replace") as file:
        for text in file:
            try:
                line = json.loads(text)
                if line["trial"] == trial and int(line["global_step"]) >= 0:
                    found.append(line)
            except (ValueError, KeyError, TypeError):
                continue  # an earlier process was killed while it wrote this line
    return found
