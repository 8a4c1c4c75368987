"""Writers: sinks for a run's scalars, texts and images. The console's is in `console.py`."""

import contextlib
import json
import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from tftpu.amounts import format_metric
from tftpu.storage import files
from tftpu.storage.lines import Lines

_log = logging.getLogger(__name__)

Hyperparameters = Mapping[str, bool | int | float | str]

# Scalars that are drawn as curves, but left out of log lines.
CURVES_ONLY = ("learning_rate", "grad_norm", "weight_norm")
THROUGHPUT = "examples_per_sec"
# Bytes after which a new event file is started in a bucket, where every flush uploads the whole
# file.
EVENTS = 1 << 18
HOST = "host"  # the split of goodput and telemetry, which `metrics.jsonl` leaves out


class Writer:
    """A sink whose methods do nothing by default. Steps decrease only after `roll_back`.

    Attributes:
        failures: exceptions, besides OSError, of a failed write; they do not end a run.
    """

    failures: tuple[type[Exception], ...] = ()

    def begin(self, config: Hyperparameters) -> None:
        """Receives the settings of the run, a flat mapping, before all other calls."""

    def write(self, step: int, split: str, scalars: Mapping[str, float]) -> None:
        """Writes scalars, finite or not.

        Args:
            step: steps trained.
            split: "train", "eval" or HOST.
            scalars: the scalars by name.
        """

    def write_text(self, step: int, name: str, text: str) -> None:
        """Writes a text in Markdown, such as a summary of the model or a sample."""

    def write_images(self, step: int, name: str, images: np.ndarray) -> None:
        """Writes images of shape (count, height, width, 3) and dtype uint8."""

    def say(self, text: str) -> None:
        """Writes a line of text, such as a warning."""

    def roll_back(self, step: int) -> None:
        """Drops everything written for steps after this one, which the run repeats."""

    def flush(self, durable: bool = False) -> None:
        """Writes everything that the writer has buffered.

        Args:
            durable: whether the data must survive a crash of the machine.
        """

    def close(self) -> None:
        """Ends the run; nothing is written afterwards."""


class Writers(Writer):
    """Several writers as one. A failing writer does not end the run, and is reported once."""

    def __init__(self, writers: Sequence[Writer]):
        self._writers = list(writers)
        self._failed: set[int] = set()

    def begin(self, config: Hyperparameters) -> None:
        self._call_all("begin", config)

    def write(self, step: int, split: str, scalars: Mapping[str, float]) -> None:
        self._call_all("write", step, split, scalars)

    def write_text(self, step: int, name: str, text: str) -> None:
        self._call_all("write_text", step, name, text)

    def write_images(self, step: int, name: str, images: np.ndarray) -> None:
        self._call_all("write_images", step, name, images)

    def say(self, text: str) -> None:
        self._call_all("say", text)

    def roll_back(self, step: int) -> None:
        self._call_all("roll_back", step)

    def flush(self, durable: bool = False) -> None:
        self._call_all("flush", durable)

    def close(self) -> None:
        self._call_all("close")

    def _call_all(self, method: str, *args: Any) -> None:
        for index, writer in enumerate(self._writers):
            try:
                getattr(writer, method)(*args)
            except (OSError, *writer.failures) as error:
                if index not in self._failed:
                    name = type(writer).__name__
                    _log.warning("%s cannot write (%s): its output is incomplete.", name, error)
                self._failed.add(index)


class JsonLines(Writer):
    """`metrics.jsonl`: one JSON object per line.

    Args:
        path: local or `gs://`.
        resumed_at: the step that the run starts at; lines of later steps are removed.
    """

    def __init__(self, path: str, resumed_at: int):
        self._lines = Lines(path, resumed_at)

    def write(self, step: int, split: str, scalars: Mapping[str, float]) -> None:
        if split != HOST:
            record = {"step": step, "split": split, **scalars, "time": round(time.time(), 3)}
            self._lines.append(json.dumps(record) + "\n")

    def roll_back(self, step: int) -> None:
        self._lines.roll_back(step)

    def flush(self, durable: bool = False) -> None:
        self._lines.flush(durable)

    def close(self) -> None:
        self._lines.close()


class LogFile(Writer):
    """`train.log`: the lines that the console prints without a terminal, with the time.

    Args:
        path: local or `gs://`; lines are appended.
        steps: total steps of the run; None: unknown.
    """

    def __init__(self, path: str, steps: int | None):
        self._lines = Lines(path)
        self._steps = steps

    def write(self, step: int, split: str, scalars: Mapping[str, float]) -> None:
        if split != HOST:
            self.say(format_line(step, self._steps, split, scalars))

    def say(self, text: str) -> None:
        now = time.strftime("%Y-%m-%d %H:%M:%S")
        self._lines.append("".join(f"{now}  {part}\n" for part in text.splitlines()))

    def flush(self, durable: bool = False) -> None:
        self._lines.flush(durable)

    def close(self) -> None:
        self._lines.close()


