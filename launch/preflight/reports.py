"""Reports that `tftpu preflight` wrote earlier, in a workdir or elsewhere."""

import hashlib
import json
import math
from typing import TYPE_CHECKING, Any

from tftpu.amounts import format_duration
from tftpu.config import Experiment
from tftpu.config.serialization import to_plain
from tftpu.errors import UserError, did_you_mean
from tftpu.launch.settings import config_flags
from tftpu.storage import files, side_files

if TYPE_CHECKING:
    from tftpu.preflight import Report
    from tftpu.tensors import Nest

FILE = "preflight.json"


def is_config(given: str) -> bool:
    """Returns whether a value of `--compare` is a config; otherwise it is a report."""
    return given.endswith(".py") or given in config_flags.list_names()


def read(flag: str, given: str) -> "Report":
    """Reads a report, given its file or the workdir that it is in.

    Args:
        flag: name of the flag, for errors.
        given: the value of the flag.

    Raises:
        UserError: there is no report, it is damaged, or another version wrote it.
    """
    from tftpu.preflight.saved import read_report

    path = given if given.endswith(".json") else files.join(given, FILE)
    if not files.exists(path):
        near = did_you_mean(given, config_flags.list_names()) if flag == "compare" else ""
        raise UserError(
            f"--{flag}={given}: there is no report {path}. Give a {FILE} that `tftpu preflight` "
            f"has written, or its folder{', or a config' if near else ''}.{near}"
        )
    return read_report(path)


def read_step_times(workdir: str, replicas: int) -> str:
    """Returns the predicted step times for a number of replicas, as "v3-8: 123 ms"; "" if none."""
    found = [
        f"{item['slice']}: {format_duration(item['step_ms'] / 1e3)}"
        for item in _read_slices(workdir)
        if item.get("step_ms") and item.get("replicas") == replicas
    ]
    return ", ".join(found)


def compute_settings(experiment: Experiment, batch_spec: "Nest") -> str:
    """Returns a digest of the settings on which a step's price mainly depends, except the slice.

    Args:
        experiment: the experiment.
        batch_spec: the spec of its global batch.

    Returns:
        The digest; "" if JSON cannot represent the model's fields.
    """
    try:
        model = to_plain(experiment.model.without_weights())
    except UserError:
        return ""
    train, cluster = experiment.train, experiment.cluster
    chosen = (train.precision, train.gradient_accumulation_steps, train.remat)
    parts = [model, str(batch_spec), *chosen, cluster.engine, cluster.mesh]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def read_settings(workdir: str) -> str | None:
    """Returns the digest of a workdir's report (see `compute_settings`); None without a report."""
    record = side_files.read(files.join(workdir, FILE), slices=list)
    return str(record.get("settings", "")) if record else None


def describe_other(settings: str) -> str:
    """Returns how a report with another digest may differ; `settings` is that digest or ""."""
    other = "of another model, batch, precision or mesh"
    return other if settings else f"of an older tftpu, or {other}"


def read_rates(workdir: str) -> dict[str, float]:
    """Returns the predicted examples per second of each slice, by its name."""
    return {
        item["slice"]: item["examples_per_second"]
        for item in _read_slices(workdir)
        if item.get("examples_per_second")
    }


def _read_slices(workdir: str) -> list[dict[str, Any]]:
    record = side_files.read(files.join(workdir, FILE), slices=list)
    found = record["slices"] if record else []
    return [item for item in found if _is_slice(item)]


def _is_slice(item: Any) -> bool:
    """Returns whether an item of a report is the result for a slice, in the expected form."""
    if not isinstance(item, dict) or not side_files.is_text(item.get("slice")):
        return False
    numbers = (item.get(name) for name in ("step_ms", "replicas", "examples_per_second"))
    return all(n is None or (isinstance(n, int | float) and math.isfinite(n)) for n in numbers)
