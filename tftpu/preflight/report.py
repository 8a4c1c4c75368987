"""The preflight report: results for all slices, as JSON and as text."""

import dataclasses
import io
import json
import math
import re

from rich.console import Console
from rich.table import Table

from tftpu.errors import counted
from tftpu.preflight import table
from tftpu.preflight.pricing.prices import BASES
from tftpu.preflight.slice_report import SliceReport, describe_parameters
from tftpu.tpu.slices import POWER_SOURCE, PRICE_SOURCE, parse_slice
from tftpu.version import __version__

_FLOAT32 = (
    "The model computes in float32. With mixed_bfloat16 a step usually needs less time and memory: "
    "keras.config.set_dtype_policy('mixed_bfloat16') before the model is built."
)
_SHORT = (
    "Steps well below a millisecond are mostly overhead on a TPU, which is not modelled: they may "
    "take longer than their range says."
)
WIDTH = 160  # columns of output that does not go to a terminal; enough for whole tables


@dataclasses.dataclass
class Report:
    """Results for one model on one or several slices.

    Attributes:
        global_batch_size: examples per step.
        precision: dtype policy of the model; several are joined, as in "bfloat16 and float32".
        steps: steps of the run; None if they were not given.
        slices: one report per slice, in the order in which they were given.
        version: the version of tftpu that made the report.
        settings: a digest of the config's model, batch and precision; "" if there was no config.
    """

    global_batch_size: int
    precision: str
    steps: int | None
    slices: list[SliceReport]
    version: str = __version__
    settings: str = ""

    @property
    def cheapest(self) -> SliceReport | None:
        """The report of the slice where a step costs the least and fits; None if none is known."""
        return min(
            self._list_priced(), key=lambda s: _to_sortable(s.usd_per_1000_steps), default=None
        )

    @property
    def fastest(self) -> SliceReport | None:
        """The report of the slice with the shortest step that fits; None if none is known."""
        return min(self._list_priced(), key=lambda s: _to_sortable(s.step_ms), default=None)

    def ranked(self) -> list[SliceReport]:
        """Returns the slices' reports, the cheapest first; those without a known price are last."""

        def rank(item: SliceReport) -> float:
            return _to_sortable(item.usd_per_1000_steps if item.fits else None)

        return sorted(self.slices, key=rank)

    def to_json(self) -> str:
        """Returns the report as JSON, the content of `preflight.json`."""
        return json.dumps(dataclasses.asdict(self), indent=1) + "\n"

    def __str__(self) -> str:
        return self.text()

    def text(self, explain: bool = False, width: int = WIDTH) -> str:
        """Returns the report as plain text.

        Args:
            explain: whether to include the time by layer, kind and instruction, and all findings.
            width: columns available; in a narrow table some columns are left out.
        """
        stream = io.StringIO()
        self.print(Console(file=stream, width=width, force_jupyter=False), explain)
        return stream.getvalue()

    def print(self, console: Console, explain: bool = False) -> None:
        """Prints the table of slices, then the details of each slice.

        Args:
            console: where to print.
            explain: whether to include the time by layer, kind and instruction, and all findings.
        """
        details = [line for item in self.slices for line in table.build_details(item, explain)]
        overview = table.build_overview(
            [(item, self.marks(item)) for item in self.ranked()], bool(self.steps), console.width
        )
        for part in [self.title(), overview, *details, *self.evidence()]:
            for line in [part] if isinstance(part, str) else _list_rows(part, console):
                # Rich would read brackets in shapes as markup, and break long lines of a pipe.
                console.print(line, markup=False, highlight=False, soft_wrap=isinstance(line, str))

    def _list_priced(self) -> list[SliceReport]:
        return [item for item in self.slices if item.fits and item.step_ms is not None]

    def marks(self, item: SliceReport) -> str:
        """Returns the remark on a slice in the table: "cheapest", "fastest", both or ""."""
        if len(self._list_priced()) == 1:
            return ""
        marks = (("cheapest", self.cheapest), ("fastest", self.fastest))
        return ", ".join(mark for mark, best in marks if best is item)

    def title(self) -> str:
        """Returns the report's first line, with batch, precision, model size and steps."""
        run = f", {self.steps:,} steps" if self.steps else ""
        batch = f"{self.global_batch_size:,}"
        built = [item for item in self.slices if item.parameters is not None]
        size = "".join(f", {describe_parameters(item)}" for item in built[:1])
        return f"Preflight: global batch {batch}, {self._format_precision()}{size}{run}"

    def _format_precision(self) -> str:
        """Returns the precision; for a mixed one, with the dtypes of weights and computation."""
        computed = self.precision.removeprefix("mixed_")
        if computed == self.precision:
            return self.precision
        return f"{self.precision} (weights float32, computed in {computed})"

    def _translate_flags(self) -> list[str]:
        """Returns lines that translate the advised --config flags into Python options."""
        advice = dict.fromkeys(text for item in self.slices for text in item.advice)
        found = (
            _translate(text)
            for text in advice
            if not re.search("not enough|no help|^The search", text)
        )
        lines = list(dict.fromkeys(filter(None, found)))
        return ["", *lines] if lines else []

    def evidence(self) -> list[str]:
        """Returns lines on the sources of the figures, and on how to set options in Python."""
        lines = [] if self.settings else self._translate_flags()
        compiled = [item for item in self.slices if item.was_compiled]
        if not compiled:
            return lines
        lines += [
            "",
            "Compiled with the TPU compiler, not run. Times are its cycle estimates, corrected by "
            "factors fitted to published times. The ranges are as wide as the errors of "
            "predictions for models that the fit left out. Published times to compare with are for "
            f"{_describe_bases(compiled)}. Time and cost are those of the steps alone, without "
            "start-up, evaluation, checkpoints and waiting for input.",
            *([_FLOAT32] if self.precision == "float32" else []),
            *([_SHORT] if any((item.step_ms or 1.0) < 0.5 for item in compiled) else []),
            f"Prices: {PRICE_SOURCE}, unless others were given.",
        ]
        if self.steps is None and not self.settings:
            lines.append(
                "PreflightOptions(steps=10_000) adds the time and cost of that many steps."
            )
        if any(item.kwh_per_run is not None for item in self.slices):
            lines.append(f"Energy: {POWER_SOURCE}.")
        return lines


