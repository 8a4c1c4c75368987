"""The verdicts of earlier plans: `plan.jsonl` in a workdir, one line for each candidate compiled.

The key of a line is a digest of all that the verdict depends on: the config, except its length and
the fields that a plan chooses; the code of tftpu and of the config; the installed packages,
including libtpu; and the environment variables that the compiler reads.
"""

import dataclasses
import hashlib
import json
import os
import threading
from pathlib import Path
from typing import Any

from tftpu.config import Experiment, to_json
from tftpu.engines.lowered import StateBytes
from tftpu.launch.plan.bounds import Facts
from tftpu.launch.plan.candidates import Candidate, Space
from tftpu.launch.plan.search import Verdict
from tftpu.launch.preflight import known_reports
from tftpu.launch.settings import keras_objects
from tftpu.storage import files, side_files
from tftpu.storage.lines import Lines
from tftpu.version import __version__

FILE = "plan.jsonl"
_READ = ("XLA_", "LIBTPU_", "JAX_", "KERAS_", "TF_")  # prefixes of environment variables in the key


def compute_key(space: Space) -> str:
    """Returns the key of a config's lines in `plan.jsonl`; see the module's docstring.

    Raises:
        UserError: the config contains a value that JSON cannot represent.
    """
    train = dataclasses.replace(space.experiment.train, steps=1, epochs=None, eval_every=0)
    experiment = dataclasses.replace(space.experiment, train=train, config_file="")
    plain = to_json(keras_objects.describe_callbacks(_set_aside_choices(space, experiment)))
    environment = {k: v for k, v in os.environ.items() if k.startswith(_READ)}
    own = {path: hashlib.sha256(Path(path).read_bytes()).hexdigest() for path in _list_code()}
    parts = plain, environment, own, known_reports.hash_code(), __version__
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def _set_aside_choices(space: Space, experiment: Experiment) -> Experiment:
    """Returns the experiment with fixed values in the fields that a plan chooses."""
    anyone = Candidate("", "", "none", 1, "plain" if space.has_attention else "")
    return Space(experiment).apply(anyone)


def _list_code() -> list[str]:
    return [path for path in known_reports.list_own_code() if os.path.isfile(path)]


class Journal:
    """The facts and verdicts about a config in a workdir's `plan.jsonl`.

    Args:
        workdir: the workdir, local or remote; it is created if it is missing.
        key: see `compute_key`.

    Raises:
        OSError: the workdir cannot be created, or its file cannot be read.
        ValueError: its `plan.jsonl` is not a regular file.
    """

    def __init__(self, workdir: str, key: str):
        path = files.join(workdir, FILE)
        files.make_folder(workdir)
        self._key, self._lock = key, threading.Lock()
        self.facts: Facts | None = None
        self.verdicts: dict[Candidate, Verdict] = {}
        data = side_files.read_content(path) if side_files.is_there(path) else b""
        for line in data.split(b"\n"):
            try:
                self._read(json.loads(line))
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                continue  # damaged, or half written by a plan that was killed
        self._lines = Lines(path)
        if data and not data.endswith(b"\n"):
            self._lines.append("\n")

    def _read(self, record: dict[str, Any]) -> None:
        if record["key"] != self._key:
            return
        if "facts" in record:
            found = record["facts"]
            states = {
                name: state if isinstance(state, str) else StateBytes(*state)
                for name, state in found["states"].items()
            }
            self.facts = Facts(**{**found, "states": states})
        else:
            self.verdicts[Candidate(**record["candidate"])] = Verdict(**record["verdict"])

    def write_facts(self, facts: Facts) -> None:
        """Adds the facts about the config."""
        self.facts = facts
        self._write(facts=dataclasses.asdict(facts))

    def write_verdict(self, candidate: Candidate, verdict: Verdict) -> None:
        """Adds the verdict on a candidate."""
        self.verdicts[candidate] = verdict
        self._write(candidate=dataclasses.asdict(candidate), verdict=dataclasses.asdict(verdict))

    def _write(self, **record: Any) -> None:
        with self._lock:
            self._lines.append(json.dumps({"key": self._key, **record}) + "\n")
            self._lines.flush()
