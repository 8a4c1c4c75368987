"""Predictions of `tftpu preflight` that are in a workdir."""

from typing import Any

from tftpu.storage import files, side_files

FILE = "preflight.json"


def step_times(workdir: str, replicas: int) -> str:
    """Returns the step times predicted for a number of replicas, as "v3-8: 123 ms"; "" if none."""
    found = [
        f"{item['slice']}: {item['step_ms']:.3g} ms"
        for item in _slices(workdir)
        if item["step_ms"] and item["replicas"] == replicas
    ]
    return ", ".join(found)


def rates(workdir: str) -> dict[str, float]:
    """Returns the examples per second that each slice is predicted to take, by its name."""
    return {
        item["slice"]: item["examples_per_second"]
        for item in _slices(workdir)
        if item.get("examples_per_second")
    }


def _slices(workdir: str) -> list[dict[str, Any]]:
    record = side_files.read(files.join(workdir, FILE), "slices")
    return record["slices"] if record else []
