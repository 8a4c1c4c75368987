"""The code blocks of README and of the documentation: found, and executed as a reader would.

    python -m tests.support.repository.doc_blocks PAGE...

executes the blocks of pages, in an empty folder.

Each page has its own folder with photographs and texts; the runs are shared by all, so that a page
resumes what an earlier one trained. Python blocks of a page share one namespace; a
block with `title="photos.py"` is also written to that file. Lines of bash blocks are `tftpu`
commands, run in this process where they can be, and `make` targets, looked up in the Makefile. A
block under `<!-- checked, not run: REASON -->` is not executed; `tests/launch/test_readme_lines.py`
checks its commands.
"""

import dataclasses
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import textwrap
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

from tests.support.repository.checkout import ROOT

PAGES = (
    "README.md",
    "CONTRIBUTING.md",
    *sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")),
)
LANGUAGES = ("python", "bash", "text", "diff")  # the first two are executed

# Steps trained instead of the full number; they must include the steps to be profiled.
STEPS = {"digits_resnet": 40, "lines.py": 200}
FEW_STEPS = 2
PROFILED = 120
TRIALS = 4  # of a search
LIMIT = 900  # seconds for the blocks of a page, on cores that others use as well
CHECKED = re.compile(r"<!-- checked, not run: (.+) -->")


@dataclasses.dataclass(frozen=True)
class Block:
    """A fenced block of a page.

    Attributes:
        page: path from the root of the repository.
        line: of the opening fence.
        title: name of the file that the reader is to save it as; "": none.
        reason: why it is not executed; "": it is.
    """

    page: str
    line: int
    language: str
    title: str
    text: str
    reason: str

    @property
    def commands(self) -> list[str]:
        """The lines of a bash block: continued ones joined, without comments."""
        joined = self.text.replace("\\\n", " ").splitlines()
        lines = (re.sub(r"(^|\s+)# .*", "", line).strip() for line in joined)
        return [re.sub(r"\s+", " ", line) for line in lines if line]


def blocks(page: str) -> list[Block]:
    """Returns the fenced blocks of a page, in their order."""
    return list(_blocks(page, (ROOT / page).read_text().splitlines()))


def _blocks(page: str, lines: list[str]) -> Iterator[Block]:
    number = 0
    while number < len(lines):
        fence = re.fullmatch(r'( *)```(\w*)(?: title="(.+)")?', lines[number])
        if fence:
            end = lines.index(f"{fence[1]}```", number + 1)
            text = textwrap.dedent("\n".join(lines[number + 1 : end])) + "\n"
            above = CHECKED.fullmatch(lines[number - 1].strip()) if number else None
            reason = above[1] if above else ""
            yield Block(page, number + 1, fence[2], fence[3] or "", text, reason)
            number = end
        number += 1


def run(page: str) -> None:
    """Executes the blocks of a page in the current folder, in their order.

    Raises:
        Exception: whatever a block raises; a command that fails raises `PageError`.
    """
    namespace: dict[str, object] = {"__name__": "__page__"}
    found = blocks(page)
    scripts = {f"python {block.title}" for block in found if block.title}
    own = scripts & {command for block in found for command in block.commands}
    for block in found:
        if block.reason:
            continue
        print(f"== {page}:{block.line}", flush=True)
        if block.language == "python":
            if block.title:
                Path(block.title).write_text(block.text)
            if f"python {block.title}" in own:  # a command of the page runs it
                continue
            code = compile("\n" * block.line + block.text, str(ROOT / page), "exec")
            exec(code, namespace)
        elif block.language == "bash":
            for command in block.commands:
                _run_command(command)


class PageError(Exception):
    """A command of a page that fails, or that nothing checks."""


def _run_command(command: str) -> None:
    print(f"$ {command}", flush=True)
    name, *arguments = shlex.split(command)
    if name == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M)
        missing = set(arguments) - set(targets)
        if missing:
            raise PageError(f"The Makefile has no target {', '.join(missing)}.")
        return
    if name == "python" and Path(arguments[0]).exists():
        if subprocess.run([sys.executable, *arguments], check=False).returncode:
            raise PageError(f"`{command}` fails.")
        return
    if name != "tftpu":
        raise PageError(f"Nothing checks `{command}`: give the block a reason in a comment.")
    arguments = _shortened(arguments)
    # A fresh TensorFlow, or Keras on another backend.
    own_process = ("--virtual_devices", "--restarts", "--config.cluster")
    if any(word.startswith(own_process) for word in arguments):
        own = [sys.executable, "-m", "tftpu.launch.main", *arguments]
        code = subprocess.run(own, check=False).returncode
    else:
        from tftpu.launch import main

        code = main.main(arguments)
    if code:
        raise PageError(f"`{command}` ends with {code}.")


def _shortened(arguments: list[str]) -> list[str]:
    """Returns the arguments of a command that trains a few steps, or searches in a few trials."""
    given = [a.removeprefix("--config=") for a in arguments[1:] if not re.match("--(?!config=)", a)]
    config = given[0] if given else ""
    profiled = any(word.startswith("--config.train.profile=") for word in arguments)
    steps = PROFILED if profiled else STEPS.get(config, FEW_STEPS)
    arguments = [re.sub(r"/checkpoints/\d+$", f"/checkpoints/{steps}", a) for a in arguments]
    if arguments[0] == "search" and config:
        arguments = [re.sub(r"^--trials=\d+$", f"--trials={TRIALS}", a) for a in arguments]
    if arguments[0] == "train" or (arguments[0] == "search" and config):
        arguments += [f"--config.train.steps={steps}", f"--config.train.eval_every={steps}"]
    return arguments


def _lay_out() -> None:
    """Creates what the pages assume: photographs, texts, and the config of README."""
    from tests.support.data import photos

    for split, count in (("train", 8), ("val", 4)):
        for seed, kind in enumerate(("bird", "cat", "dog")):
            folder = Path("photos", split, kind)
            folder.mkdir(parents=True)
            for index in range(count):
                image = photos.pixels(72, 96, seed=100 * seed + index)
                (folder / f"{index}.jpg").write_bytes(photos.encoded(image))
    Path("books").mkdir()
    line = '{"text": "It was a bright cold day in April, and the clocks were striking."}\n'
    Path("books", "one.jsonl").write_text(line * 40)
    for block in blocks("README.md"):
        if block.title:
            Path(block.title).write_text(block.text)


def _late(number: int, frame: object) -> None:
    raise TimeoutError(f"The blocks of a page take more than {LIMIT} s.")


def main(pages: list[str]) -> None:
    """Executes pages; writes `results.json`, the error of each by its name, "" if it has none."""
    top, results = Path.cwd(), {}
    (top / "runs").mkdir()
    signal.signal(signal.SIGALRM, _late)
    variables = dict(os.environ)
    for number, page in enumerate(pages):
        os.environ.clear()  # each page has its own shell; tensorflow_transform sets a variable
        os.environ.update(variables)
        folder = top / f"page{number}"
        folder.mkdir()
        os.chdir(folder)
        os.symlink(top / "runs", "runs")
        _lay_out()
        results[page], start = "", time.monotonic()
        signal.alarm(LIMIT)
        try:
            run(page)
        except BaseException:
            results[page] = traceback.format_exc()
        signal.alarm(0)
        print(f"== {page}: {time.monotonic() - start:.0f} s {results[page]}", flush=True)
        (top / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    os.environ.setdefault("NO_GCE_CHECK", "true")
    # As in the reader's environment, whose `tftpu` a program of the page may start.
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    main(sys.argv[1:])
