"""Where a run's numbers go: one narrow interface, many sinks."""

import json
import os
import sys
import time
from typing import Protocol

from rich.console import Console as RichConsole
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tftpu import files

TENSORBOARD_ONLY = ("learning_rate", "grad_norm")


class Writer(Protocol):
    """A sink of scalars. Steps never go back within one run."""

    def write(self, step: int, split: str, scalars: dict[str, float]) -> None:
        """Args: steps done; "train" or "eval"; finite or not, plain floats."""

    def close(self) -> None:
        """Nothing is written after this."""


class Writers:
    """All the writers of a run, as one."""

    def __init__(self, writers: list[Writer]):
        self._writers = writers

    def write(self, step: int, split: str, scalars: dict[str, float]) -> None:
        for writer in self._writers:
            writer.write(step, split, scalars)

    def close(self) -> None:
        for writer in self._writers:
            writer.close()


class JsonLines:
    """`metrics.jsonl`: one object a line. Lines after the step that a run goes on from are cut."""

    def __init__(self, path: str, resumed_at: int):
        self._path = path
        files.truncate_lines(path, resumed_at)

    def write(self, step: int, split: str, scalars: dict[str, float]) -> None:
        record = {"step": step, "split": split, **scalars, "time": round(time.time(), 3)}
        line = (json.dumps(record) + "\n").encode()
        if files.is_remote(self._path):  # a bucket has no append: the whole is written anew
            before = files.read(self._path) if files.exists(self._path) else b""
            files.write_whole(self._path, before + line)
            return
        os.makedirs(os.path.dirname(self._path) or ".", exist_ok=True)
        with open(self._path, "ab") as file:
            file.write(line)

    def close(self) -> None:
        pass


class TensorBoard:
    """Event files in `train/` and `eval/` of the workdir."""

    def __init__(self, workdir: str):
        self._workdir = workdir
        self._writers = {}

    def write(self, step: int, split: str, scalars: dict[str, float]) -> None:
        import tensorflow as tf

        if split not in self._writers:
            self._writers[split] = tf.summary.create_file_writer(
                files.join(self._workdir, split), flush_millis=10_000
            )
        with self._writers[split].as_default(step=step):
            for name, value in scalars.items():
                tf.summary.scalar(name, value)

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()


class Console:
    """A progress bar where there is a terminal, plain lines where there is none.

    Args:
        steps: of the whole run.
        start: the step that the run begins at.
    """

    def __init__(self, steps: int, start: int = 0):
        self._console = RichConsole(file=sys.stdout, soft_wrap=True, highlight=False)
        self._steps = steps
        self._progress = None
        if self._console.is_terminal:
            self._progress = Progress(
                TextColumn("[bold]{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[numbers]}"),
                console=self._console,
            )
            self._task = self._progress.add_task(
                "compiling", total=steps, completed=start, numbers=""
            )
            self._progress.start()

    def advance(self, step: int) -> None:
        """Moves the bar."""
        if self._progress:
            self._progress.update(self._task, completed=step, description="training")

    def write(self, step: int, split: str, scalars: dict[str, float]) -> None:
        numbers = "  ".join(
            f"{name} {format_number(value)}"
            for name, value in scalars.items()
            if name not in TENSORBOARD_ONLY
        )
        if self._progress and split == "train":
            self._progress.update(self._task, completed=step, numbers=numbers)
            return
        self.say(f"{split:5} step {step}/{self._steps}  {numbers}")

    def say(self, text: str) -> None:
        """Prints a line, above the bar."""
        self._console.print(text, markup=False)

    def close(self) -> None:
        if self._progress:
            self._progress.stop()


def format_number(value: float) -> str:
    """Four significant digits; whole numbers from 1,000 up."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
