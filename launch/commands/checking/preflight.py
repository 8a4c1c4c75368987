"""Compiles a config for TPU slices, without a TPU: does it fit, how fast is it, what does it cost.

The report is printed, and written to preflight.json in the workdir. The exit code is 2 if the step
cannot run on any of the slices.

With --generate=ROWS, the price of generating text is predicted instead: ROWS texts at once on each
device.

With --compare, the difference from another check is printed instead: from a report written earlier,
or from a config without overrides. With --report, nothing is compiled.

    tftpu preflight resnet50_imagenet --slices=v3-8,v5e-8,v6e-8
    tftpu preflight python_gpt --config.model.width=256 --compare=python_gpt
    tftpu preflight --report=runs/after --compare=runs/before --html=after.html
    tftpu preflight llama_110m_tinystories --slices=v5e-1 --generate=32
"""

import dataclasses
import json
import os
import sys
from typing import TYPE_CHECKING

from tftpu.config import ClusterConfig
from tftpu.engines import selection
from tftpu.errors import UserError
from tftpu.launch import interrupts
from tftpu.launch.preflight import known_reports
from tftpu.launch.preflight import reports as preflight_reports
from tftpu.launch.preflight.check import (
    check,
    check_text,
    parse_prices,
    print_comparison,
    print_report,
)
from tftpu.launch.run.finished import ConfigOrRunOptions
from tftpu.launch.settings.options import TIME, flag
from tftpu.launch.startup import import_tensorflow
from tftpu.runtime.slow import report_activity, reporting_if_slow
from tftpu.storage import files
from tftpu.tpu.slices import parse_slice

if TYPE_CHECKING:
    from tftpu.preflight import Report

# Flags that have no effect on a report that was already written.
_OF_A_CHECK = ("config", "workdir", "slices", "price", "verbose", "time_limit", "overrides")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(ConfigOrRunOptions):
    """The config to compile, and the slices; or a report to show again."""

    config: str = flag(
        "",
        "name of a config (`tftpu configs`), path of your own, or folder of a run",
        metavar="CONFIG",
        word=True,
    )
    report: str | None = flag(
        None, "instead of a config: a report written earlier, or its folder", metavar="FILE"
    )
    workdir: str | None = flag(
        None, "folder for preflight.json, local or gs://", metavar="DIR", shown="runs/<config>"
    )
    slices: str = flag(
        "v3-8,v5e-8", "TPU slices to compare", metavar="SLICE,...", aliases=("slice",)
    )
    json: str | None = flag(None, "write the report to this file, too", metavar="FILE")
    html: str | None = flag(None, "write a page with plots to this file", metavar="FILE")
    explain: bool = flag(False, "show the time of each layer")
    compare: str | None = flag(
        None,
        "show what changed since another check: a report, its folder, or a config",
        metavar="OTHER",
    )
    generate: int | None = flag(
        None,
        "price generating text instead: ROWS texts at once on each device",
        metavar="ROWS",
        minimum=1,
    )
    price: str = flag(
        "", "dollars per chip-hour, such as v5e=1.10,v3=1.50", shown="list prices", metavar="PRICES"
    )
    verbose: bool = flag(False, "show the messages of the TPU compiler")
    time_limit: float = flag(1800.0, "how long one compilation may take", metavar=TIME, minimum=1)

    def validate(self) -> None:
        """Raises `UserError` for flags that contradict each other or have no meaning."""
        if not self.config and not self.report:
            raise UserError(
                "tftpu preflight needs CONFIG, or --report=FILE. `tftpu configs` lists "
                "the configs. You can also give the path of your own."
            )
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        for name in _OF_A_CHECK if self.report else ():
            if getattr(self, name) != defaults[name]:
                given = self.overrides[0] if name == "overrides" else f"--{name}"
                raise UserError(
                    f"--report={self.report} shows a report as it was written: leave out "
                    f"{given}, or --report. Programs that were compiled before come from a cache."
                )
        if not self.names:
            raise UserError(
                f"--slices={self.slices} names no slice: give one or more, such as v3-8,v5e-8."
            )
        for name in self.names:
            parse_slice(name)
        parse_prices(self.price)
        for name in ("report", "compare", "html", "explain") if self.generate else ():
            if getattr(self, name):
                raise UserError(
                    f"--generate predicts the price of text, but --{name} is about a train step: "
                    "leave one of them out."
                )
        for name in ("json", "html"):
            path = getattr(self, name)
            if path and os.path.isdir(path):
                raise UserError(f"--{name}={path} is a folder: name a file in it.")

    @property
    def names(self) -> list[str]:
        """The names of the slices."""
        return [name for name in self.slices.split(",") if name]


