"""Predictions of `tftpu preflight` that are in a workdir."""

import math
from typing import Any

from tftpu.amounts import format_duration
from tftpu.storage import files, side_files

FILE = "preflight.json"


def read_step_times(workdir: str, replicas: int) -> str:
    """Returns the step times predicted for a number of replicas, as "v3-8: 123 ms"; "" if none."""
    found = [
        f"{item['slice']}: {format_duration(item['step_ms'] / 1e3)}"
        for item in _read_slices(workdir)
        if item.get("step_ms") and item.get("replicas") == replicas
    ]
    return ", ".join(found)


def read_rates(workdir: str) -> dict[str, float]:
    """Returns the examples per second that each slice is predicted to take, by its name."""
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
    """Returns whether an item is one that `tftpu preflight` writes."""
    if not isinstance(item, dict) or not isinstance(item.get("slice"), str):
        return False
    numbers = (item.get(name) for name in ("step_ms", "replicas", "examples_per_second"))
    return all(n is None or (isinstance(n, int | float) and math.isfinite(n)) for n in numbers)
