"""Compiles a config for TPU slices, without a TPU: whether it fits, how fast it is, what it costs.

The report is printed, and written to preflight.json in the workdir.

    tftpu preflight --config=resnet50_imagenet --slices=v3-8,v5e-8,v6e-8
"""

import dataclasses
import functools
import os
import sys
from typing import TYPE_CHECKING

from tftpu.config import Experiment
from tftpu.errors import UserError
from tftpu.launch import predictions
from tftpu.launch.options import ConfigOptions, flag
from tftpu.launch.startup import import_tensorflow
from tftpu.storage import files
from tftpu.tpu import slices as tpu_slices

if TYPE_CHECKING:
    from tftpu.preflight.report import Report

_WIDTH = 120  # of the report where there is no terminal


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(ConfigOptions):
    """What to compile, and for which slices."""

    workdir: str | None = flag(
        None, "folder for preflight.json, local or gs://", metavar="DIR", shown="runs/<config>"
    )
    slices: str = flag("v3-8,v5e-8", "TPU slices to compare", metavar="SLICE,...")
    json: str | None = flag(None, "write the report to this file, too", metavar="FILE")
    explain: bool = flag(False, "show where the time goes, layer by layer")
    price: str = flag(
        "", "dollars per chip-hour, such as v5e=1.10,v3=1.50", shown="list prices", metavar="PRICES"
    )
    verbose: bool = flag(False, "show the messages of the TPU compiler")
    time_limit: int = flag(1800, "limit for one compilation, in seconds", metavar="SECONDS")


def run(options: Options) -> None:
    """Prints the report, and writes it to the workdir and where --json says."""
    experiment = options.experiment()
    if options.time_limit < 1:
        raise UserError(
            f"--time_limit is {options.time_limit}: give the seconds that a compilation may take."
        )
    names = [name for name in options.slices.split(",") if name]
    for name in names:
        tpu_slices.parse_slice(name)
    report = check(
        experiment,
        names,
        prices=tpu_slices.parse_prices(options.price),
        verbose=options.verbose,
        time_limit=options.time_limit,
    )
    _print(report, options.explain)
    text = report.to_json().encode()
    workdir = options.workdir or options.default_workdir
    for path in {files.join(workdir, predictions.FILE), options.json}:
        if path:
            files.write_whole(path, text)


def check(
    experiment: Experiment,
    slices: list[str],
    *,
    prices: dict[str, float] | None = None,
    verbose: bool = False,
    time_limit: int = 1800,
) -> "Report":
    """Compiles an experiment for slices.

    Args:
        experiment: validated.
        slices: names, such as "v3-8".
        prices: dollars per chip-hour by generation, instead of the list prices.
        verbose: show the messages of the TPU compiler.
        time_limit: limit for one compilation, in seconds.

    Raises:
        UserError: as `tftpu.preflight.check`; or the precision is not one of TPUs.
    """
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")  # nothing runs on a GPU here
    import_tensorflow()
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
        model = dataclasses.replace(experiment.model, **{"remat": "block"})
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
        prices=prices or {},
        verbose=verbose,
        time_limit=time_limit,
    )


def _print(report: "Report", explain: bool) -> None:
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDTH)
    report.print(console, explain)
    sys.stdout.flush()
