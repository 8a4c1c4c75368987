"""`tftpu preflight`: does a config compile for these slices, does it fit, and what does it cost?"""

import dataclasses
import functools
import json
import os
import sys

from tftpu.config import Experiment
from tftpu.errors import UserError
from tftpu.storage import files
from tftpu.tpu import slices as tpus

_WIDTH = 120  # of the report where there is no terminal


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
    """Prints the report; `preflight.json` lands in the workdir, and where --json says."""
    if time_limit < 1:
        raise UserError(f"--time_limit is {time_limit}: give the seconds that a compile may take.")
    names = [name for name in slices.split(",") if name]
    for name in names:  # before TensorFlow loads
        tpus.parse_slice(name)
    report = check(
        experiment,
        names,
        prices=tpus.parse_prices(price),
        verbose=verbose,
        time_limit=time_limit,
    )
    _print(report, explain)
    text = report.to_json().encode()
    for path in {files.join(workdir or files.join("runs", config), "preflight.json"), json}:
        if path:
            files.write_whole(path, text)


def check(experiment: Experiment, slices: list[str], **options):
    """The `tftpu.preflight.Report` of an experiment.

    Args:
        experiment: a config.
        slices: names, as "v3-8".
        options: further fields of `tftpu.preflight.examine.Run`.

    Raises:
        UserError: as `tftpu.preflight.check`.
    """
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")  # nothing is run here
    from tftpu import input_pipelines, preflight
    from tftpu.launch.experiment import build_model

    if experiment.train.precision == "mixed_float16":
        raise UserError(
            "train.precision=mixed_float16 is emulated on a TPU, slowly: use mixed_bfloat16, which "
            "is native and needs no loss scale."
        )
    train, data = experiment.train, experiment.data
    norm_batch = getattr(experiment.model, "norm_batch", None)
    recomputing = None
    if getattr(experiment.model, "remat", None) == "none":
        model = dataclasses.replace(experiment.model, remat="block")
        again = dataclasses.replace(experiment, model=model)
        recomputing = functools.partial(build_model, again)
    return preflight.check(
        lambda: build_model(experiment),
        input_pipelines.batch_spec(data, data.global_batch_size),
        slices,
        precision=train.precision,
        gradient_accumulation_steps=train.gradient_accumulation_steps,
        global_clipnorm=train.global_clipnorm,
        ema_momentum=train.ema_momentum,
        steps=train.steps,
        validate=experiment.validate,
        recomputing=recomputing,
        # Batch statistics need whole groups of examples.
        **({"batch_unit": norm_batch} if isinstance(norm_batch, int) else {}),
        **options,
    )


def prediction(workdir: str, replicas: int) -> str:
    """What preflight predicted for as many replicas: "v3-8: 123 ms"; "" if nothing did."""
    path = files.join(workdir, "preflight.json")
    if not files.exists(path):
        return ""
    found = [
        f"{item['slice']}: {item['step_ms']:.3g} ms"
        for item in json.loads(files.read(path))["slices"]
        if item["step_ms"] and item["replicas"] == replicas
    ]
    return ", ".join(found)


def _print(report, explain: bool) -> None:
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDTH)
    report.print(console, explain)
    sys.stdout.flush()