class TensorBoard(Writer):
    """Event files in `train/` and `eval/` of the workdir.

    Goodput, telemetry and texts are in `train/`, so that TensorBoard lists only two runs.

    Args:
        workdir: local or `gs://`.
        start: the step that the run starts at.
    """

    def __init__(self, workdir: str, start: int = 0):
        from tensorflow import errors

        self.failures = (errors.OpError,)
        self._workdir = workdir
        self._start = start
        self._config: Hyperparameters = {}  # empty once the HParams tab has it
        self._writers: dict[str, Any] = {}  # tf.summary.SummaryWriter by folder
        self._written: dict[str, int] = {}  # approximate bytes in their files

    def begin(self, config: Hyperparameters) -> None:
        self._config = config
        rows = "\n".join(f"| {name} | {value} |" for name, value in config.items())
        self.write_text(self._start, "config", f"| field | value |\n|---|---|\n{rows}")

    def write(self, step: int, split: str, scalars: Mapping[str, float]) -> None:
        import tensorflow as tf

        if split == "eval":
            self._write_hyperparameters("eval")
        with self._open_folder("train" if split == HOST else split, step, 100 * len(scalars)):
            for name, value in scalars.items():
                # An array instead of a number; `_open_folder` gives the reason.
                tf.summary.scalar(name, np.asarray(value))

    def write_text(self, step: int, name: str, text: str) -> None:
        import tensorflow as tf

        with self._open_folder("train", step, len(text)):
            tf.summary.text(name, text)

    def write_images(self, step: int, name: str, images: np.ndarray) -> None:
        import tensorflow as tf

        with self._open_folder("eval", step, images.nbytes):
            tf.summary.image(name, images, max_outputs=len(images))

    def close(self) -> None:
        self._write_hyperparameters("train")  # nothing happens if an evaluation wrote them
        for writer in self._writers.values():
            writer.close()

    def _write_hyperparameters(self, folder: str) -> None:
        """Writes the settings for the HParams tab, which shows them with the folder's scalars."""
        # The module's `api` imports tf.keras, which fails if TF_USE_LEGACY_KERAS asks for Keras 2.
        from tensorboard.plugins.hparams import summary_v2 as hparams

        if self._config:
            shown = {_build_column(name): value for name, value in self._config.items()}
            with self._open_folder(folder, self._start):
                hparams.hparams(shown, trial_id=os.path.abspath(self._workdir))
        self._config = {}

    def _open_folder(self, folder: str, step: int, size: int = 0) -> Any:
        """Returns a context in which summaries are written to a folder.

        Args:
            folder: a folder in the workdir.
            step: the step of the summaries in the context.
            size: the approximate bytes of these summaries.
        """
        import tensorflow as tf

        self._written[folder] = self._written.get(folder, 0) + size
        full = self._written[folder] > EVENTS and folder in self._writers
        if full and files.is_remote(self._workdir):
            # If the bucket cannot be reached, a later call tries again.
            with contextlib.suppress(tf.errors.OpError):
                self._writers[folder].flush()
                self._writers.pop(folder).close()
                self._written[folder] = size
        if folder not in self._writers:
            path = files.join(self._workdir, folder)
            # TensorFlow also flushes a full queue, but in a bucket a flush uploads the whole file:
            # there the queue is so long that only elapsed time causes a flush.
            queue = 10_000 if files.is_remote(path) else 10
            self._writers[folder] = tf.summary.create_file_writer(path, queue, flush_millis=10_000)
        # An array, because TensorFlow keeps every Python number that it has ever converted.
        writer, now = self._writers[folder], np.array(step)
        if files.is_remote(self._workdir):
            return _unflushed(writer, now)
        return writer.as_default(step=now)


@contextlib.contextmanager
def _unflushed(writer: Any, step: np.ndarray) -> Iterator[None]:
    """Makes a TensorFlow writer the default within the block, without a flush at the end.

    When TensorFlow's context ends, it flushes the current default. That is then a writer which has
    nothing to flush. (TensorFlow's no-op writer cannot be the default.)
    """
    import tensorflow as tf

    class Nothing(tf.summary.SummaryWriter):
        def flush(self) -> None:
            pass

    nothing = Nothing()
    with nothing.as_default(step=step):
        writer.set_as_default()
        try:
            yield
        finally:
            nothing.set_as_default()


def format_step(step: int, steps: int | None) -> str:
    """Returns a step as text, followed by "/" and the total steps if they are known."""
    return str(step) if steps is None else f"{step}/{steps}"


def format_line(step: int, steps: int | None, split: str, scalars: Mapping[str, float]) -> str:
    """Formats scalars as a line of the log."""
    numbers = "  ".join(
        f"{name} {format_metric(value)}"
        for name, value in scalars.items()
        if name not in CURVES_ONLY
    )
    return f"{split:5} step {format_step(step, steps)}  {numbers}"


def _build_column(name: str) -> str:
    """Returns the column of a setting in the HParams tab, which sorts them by name.

    "learning_rate" becomes "Learning rate", so that it precedes fields such as "data.name".
    """
    return name if "." in name else name.replace("_", " ").capitalize()
