"""Generates the pictures of README and of the documentation: `make pictures`.

python docs/pictures.py            all of them, which takes the TPU compiler some minutes
python docs/pictures.py rooms      one of them: curves, search, preflight, pipeline, rooms, gallery
"""

import json
import os
import pty
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from PIL import Image
from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).parent.parent
IMAGES = ROOT / "docs" / "images"
GALLERY = sorted(set((ROOT / "docs" / "gallery").glob("*.md")) - {ROOT / "docs/gallery/index.md"})
TFTPU = Path(sys.executable).parent / "tftpu"
PREFLIGHT = (
    *("preflight", "--config=resnet50_imagenet", "--config.model.norm_batch=128"),
    "--slices=v3-8,v5e-8",
)
SEARCH = (
    *("--config.train.steps=100", "--config.train.eval_every=25", "--trials=20"),
    *("--space=optimizer.learning_rate=log:1e-3..10", "--space=model.width=choice:16,32"),
)
COLUMNS = 128  # of the terminal in the picture

# A terminal's window, as rich draws it, but in a font that every machine has: no address of a font.
_SVG = """<svg class="rich-terminal" viewBox="0 0 {width} {height}" \
xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font-family: "DejaVu Sans Mono", Menlo, Consolas, monospace; \
font-size: {char_height}px; line-height: {line_height}px; font-variant-east-asian: full-width; }}
.{unique_id}-title {{ font-size: 18px; font-weight: bold; font-family: sans-serif; }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}" />
</clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""


def curves() -> None:
    """Draws a run of `digits_resnet` with `tftpu plot`."""
    with tempfile.TemporaryDirectory() as folder:
        workdir = f"{folder}/digits_resnet"
        train = ["train", "--config=digits_resnet", f"--workdir={workdir}"]
        subprocess.run([TFTPU, *train], check=True)
        subprocess.run([TFTPU, "plot", workdir, f"--output={IMAGES / 'curves.png'}"], check=True)


def search() -> None:
    """Draws a search of `digits_resnet`, the one of its guide."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["search", "--config=digits_resnet", *SEARCH, f"--workdir={folder}"]
        subprocess.run([TFTPU, *words], check=True)
        shutil.copy(f"{folder}/search.png", IMAGES / "search.png")


def preflight() -> None:
    """Shows the table of `tftpu preflight` as a terminal shows it."""
    with tempfile.TemporaryDirectory() as folder:
        output = in_terminal([str(TFTPU), *PREFLIGHT, f"--workdir={folder}"])
    (IMAGES / "preflight.svg").write_text(as_svg(table(output), "tftpu " + " ".join(PREFLIGHT)))


def in_terminal(command: list[str]) -> str:
    """Returns what a command prints on a terminal, colours included.

    Raises:
        subprocess.CalledProcessError: the command failed.
    """
    pieces: list[bytes] = []

    def read(descriptor: int) -> bytes:
        pieces.append(os.read(descriptor, 1 << 16))
        return pieces[-1]

    os.environ |= {"COLUMNS": str(COLUMNS), "LINES": "50", "TERM": "xterm-256color"}
    status = pty.spawn(command, read)
    if status:
        raise subprocess.CalledProcessError(status, command)
    return b"".join(pieces).decode()


def table(output: str) -> str:
    """Returns the lines of the report's table: from its title to the first empty line."""
    lines = [line.rsplit("\r", 1)[-1] for line in output.replace("\r\n", "\n").split("\n")]
    start = next(i for i, line in enumerate(lines) if "Preflight:" in line)
    end = next(i for i in range(start, len(lines)) if not _plain(lines[i]).strip())
    return "\n".join(lines[start:end])


