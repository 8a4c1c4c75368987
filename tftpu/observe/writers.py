"""Where a run's numbers go: one narrow interface, many sinks. The console's is `console.py`."""

import contextlib
import json
import logging
import os
import time
import uuid
from collections.abc import Iterator
from typing import Any

import numpy as np

from tftpu.errors import UserError
from tftpu.storage import files

# What only curves are good for, not lines that people read.
CURVES_ONLY = ("learning_rate", "grad_norm", "weight_norm")
HOST = "host"  # the split of goodput and telemetry, which `metrics.jsonl` leaves out


class Writer:
    """A sink. A kind that it cannot hold it leaves aside. Steps never go back within one run."""

    # What it raises when it cannot write, besides OSError: no reason to end a run.
    failures: tuple[type[Exception], ...] = ()

    def begin(self, config: dict[str, Any]) -> None:
        """What the run was set to: flat, of plain numbers, booleans and strings."""

    def write(self, step: int, split: str, scalars: dict[str, float]) -> None:
        """Args: steps done; "train", "eval" or "host"; finite or not, plain floats."""

    def write_text(self, step: int, name: str, text: str) -> None:
        """A text in Markdown, as the model's summary or a sample."""

    def write_images(self, step: int, name: str, images: np.ndarray) -> None:
        """Images of shape (count, height, width, 3), uint8."""

    def say(self, text: str) -> None:
        """A sentence for people."""

    def close(self) -> None:
        """Nothing is written after this."""


class Writers(Writer):
    """All the writers of a run, as one. What is away or full for one is no reason to end."""

    def __init__(self, writers: list[Writer]):
        self._writers = writers
        self._failed: set[int] = set()

    def begin(self, config: dict[str, Any]) -> None:
        self._all("begin", config)

    def write(self, step: int, split: str, scalars: dict[str, float]) -> None:
        self._all("write", step, split, scalars)

    def write_text(self, step: int, name: str, text: str) -> None:
        self._all("write_text", step, name, text)

    def write_images(self, step: int, name: str, images: np.ndarray) -> None:
        self._all("write_images", step, name, images)

    def say(self, text: str) -> None:
        self._all("say", text)

    def close(self) -> None:
        self._all("close")

    def _all(self, method: str, *args) -> None:
        from tensorflow.errors import OpError

        for index, writer in enumerate(self._writers):
            try:
                getattr(writer, method)(*args)
            except (OSError, OpError, *writer.failures) as error:
                if index not in self._failed:  # once a run
                    name = type(writer).__name__
                    logging.warning("%s cannot write (%s): lines will be missing.", name, error)
                self._failed.add(index)


class JsonLines(Writer):
    """`metrics.jsonl`: one object a line. Lines after the step that a run goes on from are cut."""

    def __init__(self, path: str, resumed_at: int):
        self._path = path
        files.truncate_lines(path, resumed_at)

    def write(self, step: int, split: str, scalars: dict[str, float]) -> None:
        if split != HOST:
            record = {"step": step, "split": split, **scalars, "time": round(time.time(), 3)}
            _append(self._path, json.dumps(record) + "\n")


class LogFile(Writer):
    """`train.log`: the lines that the console would print where there is no terminal, dated.

    Args:
        path: local or `gs://`; what is there stays.
        steps: of the whole run.
    """

    def __init__(self, path: str, steps: int):
        self._path = path
        self._steps = steps

    def write(self, step: int, split: str, scalars: dict[str, float]) -> None:
        if split != HOST:
            self.say(line(step, self._steps, split, scalars))

    def say(self, text: str) -> None:
        now = time.strftime("%Y-%m-%d %H:%M:%S")
        _append(self._path, "".join(f"{now}  {part}\n" for part in text.splitlines()))


class TensorBoard(Writer):
    """Event files in `train/`, `eval/` and `host/` of the workdir; texts in itself."""

    def __init__(self, workdir: str, start: int = 0):
        self._workdir = workdir
        self._start = start
        self._writers = {}

    def begin(self, config: dict[str, Any]) -> None:
        from tensorboard.plugins.hparams import api as hparams

        # The HParams tab shows the scalars that stand in the same folder, and those below it, but
        # not if the folder is the logdir itself.
        with self._at("eval", self._start):
            hparams.hparams(config, trial_id=os.path.abspath(self._workdir))
        rows = "\n".join(f"| {name} | {value} |" for name, value in config.items())
        self.write_text(self._start, "config", f"| field | value |\n|---|---|\n{rows}")

    def write(self, step: int, split: str, scalars: dict[str, float]) -> None:
        import tensorflow as tf

        with self._at(split, step):
            for name, value in scalars.items():
                tf.summary.scalar(name, value)

    def write_text(self, step: int, name: str, text: str) -> None:
        import tensorflow as tf

        with self._at("", step):
            tf.summary.text(name, text)

    def write_images(self, step: int, name: str, images: np.ndarray) -> None:
        import tensorflow as tf

        with self._at("eval", step):
            tf.summary.image(name, images, max_outputs=len(images))

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()

    def _at(self, folder: str, step: int):
        import tensorflow as tf

        if folder not in self._writers:
            path = files.join(self._workdir, folder) if folder else self._workdir
            self._writers[folder] = tf.summary.create_file_writer(path, flush_millis=10_000)
        return self._writers[folder].as_default(step=step)


