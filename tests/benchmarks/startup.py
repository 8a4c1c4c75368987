"""The time from `tftpu train` to the first trained step, by part.

    python -m tests.benchmarks.startup [runs]

Trains `digits_resnet` in a separate process up to the end of the first device loop, again and
again. Runs that time the parts take turns with runs that time the import of each package (`-X
importtime`, which slows everything down a little). Medians over the runs are printed: seconds that
pass, which on a busy machine are more than the run needs, and seconds of processor time.
"""

import collections
import contextlib
import functools
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

BAR = 5.0  # seconds, on two quiet cores with warm caches
CONFIG = "digits_resnet"
SHOWN = 12  # packages
PARTS = {
    "interpreter": "Python's own start",
    "command line": "flags, config, first line",
    "TensorFlow and Keras": "their import",
    "tftpu": "import of trainer, models and pipelines",
    "devices": "connecting",
    "training data": "",
    "evaluation data": "",
    "model": "model, optimizer and trainer",
    "before tracing": "checkpoints, writers, iterators",
    "tracing": "Python code of the step to a graph",
    "compiling": "XLA, and the first device loop",
}


class Part(NamedTuple):
    """Elapsed seconds and processor seconds of a part of the start."""

    wall: float
    cpu: float


def main(runs: int) -> None:
    """Prints the medians over runs."""
    parts: dict[str, list[Part]] = {name: [] for name in PARTS}
    imports: dict[str, list[float]] = collections.defaultdict(list)
    first_lines = []
    _start(importtime=False)  # warms the caches
    for _ in range(runs):
        found, first_line = _parts()
        first_lines.append(first_line)
        for name in PARTS:
            parts[name].append(found[name])
        for package, seconds in _imports().items():
            imports[package].append(seconds)
    print(f"{'part':22}{'passed, s':>10}{'CPU, s':>8}")
    for name, said in PARTS.items():
        wall, cpu = (statistics.median(part[i] for part in parts[name]) for i in (0, 1))
        print(f"{name:22}{wall:10.2f}{cpu:8.2f}  {said}")
    totals = [Part(*(sum(p[n][i] for p in parts.values()) for i in (0, 1))) for n in range(runs)]
    wall, cpu = (statistics.median(total[i] for total in totals) for i in (0, 1))
    print(f"{'first trained step':22}{wall:10.2f}{cpu:8.2f}  the bar is {BAR:.0f} s: {wall <= BAR}")
    print(f"{'first line printed':22}{statistics.median(first_lines):10.2f}")
    print("\nimports by package, own modules only, s")
    medians = {package: statistics.median(seconds) for package, seconds in imports.items()}
    for package, seconds in sorted(medians.items(), key=lambda item: -item[1])[:SHOWN]:
        print(f"{package:22}{seconds:10.2f}")


def _parts() -> tuple[dict[str, Part], float]:
    """Runs once; returns the parts, and the seconds until the first line."""
    start, marks, _ = _start(importtime=False)
    found = {}
    before, cpu_before = start, 0.0
    for name, wall, cpu in marks["marks"]:
        found[name] = Part(wall - before, cpu - cpu_before)
        before, cpu_before = wall, cpu
    whole = found.pop("first loop")
    tracing = Part(*marks["tracing"])
    compiling = Part(*marks["compiling"])
    found["tracing"], found["compiling"] = tracing, compiling
    found["before tracing"] = Part(*(w - t - c for w, t, c in zip(whole, tracing, compiling)))
    return found, marks["first line"] - start


def _imports() -> dict[str, float]:
    """Runs once; returns the seconds that each package's own modules took to import."""
    _, _, log = _start(importtime=True)
    seconds: dict[str, float] = collections.Counter()
    for own, name in re.findall(r"import time:\s+(\d+) \|\s+\d+ \|\s+(\w+)", log):
        seconds[name] += int(own) / 1e6
    return seconds


