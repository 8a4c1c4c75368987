"""Writes docs/compatibility.md: every script with its differences, measured anew.

    python -m tests.compatibility.table [NAME ...]

With names, only the rows of these scripts are measured; the others stay as they are.
"""

import datetime
import sys
from pathlib import Path

import tests.conftest  # noqa: F401  # eight virtual devices, before anything uses TensorFlow
from tests.compatibility import running

PAGE = Path(__file__).parent.parent.parent / "docs" / "compatibility.md"
HEAD = """# Compatibility

{count} small scripts in the manner of public Keras examples, in `tests/compatibility/scripts/`.
Each trains {steps} steps of {batch} examples three times from the same weights: with Keras's own
`fit`, or where the training logic is its own, with a gradient tape in plain TensorFlow; with
`Trainer` on one device; with `Trainer` on four virtual devices. Dropout is 0, because its masks
differ between devices. What a script draws at random, such as a diffusion model's noise, is part of
its data.

- **way**: how the training logic reaches `Trainer`. `fit`: the model is compiled as for Keras.
  `compute_loss`: the model's own method. `loss_fn` and `objectives`: arguments of `Trainer`.
- **1, 4**: the largest relative difference from Keras, among all weights after the last step, and
  the loss and each metric over all steps. Up to 1e-5 is rounding; 0 is equality to the bit.
- **v5e-8**: milliseconds of a step of 64 examples in bfloat16, predicted by
  [preflight](guides/preflight.md): compiled by the TPU compiler, not run.

Measured by `python -m tests.compatibility.table` on virtual CPU devices (2 cores, {date}).
"""
COLUMNS = "| script | what it trains | way | 1 | 4 | v5e-8 |\n|---|---|---|---|---|---|\n"


def row(name: str) -> str:
    """Measures a script; returns its row."""
    script = running.load(name)
    found = running.compare(script)
    notes = [running.SPARSE_GRADIENTS] * script.sparse + [script.differs] * bool(script.differs)
    marks = "".join(f" [{NOTES.index(note) + 1}]" for note in notes)
    compiled = ""
    if script.preflight:
        verdict = running.preflight(script)
        compiled = f"{verdict.step_ms:.2g}" if verdict.fits else "does not fit"
    numbers = f"{found.one:.0e} | {found.four:.0e}".replace("0e+00", "0")
    what = running.title(name).rstrip(".")
    return f"| `{name}` | {what}{marks} | `{script.way}` | {numbers} | {compiled} |"


NOTES = [running.SPARSE_GRADIENTS, running.BATCH_STATISTICS]


def rows() -> dict[str, str]:
    """Returns the rows of the page, by the name of their script."""
    lines = PAGE.read_text().splitlines() if PAGE.exists() else []
    return {line.split("`")[1]: line for line in lines if line.startswith("| `")}


def write(found: dict[str, str]) -> None:
    """Writes the page."""
    known = running.names()
    head = HEAD.format(
        count=len(known), steps=running.STEPS, batch=running.BATCH, date=datetime.date.today()
    )
    notes = "".join(f"\n{number}. {note}" for number, note in enumerate(NOTES, 1))
    table = "".join(f"{found[name]}\n" for name in known if name in found)
    PAGE.write_text(f"{head}\n{COLUMNS}{table}\nNotes:\n{notes}\n")


def main() -> None:
    """Measures the scripts that the command line names, or all."""
    for name in sys.argv[1:] or running.names():
        print(name, flush=True)
        measured = row(name)
        write({**rows(), name: measured})


if __name__ == "__main__":
    main()
