"""Trains every backbone of KerasHub by Keras's `fit` and by `Trainer`; writes the table of both.

    python -m tests.benchmarks.atlas [--only=NAME,...] [--routes=ROUTE,...]

Writes docs/keras-hub/atlas.md, and atlas.json beside it as each result comes. What that file has is
not measured again, unless `--only` names it; with other versions of the packages, all is. The
routes are those of `tests/support/hub/routes.py`.
"""

import argparse
import dataclasses
import datetime
import importlib.metadata
import json
import math
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.support.hub.routes import ROUTES, Result
from tests.support.programs.jax_process import QUICK

PAGE = Path(__file__).parent.parent.parent / "docs" / "keras-hub" / "atlas.md"
PACKAGES = ("keras-hub", "keras", "tensorflow-cpu", "jax")
GROUP = 10  # backbones in one process, whose memory grows with each
HEAD = """# KerasHub's backbones

The {count} backbones of KerasHub {keras-hub}, each built small with random weights, and trained two
steps twice, from the same weights on the same batches: by Keras's `fit` on one device, and by
`Trainer`. Written by `python -m tests.benchmarks.atlas` on virtual CPU devices (2 cores, {date};
Keras {keras}, TensorFlow {tensorflow-cpu}, JAX {jax}).

- **equal**: losses and weights are those of Keras up to rounding, 1e-5. The number is the largest
  relative difference of a step's losses; weights are compared over their change by training.
- **rounding**: the difference is larger than that, and at most ten times that between two runs of
  Keras's `fit` whose initial weights differ in their last bits. The numbers are both differences.
- **differs**: it is larger. The numbers are those of the losses and of the weights.
- **refused**: tftpu says why it does not train the model so.
- **Keras fails**: Keras's `fit` does not train it.
- **open**: any other error.

Every output of floating point has random targets; the loss is the mean square of the distances, and
the optimizer SGD with momentum, in float32. Dropout is 0. Texts have padding. On a mesh with `fsdp`
every weight is divided that has a dimension to divide, however small: at least {divided} % of each
backbone. `remat=block` recomputes activations: those of equal blocks, or where a backbone has none,
of segments of its graph. Gemma 3n, Gemma 4, Qwen 3.5 and T5Gemma 2 are built for text alone.
"""
KINDS = {"keras": "Keras fails"}  # in the words of the page
# Errors that say little, in words.
REASONS = {
    "SAM3PromptableConceptBackbone": (
        "Its geometry encoder gives attention a mask of (batch, prompts). TensorFlow does not "
        "broadcast it to (batch, heads, prompts, prompts); Keras's JAX backend does."
    ),
    "StableDiffusion3Backbone": (
        "Its functional model draws a whole image: the scheduler needs the number of steps, which "
        "is an input, before the model is traced."
    ),
}


def main(arguments: Sequence[str]) -> None:
    """Measures what is not known yet, and writes the page."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.atlas")
    parser.add_argument("--only", default="", help="names of backbones, measured anew")
    parser.add_argument("--routes", default=",".join(ROUTES), help="names of routes")
    given = parser.parse_args(arguments)
    names, stored = list_names(), read_results()
    for route in given.routes.split(","):
        known = stored["routes"].setdefault(route, {})
        asked = given.only.split(",") if given.only else [n for n in names if n not in known]
        for name, result in run_route(route, asked):
            print(f"{route}: {name}: {result}", flush=True)
            known[name] = result
            stored["date"] = str(datetime.date.today())
            PAGE.with_suffix(".json").write_text(json.dumps(stored, indent=1) + "\n")
    PAGE.write_text(render_page(names, stored))


def list_names() -> list[str]:
    """Returns the names of all backbones."""
    code = "from tests.support.hub import builders; print(*builders.list_backbones())"
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=True)
    return done.stdout.decode().split()


def run_route(route: str, names: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Trains backbones in other processes; yields each result as it comes.

    A process that ends early leaves the backbone that it was training open, and the next one trains
    those that are left.
    """
    left = list(names)
    environment = {**os.environ, "KERAS_BACKEND": ROUTES[route].backend, "XLA_FLAGS": QUICK}
    while left:
        group = left[:GROUP]
        command = [sys.executable, "-m", "tests.support.hub.routes", route, *group]
        with subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        ) as process:
            for line in process.stdout or ():
                result = json.loads(line)
                yield left.pop(0), result
        if process.returncode:
            reason = f"The process ended with exit code {process.returncode}."
            yield left.pop(0), dataclasses.asdict(Result("open", reason))


def read_results() -> dict[str, Any]:
    """Returns the results that are stored; none if they are of other versions."""
    versions = {package: importlib.metadata.version(package) for package in PACKAGES}
    path = PAGE.with_suffix(".json")
    stored = json.loads(path.read_text()) if path.exists() else {}
    if stored.get("versions") == versions:
        return stored
    return {"date": "", "versions": versions, "routes": {}}


def render_page(names: Sequence[str], stored: dict[str, Any]) -> str:
    """Returns the page of some results."""
    routes = {route: stored["routes"].get(route, {}) for route in ROUTES}
    parts = [result["divided"] for result in routes["fsdp"].values() if result["divided"]]
    head = HEAD.format_map(
        {
            "count": len(names),
            "date": stored["date"],
            "divided": math.floor(100 * min(parts, default=0.0)),
            **stored["versions"],
        }
    )
    rows = [
        ["backbone", *(ROUTES[route].title for route in routes)],
        ["---"] * (1 + len(routes)),
        [f"all {len(names)}", *(_count_kinds(found) for found in routes.values())],
    ]
    notes: list[str] = []
    for name in names:
        cells = [_fill_cell(name, found.get(name), notes) for found in routes.values()]
        rows.append([f"`{name.removesuffix('Backbone')}`", *cells])
    table = "".join(f"| {' | '.join(row)} |\n" for row in rows)
    listed = "".join(f"\n{number}. {note}" for number, note in enumerate(notes, 1))
    return f"{head}\n{table}\nNotes:\n{listed}\n"


def _count_kinds(found: dict[str, Any]) -> str:
    counts = Counter(result["kind"] for result in found.values())
    return ", ".join(f"{count} {KINDS.get(kind, kind)}" for kind, count in counts.most_common())


def _fill_cell(name: str, result: dict[str, Any] | None, notes: list[str]) -> str:
    """Returns the cell of a result; adds its reason to the notes."""
    if result is None:
        return ""
    kind = KINDS.get(result["kind"], result["kind"])
    if result["kind"] == "equal":
        return f"{kind} {result['losses']:.0e}".replace("0e+00", "0")
    if result["kind"] == "rounding":
        return f"{kind} {max(result['losses'], result['weights']):.0e}, {result['noise']:.0e}"
    if result["kind"] == "differs":
        return f"{kind} {result['losses']:.0e}, {result['weights']:.0e}"
    note = result["reason"]
    if result["kind"] != "refused":
        note = REASONS.get(name, f"`{note}`")
    if note not in notes:
        notes.append(note)
    return f"{kind} [{notes.index(note) + 1}]"


if __name__ == "__main__":
    main(sys.argv[1:])