def _start(importtime: bool) -> tuple[float, dict[str, Any], str]:
    """Runs the child; returns the start time, its measurements and its standard error."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["-X", "importtime"] if importtime else []
        command = [sys.executable, *words, "-m", "tests.benchmarks.startup", "--child", folder]
        start = time.monotonic()
        done = subprocess.run(command, capture_output=True, text=True)
        result = Path(folder) / "marks.json"
        if not result.exists():
            sys.exit(done.stderr[-2000:])
        return start, json.loads(result.read_text()), done.stderr


class _Child:
    """A run of the command, with marks between the parts, up to the first device loop."""

    def __init__(self, folder: str):
        self._folder = Path(folder)
        self._marks: list[tuple[str, float, float]] = []
        self._first_line = 0.0
        self._depth = 0
        self._traced = [0.0, 0.0]
        self._end_of_trace = Part(0.0, 0.0)

    def run(self) -> None:
        self.mark("interpreter")
        from tftpu.launch import main, startup

        sys.stdout = self  # to see the first line
        startup.import_tensorflow = self._around(startup.import_tensorflow)
        workdir = self._folder / "run"
        main.main(["train", f"--config={CONFIG}", f"--workdir={workdir}", "--tpu=none"])

    def mark(self, name: str) -> None:
        """Ends a part."""
        self._marks.append((name, time.monotonic(), time.process_time()))

    def write(self, text: str) -> int:
        self._first_line = self._first_line or time.monotonic()
        return sys.__stdout__.write(text) if sys.__stdout__ else 0

    def flush(self) -> None:
        """Does nothing: there is no buffer."""

    def isatty(self) -> bool:
        """Says that lines are not redrawn."""
        return False

    def _around(self, import_tensorflow):
        def imported() -> None:
            self.mark("command line")
            import_tensorflow()
            self.mark("TensorFlow and Keras")
            self._hook()
            self.mark("tftpu")

        return imported

    def _hook(self) -> None:
        from tensorflow.python.framework import func_graph

        from tftpu import input_pipelines
        from tftpu.launch.run import experiment, training
        from tftpu.training.trainer import Trainer

        def marked(module: Any, name: str, part: str) -> None:
            function = getattr(module, name)

            @functools.wraps(function)
            def wrapped(*args, **keywords):
                result = function(*args, **keywords)
                self.mark(part)
                return result

            setattr(module, name, wrapped)

        del training  # imported for the time that it takes
        marked(experiment, "connect", "devices")
        marked(experiment, "build_training_data", "training data")
        marked(input_pipelines, "evaluation", "evaluation data")
        marked(experiment, "build_trainer", "model")
        func_graph.FuncGraph.as_default = self._traced_within(func_graph.FuncGraph.as_default)
        fit = Trainer.fit
        Trainer.fit = lambda trainer, *args, **keywords: fit(
            trainer, *args, **{**keywords, "callbacks": [self._callback()]}
        )

    def _traced_within(self, as_default):
        @contextlib.contextmanager
        def timed(graph, *args, **keywords) -> Iterator[Any]:
            self._depth += 1
            start = time.monotonic(), time.process_time()
            try:
                with as_default(graph, *args, **keywords) as within:
                    yield within
            finally:
                self._depth -= 1
                now = Part(time.monotonic(), time.process_time())
                if self._depth == 0:
                    self._traced = [t + n - s for t, n, s in zip(self._traced, now, start)]
                    self._end_of_trace = now

        return timed

    def _callback(self):
        import keras

        child = self

        class First(keras.callbacks.Callback):
            def on_train_batch_end(self, batch, logs=None):
                child.mark("first loop")
                child.end()

        return First()

    def end(self) -> None:
        """Writes the marks, and ends the process at once."""
        _, wall, cpu = self._marks[-1]
        found = {
            "marks": self._marks,
            "first line": self._first_line,
            "tracing": self._traced,
            "compiling": [wall - self._end_of_trace.wall, cpu - self._end_of_trace.cpu],
        }
        (self._folder / "marks.json").write_text(json.dumps(found))
        sys.stderr.flush()
        os._exit(0)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        _Child(sys.argv[2]).run()
    else:
        main(int(sys.argv[1]) if sys.argv[1:] else 5)
