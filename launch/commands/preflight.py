"""`tftpu preflight`: whether a config compiles for TPU slices, whether it fits, what it costs."""

import dataclasses
import functools
import json
import math
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from tftpu.config import Experiment
from tftpu.errors import UserError, did_you_mean
from tftpu.storage import files
from tftpu.tpu.slices import GENERATIONS, parse_slice

if TYPE_CHECKING:
    import keras

    from tftpu.preflight import PreflightOptions, Report


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
    _print(report, explain)
    text = report.to_json().encode()
    for path in {files.join(workdir or files.join("runs", config), "preflight.json"), json}:
        if path:
            files.write_whole(path, text)


def parse_prices(text: str) -> dict[str, float]:
    """Returns US dollars per chip-hour by generation, given "v5e=1.10,v3=1.50".

    Raises:
        UserError: the text has another form, or names an unknown generation.
    """
    prices = {}
    for item in filter(None, text.split(",")):
        name, _, value = item.partition("=")
        if name not in GENERATIONS:
            raise UserError(
                f"--price={text}: there is no generation {name!r}.{did_you_mean(name, GENERATIONS)}"
            )
        try:
            prices[name] = float(value)
        except ValueError:
            prices[name] = math.nan
        if not prices[name] >= 0:
            raise UserError(
                f"--price={text}: give dollars per chip-hour, such as --price={name}=1.10."
            )
    return prices


def check(
    experiment: Experiment,
    slices: list[str],
    prices: dict[str, float] | None = None,
    verbose: bool = False,
    time_limit: float | None = None,
) -> "Report":
    """Returns the preflight report of an experiment.

    Args:
        experiment: the experiment.
        slices: names such as "v3-8".
        prices: US dollars per chip-hour by generation; they replace the list prices.
        verbose: whether to show what the compiler writes to standard error.
        time_limit: seconds that one compilation may take; None takes preflight's default.

    Raises:
        UserError: as `tftpu.preflight.check` does, or the precision is not native to TPUs.
    """
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")  # nothing runs here
    from tftpu import input_pipelines, preflight
    from tftpu.launch.experiment import build_model

    if experiment.train.precision == "mixed_float16":
        raise UserError(
            "train.precision=mixed_float16 is emulated on a TPU, slowly: use mixed_bfloat16, which "
            "is native and needs no loss scale."
        )
    options = _options(experiment)
    options.prices = prices or {}
    options.verbose = verbose
    if time_limit is not None:
        options.time_limit = time_limit
    batch_spec = input_pipelines.batch_spec(experiment.data, experiment.data.global_batch_size)
    return preflight.check(lambda: build_model(experiment), batch_spec, slices, options)


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


def _options(experiment: Experiment) -> "PreflightOptions":
    """Returns the options that follow from the experiment itself."""
    from tftpu.preflight import PreflightOptions

    options = PreflightOptions(
        train=experiment.train,
        precision=experiment.train.precision,
        steps=experiment.train.steps,
        validate=experiment.validate,
        recomputing=_recomputing(experiment),
    )
    norm_batch = getattr(experiment.model, "norm_batch", None)
    if isinstance(norm_batch, int):  # batch statistics need whole groups of examples
        options.batch_unit = norm_batch
    return options


def _recomputing(experiment: Experiment) -> "Callable[[], keras.Model] | None":
    """Returns a builder of the model with recomputed blocks; None if it has no such option."""
    from tftpu.launch.experiment import build_model

    if getattr(experiment.model, "remat", None) != "none":
        return None
    fields = {"remat": "block"}
    model = dataclasses.replace(experiment.model, **fields)
    return functools.partial(build_model, dataclasses.replace(experiment, model=model))


def _print(report: "Report", explain: bool) -> None:
    from rich.console import Console

    from tftpu.preflight.report import WIDTH

    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    report.print(console, explain)
    hint = "" if explain else "--explain shows the time by layer and all findings; "
    console.print(f"{hint}--price=v3=1.50 replaces a list price.", highlight=False, soft_wrap=True)
    sys.stdout.flush()