def as_svg(text: str, title: str) -> str:
    """Returns a picture of a terminal that shows a text with ANSI colours."""
    console = Console(record=True, width=COLUMNS, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(Text.from_ansi(text))
    return console.export_svg(title=title, code_format=_SVG, unique_id="tftpu")


def _plain(line: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line)


# The rooms from top to bottom: each imports from its own floor and from those below.
# `tests/project/test_documents.py` compares this with the imports.
FLOORS = (
    ("the command line", (("launch", "main, commands, cloud, diagnosis, configs"),)),
    (
        "the zoo, the data and the trainer",
        (
            ("models", "families, layers,|blocks, weights"),
            ("input_pipelines", "sources, datasets, reading,|augment, convert, formats"),
            ("tftpu.training", "Trainer,|a session of fit"),
            ("tftpu.preflight", "lower, compile,|price, advise"),
        ),
    ),
    (
        "what drives devices",
        (
            ("tftpu.engines.tensorflow", "TPUStrategy, MirroredStrategy"),
            ("tftpu.engines.jax", "jit over a mesh"),
            ("tftpu.inference", "export"),
        ),
    ),
    (
        "the engine protocol, and its users",
        (
            ("tftpu.engines.engine", "the protocol:|Engine, Leaf"),
            ("tftpu.checkpoint", "manifests,|the copy in host memory"),
            ("tftpu.runtime", "hosts, preemption,|watchdog, goodput"),
            ("tftpu.observe", "writers, console,|telemetry, profiler"),
        ),
    ),
    (
        "foundations",
        (
            ("tftpu.blocks", "of any model:|found, looped"),
            ("tftpu.kernels", "attention,|recomputation"),
            ("tftpu.optim", "optimizers,|losses, metrics"),
            ("tftpu.config", "dataclasses,|validation"),
            ("tftpu.storage", "disks, buckets,|safetensors"),
            ("tftpu.tpu", "slices, prices,|hardware"),
            ("tftpu.errors", "UserError"),
        ),
    ),
)
_WIDTH, _FLOOR, _ROOM = 960, 140, 80


def rooms() -> None:
    """Draws the folders of the tree, floor by floor."""
    parts = []
    for number, (title, floor) in enumerate(FLOORS):
        top = 16 + number * _FLOOR
        parts.append(
            f'<rect x="16" y="{top}" width="{_WIDTH - 32}" height="{_FLOOR - 24}" rx="8" '
            'fill="#eef1fb"/>'
            f'<text x="30" y="{top + 21}" class="floor">{title}</text>'
        )
        width = (_WIDTH - 60 - 12 * (len(floor) - 1)) / len(floor)
        for place, (name, content) in enumerate(floor):
            left = 30 + place * (width + 12)
            middle = left + width / 2
            parts.append(
                f'<rect x="{left:.0f}" y="{top + 29}" width="{width:.0f}" height="{_ROOM - 4}" '
                'rx="6" fill="#fff" stroke="#4051b5"/>'
                f'<text x="{middle:.0f}" y="{top + 54}" class="room">{name}</text>'
                + "".join(
                    f'<text x="{middle:.0f}" y="{top + 73 + 16 * line}" class="content">'
                    f"{text}</text>"
                    for line, text in enumerate(content.split("|"))
                )
            )
        if number:
            parts.append(
                f'<path d="M{_WIDTH / 2:.0f} {top - 22} v14" stroke="#4051b5" stroke-width="2" '
                'marker-end="url(#down)"/>'
            )
    height = 16 + len(FLOORS) * _FLOOR
    (IMAGES / "rooms.svg").write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img">\n'
        "<title>The folders of the tree; a floor may import the floors below it</title>\n"
        "<style>text{font-family:sans-serif;fill:#222}.floor{font-size:13px;fill:#4051b5}"
        ".room{font-size:15px;font-weight:bold;text-anchor:middle}"
        ".content{font-size:12.5px;text-anchor:middle}</style>\n"
        '<defs><marker id="down" viewBox="0 0 8 8" refX="4" refY="4" markerWidth="5" '
        'markerHeight="5" orient="auto"><path d="M0 0 L8 4 L0 8 z" fill="#4051b5"/></marker>'
        "</defs>\n"
        f'<rect width="{_WIDTH}" height="{height}" rx="10" fill="#fff"/>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


# What each step of a training pipeline is, below its name.
STEPS = {
    "new-run": "names the folder",
    "convert": "tftpu data convert",
    "check": "tftpu data check",
    "search": "tftpu search",
    "train": "tftpu train",
    "evaluate": "tftpu evaluate",
    "gate": "accuracy>=0.95?",
    "export": "tftpu export",
    "predict": "tftpu predict",
}
_BOX, _GAP, _ROW = 108, 14, 70


def pipeline() -> None:
    """Draws the steps of a compiled training pipeline, each right of those that it waits for."""
    from tftpu.launch import kfp

    made = kfp.training_pipeline(source="images:photos", search=[], predict="images:new")
    tasks = made.pipeline_spec.root.dag.tasks
    before = {name: list(task.dependent_tasks) for name, task in tasks.items()}
    depth: dict[str, int] = {}
    while len(depth) < len(before):
        ready = {n: b for n, b in before.items() if n not in depth and all(x in depth for x in b)}
        depth |= {name: max((depth[x] + 1 for x in b), default=0) for name, b in ready.items()}
    columns = [
        [n for n in STEPS if depth[n] == column] for column in range(max(depth.values()) + 1)
    ]
    rows, step = max(map(len, columns)), _BOX + _GAP
    width, height = 20 + step * len(columns), 20 + _ROW * rows
    parts = []
    for column, names in enumerate(columns):
        for row, name in enumerate(names):
            left, top = 16 + step * column, 16 + (rows - len(names)) * _ROW / 2 + row * _ROW
            parts.append(
                f'<rect x="{left}" y="{top:.0f}" width="{_BOX}" height="52" rx="6" fill="#eef1fb" '
                'stroke="#4051b5"/>'
                f'<text x="{left + _BOX / 2:.0f}" y="{top + 22:.0f}" class="step">{name}</text>'
                f'<text x="{left + _BOX / 2:.0f}" y="{top + 40:.0f}" class="what">'
                f"{STEPS[name].replace('>', '&gt;')}</text>"
            )
            if column:
                middle = 16 + rows * _ROW / 2 - 9
                parts.append(
                    f'<path d="M{left - _GAP + 1} {middle:.0f} L{left - 4} {top + 26:.0f}" '
                    'stroke="#4051b5" stroke-width="2" marker-end="url(#to)"/>'
                )
    (IMAGES / "pipeline.svg").write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">\n'
        "<title>The steps of a training pipeline</title>\n"
        "<style>text{font-family:sans-serif;fill:#222;text-anchor:middle}"
        ".step{font-size:14px;font-weight:bold}.what{font-size:10.5px}</style>\n"
        '<defs><marker id="to" viewBox="0 0 8 8" refX="4" refY="4" markerWidth="4" '
        'markerHeight="4" orient="auto"><path d="M0 0 L8 4 L0 8 z" fill="#4051b5"/></marker>'
        "</defs>\n"
        f'<rect width="{width}" height="{height}" rx="10" fill="#fff"/>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def gallery() -> None:
    """Executes every page of the gallery, as its reader would; keeps the picture that it draws."""
    for page in GALLERY:
        with tempfile.TemporaryDirectory() as folder:
            execute_page(page, Path(folder))
            with Image.open(Path(folder) / f"{page.stem}.png") as picture:
                # 64 colours are enough for curves, in a third of the bytes.
                picture.convert("RGB").quantize(64).save(
                    IMAGES / "gallery" / f"{page.stem}.png", optimize=True
                )


def execute_page(page: Path, folder: Path) -> None:
    """Executes the blocks of a page in one program, in a folder; commands train all their steps.

    Raises:
        subprocess.CalledProcessError: a block failed.
    """
    sys.path.insert(0, str(ROOT))
    from tests.support.repository import doc_blocks

    lines = ["import subprocess"]
    found = doc_blocks.blocks(page.relative_to(ROOT).as_posix())
    commands = {command for block in found for command in block.commands}
    for block in found:
        if block.title:
            (folder / block.title).write_text(block.text)
        if block.language == "python" and f"python {block.title}" not in commands:
            lines.append(block.text)
        elif block.language == "bash":
            words = (shlex.split(command) for command in block.commands)
            lines += [f"subprocess.run({json.dumps(w)}, check=True)" for w in words]
    (folder / "page.py").write_text("\n".join(lines))
    path = os.pathsep.join([str(TFTPU.parent), os.environ["PATH"]])
    variables = {"PATH": path, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "2"}
    print(f"== {page.name}", flush=True)
    start = time.monotonic()
    program = [sys.executable, "page.py"]
    subprocess.run(program, cwd=folder, env=os.environ | variables, check=True)
    print(f"== {page.name}: {time.monotonic() - start:.0f} s", flush=True)


PICTURES = {
    "gallery": gallery,
    "rooms": rooms,
    "pipeline": pipeline,
    "curves": curves,
    "search": search,
    "preflight": preflight,
}

if __name__ == "__main__":
    for name in sys.argv[1:] or PICTURES:
        PICTURES[name]()
