"""`tftpu preflight`: whether a config compiles for TPU slices, whether it fits, what it costs."""

import json

from tftpu.config import Experiment
from tftpu.errors import UserError
from tftpu.launch.preflight_check import check, parse_prices, print_report
from tftpu.storage import files
from tftpu.tpu.slices import parse_slice


def run(
    experiment: Experiment,
    config: str,
    workdir: str | None,
    slices: str,
    json: str | None,
    explain: bool,
    price: str,
    verbose: bool,
    time_limit: int,
) -> None:
    """Prints the report, and writes it to `preflight.json` in the workdir and to --json."""
    if time_limit < 1:
        raise UserError(f"--time_limit is {time_limit}: give the seconds that a compile may take.")
    names = [name for name in slices.split(",") if name]
    if not names:
        raise UserError(f"--slices={slices} names no slice: give some, such as v3-8,v5e-8.")
    for name in names:  # before TensorFlow is imported
        parse_slice(name)
    prices = parse_prices(price)
    report = check(experiment, names, prices=prices, verbose=verbose, time_limit=time_limit)
    print_report(report, explain)
    text = report.to_json().encode()
    for path in {files.join(workdir or files.join("runs", config), "preflight.json"), json}:
        if path:
            files.write_whole(path, text)


def prediction(workdir: str, replicas: int) -> str:
    """Returns the step times predicted for as many replicas, such as "v3-8: 123 ms".

    Returns "" if the workdir has no prediction for this number of replicas.
    """
    path = files.join(workdir, "preflight.json")
    if not files.exists(path):
        return ""
    found = [
        f"{item['slice']}: {item['step_ms']:.3g} ms"
        for item in json.loads(files.read(path))["slices"]
        if item["step_ms"] and item["replicas"] == replicas
    ]
    return ", ".join(found)
