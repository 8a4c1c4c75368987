"""Preflight of models that tftpu was not written for, as a Markdown table.

    python -m tests.benchmarks.compiled.foreign_preflight [--slices=v5e-1] [--explain] [NAME ...]

Compiles each of `tests.support.models.foreign_models`, or those that are named, in the size in
which it is trained. `--explain` prints the whole report of each as well.

Evidence: compiled.
"""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import sys

from tests.support.models import foreign_models
from tftpu import preflight
from tftpu.amounts import format_duration, format_size
from tftpu.preflight.slice_report import SliceReport

BATCHES = {
    **{"efficientnet": 128, "mobilenet": 256, "xception": 64, "densenet": 64},
    **{"bert": 128, "gpt2": 16, "vit": 64, "diffusion": 64, "unet": 16, "atrous": 8},
    **{"bilstm": 256, "convlstm": 8, "gan": 256},
}
HEAD = "| model | slice | batch | HBM | step | MFU | bound | program's / model's FLOPs | findings |"


def main(arguments: list[str]) -> None:
    """Prints the table, a row as soon as it is compiled."""
    options = [a for a in arguments if a.startswith("--")]
    names = [a for a in arguments if a not in options] or foreign_models.NAMES
    chosen = next((o for o in options if o.startswith("--slices=")), "--slices=v5e-1")
    print(f"{HEAD}\n|{'---|' * HEAD[1:].count('|')}", flush=True)
    for name in names:
        model = foreign_models.full(name)
        report = preflight.check(
            model.build,
            model.batch(BATCHES[name]),
            chosen.removeprefix("--slices=").split(","),
            preflight.PreflightOptions(precision="auto", objectives=model.objectives),
        )
        for found in report.slices:
            print(_row(name, found), flush=True)
        if "--explain" in options:
            print(report.text(explain=True), flush=True)


def _row(name: str, found: SliceReport) -> str:
    cells = [name, found.slice, str(BATCHES[name])]
    if found.step_ms is None:
        cells += [
            format_size(found.hbm_bytes),
            "does not fit" if found.compiles else found.error[:100],
        ]
        cells += [""] * 4
    else:
        cells += [
            format_size(found.hbm_bytes),
            format_duration(found.step_ms / 1e3),
            f"{found.mfu:.0%}",
            found.bound,
            f"{found.flops / found.model_flops:.2f}",
            str(len(found.lints)),
        ]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main(sys.argv[1:])
