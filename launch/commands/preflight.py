"""Compiles a config for TPU slices, without a TPU: whether it fits, how fast it is, what it costs.

The report is printed, and written to preflight.json in the workdir. The exit code is 2 if the step
cannot run on any of the slices.

    tftpu preflight --config=resnet50_imagenet --slices=v3-8,v5e-8,v6e-8
"""

import dataclasses
from typing import TYPE_CHECKING

from tftpu.engines import selection
from tftpu.errors import UserError
from tftpu.launch import known_reports, predictions
from tftpu.launch.options import ConfigOptions, flag
from tftpu.launch.preflight_check import check, parse_prices, print_report
from tftpu.launch.startup import import_tensorflow
from tftpu.storage import files
from tftpu.tpu.slices import parse_slice

if TYPE_CHECKING:
    from tftpu.preflight import Report


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(ConfigOptions):
    """The config to compile, and the slices."""

    workdir: str | None = flag(
        None, "folder for preflight.json, local or gs://", metavar="DIR", shown="runs/<config>"
    )
    slices: str = flag("v3-8,v5e-8", "TPU slices to compare", metavar="SLICE,...")
    json: str | None = flag(None, "write the report to this file, too", metavar="FILE")
    explain: bool = flag(False, "show the time of each layer")
    price: str = flag(
        "", "dollars per chip-hour, such as v5e=1.10,v3=1.50", shown="list prices", metavar="PRICES"
    )
    verbose: bool = flag(False, "show the messages of the TPU compiler")
    time_limit: int = flag(1800, "limit for one compilation, in seconds", metavar="SECONDS")


def run(options: Options) -> None:
    """Prints the report, and writes it to the workdir and to --json."""
    with known_reports.recorded() as inputs:
        report = _report(options, inputs)
    print_report(report, options.explain)
    text = report.to_json().encode()
    workdir = options.workdir or options.default_workdir
    for path in {files.join(workdir, predictions.FILE), options.json}:
        if path:
            files.write_whole(path, text)
    if not any(item.fits for item in report.slices):
        raise UserError(f"No slice of {options.slices} is known to run the step: see above.")


def _report(options: Options, inputs: known_reports.Inputs) -> "Report":
    """Returns the report: that of an equal command before, if nothing has changed since."""
    experiment = options.experiment()
    if options.time_limit < 1:
        raise UserError(
            f"--time_limit is {options.time_limit}: give the seconds that a compilation may take."
        )
    names = [name for name in options.slices.split(",") if name]
    if not names:
        raise UserError(f"--slices={options.slices} names no slice: give some, such as v3-8,v5e-8.")
    for name in names:
        parse_slice(name)
    prices = parse_prices(options.price)
    name = known_reports.key(experiment, names, prices, inputs)
    known = known_reports.find(name)
    if known is not None:
        return known
    selection.choose_backend(experiment.cluster)
    import_tensorflow()
    report = check(
        experiment, names, prices=prices, verbose=options.verbose, time_limit=options.time_limit
    )
    known_reports.keep(name, report, inputs)
    return report
