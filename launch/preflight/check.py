"""The preflight check of an experiment: from a config to `tftpu.preflight.check` and its report."""

import dataclasses
import functools
import math
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from tftpu.config import Experiment
from tftpu.errors import UserError, did_you_mean
from tftpu.launch import startup
from tftpu.launch.preflight import reports
from tftpu.launch.settings.own_code import failures_of_class
from tftpu.models.keras_hub.config import KerasHub
from tftpu.runtime.slow import reporting_if_slow
from tftpu.tpu.slices import ALIASES, GENERATIONS, parse_slice

if TYPE_CHECKING:
    import keras
    from rich.console import Console

    from tftpu.preflight import PreflightOptions, Report
    from tftpu.preflight.writing import WritingReport
    from tftpu.tensors import Nest


def parse_prices(text: str) -> dict[str, float]:
    """Returns US dollars per chip-hour by generation, given "v5e=1.10,v3=1.50".

    Raises:
        UserError: the text has another form, or names an unknown generation.
    """
    prices = {}
    for item in filter(None, text.split(",")):
        name, _, value = item.partition("=")
        name = ALIASES.get(name, name)
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
    *,
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
        UserError: any reason of `tftpu.preflight.check`, or the precision is mixed_float16.
    """
    with reporting_if_slow("Loading TensorFlow"):
        experiment, batch_spec = prepare(experiment)
        from tftpu.launch.run.experiment import build_model
        from tftpu.preflight.examining.checking import check as check_slices

    options = build_options(experiment)
    options.prices = prices or {}
    options.verbose = verbose
    if time_limit is not None:
        options.time_limit = time_limit
    report = check_slices(lambda: build_model(experiment), batch_spec, slices, options)
    report.settings = reports.compute_settings(experiment, batch_spec)
    return report


def prepare(experiment: Experiment) -> "tuple[Experiment, Nest]":
    """Returns an experiment as preflight compiles it, and the spec of its global batch.

    Its length is in steps, and its model loads no pretrained weights.

    Raises:
        UserError: the precision is mixed_float16, or the shapes of the data are unknown.
    """
    startup.leave_devices_alone()
    from tftpu import input_pipelines
    from tftpu.launch.run.experiment import resolve_length

    _check_precision(experiment)
    experiment = _leave_weights_out(resolve_length(experiment))
    with failures_of_class(experiment.data, "batch_spec"):
        batch_spec = input_pipelines.batch_spec(
            experiment.prepared_data, experiment.data.global_batch_size
        )
    return experiment, batch_spec


def check_text(
    experiment: Experiment,
    slices: list[str],
    rows: int,
    *,
    prices: dict[str, float],
    verbose: bool,
    time_limit: float,
) -> "list[WritingReport]":
    """Prints and returns reports on the price of text that an experiment's model generates.

    Args:
        experiment, slices, prices, verbose, time_limit: see `check`.
        rows: the number of texts that a device writes at once.

    Raises:
        UserError: any reason of `preflight.writing.check_writing`, the precision is mixed_float16,
            or the model is of KerasHub.
    """
    if isinstance(experiment.model, KerasHub):
        raise UserError(
            "--generate predicts the price of text from the zoo's models, such as GPT and Llama, "
            "and from your own, but not from KerasHub's. Leave it out to predict the price of "
            "training."
        )
    startup.leave_devices_alone()
    from tftpu.launch.run.experiment import build_layers
    from tftpu.optim.policy import choose_policy
    from tftpu.preflight.writing import check_writing, print_writing

    _check_precision(experiment)
    experiment = _leave_weights_out(experiment)
    reports = check_writing(
        lambda: build_layers(experiment),
        slices,
        rows,
        precision=choose_policy(experiment.train.precision, "tpu"),
        prices=prices,
        verbose=verbose,
        time_limit=time_limit,
    )
    print_writing(reports, build_console())
    sys.stdout.flush()
    return reports


def _leave_weights_out(experiment: Experiment) -> Experiment:
    return dataclasses.replace(experiment, model=experiment.model.without_weights())


def _check_precision(experiment: Experiment) -> None:
    if experiment.train.precision == "mixed_float16":
        raise UserError(
            "train.precision=mixed_float16 is slow on a TPU, which emulates it: use "
            "mixed_bfloat16, which is native and needs no loss scale."
        )


def print_report(report: "Report", explain: bool) -> None:
    """Prints a report to the terminal, and the flags that show more or set the price.

    Args:
        report: the report.
        explain: whether to include the time by layer, kind and instruction, and all findings.
    """
    console = build_console()
    report.print(console, explain)
    if report.cheapest is None:
        sys.stdout.flush()
        return
    hint = "" if explain else "--explain shows the time by layer and all findings; "
    generation = parse_slice(report.cheapest.slice).generation
    price = f"--price={generation.name}={generation.usd_hour:.2f}"
    hint += f"{price} sets the dollars of a chip-hour, here to the list price."
    console.print(hint, highlight=False, soft_wrap=True)
    sys.stdout.flush()


def print_comparison(before: "tuple[str, Report]", after: "tuple[str, Report]") -> None:
    """Prints the changes between two reports, each given as (name, report).

    Raises:
        UserError: the reports have no slice in common.
    """
    from tftpu.preflight import compare

    compare.print_comparison(compare.Named(*before), compare.Named(*after), build_console())
    sys.stdout.flush()


def build_console() -> "Console":
    """Returns the terminal; for piped output, a console that is wide enough for every column."""
    from rich.console import Console

    from tftpu.preflight.report import WIDTH

    console = Console()
    return console if console.is_terminal else Console(width=WIDTH)


def build_options(experiment: Experiment) -> "PreflightOptions":
    """Returns preflight's options from the fields of an experiment."""
    from tftpu.launch.run.experiment import build_objectives, has_objectives
    from tftpu.preflight import PreflightOptions

    objectives = functools.partial(build_objectives, experiment)
    options = PreflightOptions(
        train=experiment.train,
        objectives=objectives if has_objectives(experiment) else None,
        precision=experiment.train.precision,
        engine=experiment.cluster.engine,
        mesh=experiment.cluster.mesh,
        compiler_options=experiment.cluster.compiler_options,
        steps=experiment.train.length,
        validate=experiment.validate,
        recomputing=_build_recomputing(experiment),
    )
    norm_batch = getattr(experiment.model, "norm_batch", None)
    if isinstance(norm_batch, int):  # batch statistics need complete groups of examples
        options.batch_unit = norm_batch
    return options


def _build_recomputing(experiment: Experiment) -> "Callable[[str], keras.Model] | None":
    """Returns a function that builds the model with another `remat`, if the config has "none"."""
    from tftpu.launch.run.experiment import build_model

    if getattr(experiment.model, "remat", None) != "none":
        return None

    def build_with_remat(remat: str) -> "keras.Model":
        fields = {"remat": remat}
        model = dataclasses.replace(experiment.model, **fields)
        return build_model(dataclasses.replace(experiment, model=model))

    return build_with_remat