class MLflow(Writer):
    """A run of MLflow, where its own environment says (MLFLOW_TRACKING_URI, ...).

    A run that is taken up again goes on in the same one.
    """

    def __init__(self, workdir: str):
        mlflow = _required("mlflow", "mlflow-skinny")
        self.failures = (mlflow.exceptions.MlflowException,)
        # Its own patience is minutes, which a run would stand still for at every line.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        path = files.join(workdir, "mlflow_run")
        known = files.read(path).decode() if files.exists(path) else None
        self._client = mlflow.MlflowClient()
        if known is None:
            with _refusals("mlflow", "MLFLOW_TRACKING_URI", self.failures):
                known = self._created(os.path.basename(workdir))
            files.write_whole(path, known.encode())
        self._run = known
        self._metric, self._param = mlflow.entities.Metric, mlflow.entities.Param

    def _created(self, name: str) -> str:
        """The number of a new run in the experiment, which is made if it is not there."""
        experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME", "tftpu")
        known = self._client.get_experiment_by_name(experiment)
        number = known.experiment_id if known else self._client.create_experiment(experiment)
        return self._client.create_run(number, run_name=name).info.run_id

    def begin(self, config: dict[str, Any]) -> None:
        # A parameter of MLflow never changes: what a restart sets anew keeps its first value.
        known = self._client.get_run(self._run).data.params
        params = [self._param(k, str(v)[:500]) for k, v in config.items() if k not in known]
        for first in range(0, len(params), 100):
            self._client.log_batch(self._run, params=params[first : first + 100])

    def write(self, step: int, split: str, scalars: dict[str, float]) -> None:
        now = int(time.time() * 1000)
        metrics = [self._metric(f"{split}/{k}", v, now, step) for k, v in scalars.items()]
        self._client.log_batch(self._run, metrics=metrics)

    def write_text(self, step: int, name: str, text: str) -> None:
        self._client.log_text(self._run, text, f"{name}/{step:08d}.md")

    def write_images(self, step: int, name: str, images: np.ndarray) -> None:
        self._client.log_image(self._run, np.concatenate(list(images), 1), f"{name}/{step:08d}.png")

    def close(self) -> None:
        self._client.set_terminated(self._run)


class WandB(Writer):
    """A run of Weights & Biases, where its own environment says (WANDB_PROJECT, WANDB_MODE, ...).

    A run that is taken up again goes on in the same one.
    """

    def __init__(self, workdir: str):
        self._wandb = _required("wandb", "wandb")
        self.failures = (self._wandb.Error,)
        path = files.join(workdir, "wandb_run")
        if not files.exists(path):
            files.write_whole(path, uuid.uuid4().hex[:16].encode())
        with _refusals("wandb", "WANDB_API_KEY, or WANDB_MODE=offline", self.failures):
            self._run = self._wandb.init(
                project=os.environ.get("WANDB_PROJECT", "tftpu"),
                id=files.read(path).decode(),
                resume="allow",
                name=os.path.basename(workdir),
                dir=None if files.is_remote(workdir) else workdir,
                settings=self._wandb.Settings(console="off"),
            )

    def begin(self, config: dict[str, Any]) -> None:
        self._run.config.update(config, allow_val_change=True)

    def write(self, step: int, split: str, scalars: dict[str, float]) -> None:
        self._run.log({f"{split}/{k}": v for k, v in scalars.items()}, step=step)

    def write_text(self, step: int, name: str, text: str) -> None:
        self._run.log({name: self._wandb.Html(f"<pre>{text}</pre>")}, step=step)

    def write_images(self, step: int, name: str, images: np.ndarray) -> None:
        self._run.log({name: [self._wandb.Image(image) for image in images]}, step=step)

    def close(self) -> None:
        self._run.finish()


# Asked for by name, in `train.writers`.
BY_NAME = {"mlflow": MLflow, "wandb": WandB}


def line(step: int, steps: int, split: str, scalars: dict[str, float]) -> str:
    """A line of the log, as people read it."""
    numbers = "  ".join(
        f"{name} {format_number(value)}"
        for name, value in scalars.items()
        if name not in CURVES_ONLY
    )
    return f"{split:5} step {step}/{steps}  {numbers}"


def format_number(value: float) -> str:
    """Four significant digits; whole numbers from 1,000 up."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _append(path: str, text: str) -> None:
    if files.is_remote(path):  # a bucket has no append: the whole is written anew
        before = files.read(path) if files.exists(path) else b""
        files.write_whole(path, before + text.encode())
        return
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    with open(path, "ab") as file:
        file.write(text.encode())


@contextlib.contextmanager
def _refusals(module: str, variable: str, failures: tuple[type[Exception], ...]) -> Iterator[None]:
    """Makes a sentence of what a sink raises that cannot begin."""
    try:
        yield
    except failures as error:
        first = str(error).strip().splitlines()[0][:200]
        raise UserError(
            f"train.writers asks for {module}, which cannot begin: {first} Set {variable}, or take "
            "it out of train.writers."
        ) from error


def _required(module: str, package: str) -> Any:
    try:
        return __import__(module)
    except ImportError as error:
        raise UserError(
            f"train.writers asks for {module}, which is not installed: pip install {package}, or "
            "take it out of train.writers."
        ) from error