def _translate(advice: str) -> str:
    """Translates the --config flags in a line of advice into Python options; "" without flags."""
    found = re.findall(r"--config\.(cluster|train)\.(\w+)=([\w:,-]*\w)", advice)
    flags = " ".join(f"--config.{group}.{name}={value}" for group, name, value in found)
    fields: dict[str, list[str]] = {"cluster": [], "train": []}
    for group, name, value in found:
        fields[group].append(f"{name}={value}" if value.isdigit() else f'{name}="{value}"')
    trained = f"train=tftpu.TrainConfig({', '.join(fields['train'])})"
    options = ", ".join([*fields["cluster"], *([trained] if fields["train"] else [])])
    text = f"In Python, {flags} is options=tftpu.preflight.PreflightOptions({options})"
    if "engine=jax" in flags:
        text += ", with KERAS_BACKEND=jax set before Python starts"
    return f"{text}." if found else ""


def _describe_bases(compiled: list[SliceReport]) -> str:
    """Counts the published times to compare with: "v6e: 2 train steps of 2 models"."""
    found = []
    for name in dict.fromkeys(parse_slice(item.slice).generation.name for item in compiled):
        basis = BASES[name]
        steps, models = counted(basis.steps, "train step"), counted(basis.models, "model")
        single = f" and {counted(basis.operations, 'single operation')}" * bool(basis.operations)
        found.append(f"{name}: {steps} of {models}{single}")
    return "; ".join(found)


def _list_rows(table: Table, console: Console) -> list[Table] | list[str]:
    """Returns the table for a terminal; for a file, its rows without trailing spaces."""
    if console.is_terminal or console.is_jupyter:
        return [table]
    with console.capture() as captured:
        console.print(table, markup=False, highlight=False)
    return [row.rstrip() for row in captured.get().splitlines()]


def _to_sortable(value: float | None) -> float:
    return math.inf if value is None else value