@interrupts.answering_sigterm()
def run(options: Options) -> None:
    """Prints the report, a comparison or the price of text; writes the report to files."""
    options.validate()
    if options.generate:
        _price_text(options)
        return
    other = _load_other_report(options) if options.compare else None
    report = _read_or_compile_report(options)
    if other is None:
        print_report(report, options.explain)
    else:
        name = options.report or " ".join((options.config, *options.overrides))
        print_comparison((str(options.compare), other), (name, report))
    text = report.to_json().encode()
    workdir = None if options.report else options.workdir or options.default_workdir
    before = preflight_reports.read_settings(workdir) if workdir else None
    if workdir and before not in (None, report.settings):
        print(
            f"{files.join(workdir, preflight_reports.FILE)} was "
            f"{preflight_reports.describe_other(before or '')} and is replaced; --workdir=DIR "
            "keeps both.",
            file=sys.stderr,
        )
    for path in {workdir and files.join(workdir, preflight_reports.FILE), options.json}:
        if path:
            _write(path, text)
    if options.html:
        from tftpu.preflight.page.page import build_page

        _write(options.html, build_page(report).encode())
    if not options.report and not any(item.fits for item in report.slices):
        undecided = any(item.undecided for item in report.slices)
        raise UserError(_say_none(options, "This step", undecided))


def _price_text(options: Options) -> None:
    """Prints the predicted price of generating text with the model."""
    experiment = options.load_experiment()
    # Text is generated on one device, by the TensorFlow engine, whatever the config's cluster is.
    experiment.cluster = ClusterConfig(engine="tensorflow")
    selection.choose_backend(experiment.cluster)
    import_tensorflow()
    reports = check_text(
        experiment,
        options.names,
        options.generate or 1,
        prices=parse_prices(options.price),
        verbose=options.verbose,
        time_limit=options.time_limit,
    )
    if options.json:
        _write(
            options.json, json.dumps([dataclasses.asdict(r) for r in reports], indent=1).encode()
        )
    if all(report.error for report in reports):
        raise UserError(_say_none(options, "Writing text", undecided=True))


def _say_none(options: Options, what: str, undecided: bool) -> str:
    runs = "does not run on" if len(options.names) == 1 else "runs on none of"
    return f"{what} {'is not known to run on' if undecided else runs} {options.slices}: see above."


def _write(path: str, data: bytes) -> None:
    try:
        files.write_whole(path, data)
    except OSError as error:
        reason = error.strerror or error
        raise UserError(
            f"{path} cannot be written ({reason}): choose another place, and run the command "
            "again. The compiled programs are kept."
        ) from error


def _load_other_report(options: Options) -> "Report":
    """Returns the report to compare with; a config is compiled without overrides."""
    other = str(options.compare)
    if not preflight_reports.is_config(other):
        return preflight_reports.read("compare", other)
    if options.config:
        options.load_experiment()  # finds mistakes in this config before the other one is compiled
    report_activity(f"Checking {other} without overrides, to compare with it")
    return _find_or_compile_report(dataclasses.replace(options, config=other, overrides=()))


def _read_or_compile_report(options: Options) -> "Report":
    if options.report:
        return preflight_reports.read("report", options.report)
    return _find_or_compile_report(options)


def _find_or_compile_report(options: Options) -> "Report":
    """Returns the cached report of the config; without one, compiles the config.

    The config is loaded right before it is compiled. Configs in two folders may import modules of
    the same name, and only those of the config that was loaded last are found.
    """
    with reporting_if_slow(f"Loading {options.config}"):
        experiment = options.load_experiment()
    prices = parse_prices(options.price)
    name = known_reports.compute_key(options.config, experiment, options.names, prices)
    known = known_reports.find(name)
    if known is not None:
        return known
    selection.choose_backend(experiment.cluster)
    import_tensorflow()
    report = check(
        experiment,
        options.names,
        prices=prices,
        verbose=options.verbose,
        time_limit=options.time_limit,
    )
    known_reports.keep(name, report)
    return report
