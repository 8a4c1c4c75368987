"""Writers that send a run's scalars, texts and images to MLflow or Weights & Biases."""

import contextlib
import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from tftpu.errors import UserError, find_first_line
from tftpu.observe.hypertune import Hypertune
from tftpu.observe.writers import Hyperparameters, Writer
from tftpu.storage import files, side_files
from tftpu.storage.own_files import OwnFile


class MLflow(Writer):
    """A writer to MLflow, configured by environment variables (MLFLOW_TRACKING_URI, ...).

    When a workdir is resumed, its MLflow run continues.
    """

    def __init__(self, workdir: str):
        mlflow = _import_required("mlflow", "mlflow-skinny")
        self.failures = (mlflow.exceptions.MlflowException,)
        # MLflow retries for minutes by default: a run would wait that long at its start and end.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        file = OwnFile(workdir, "mlflow_run")
        file.see()
        known = side_files.take_text(file.path)
        self._client = mlflow.MlflowClient()
        if known is None:
            with _explain_errors("mlflow", "MLFLOW_TRACKING_URI", self.failures):
                known = self._create_run(os.path.basename(workdir))
            file.write(known.encode())
        self._run = known
        self._metric, self._param = mlflow.entities.Metric, mlflow.entities.Param

    def _create_run(self, name: str) -> str:
        """Creates a run, and its experiment if that does not exist; returns the run's id."""
        experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME", "tftpu")
        known = self._client.get_experiment_by_name(experiment)
        number = known.experiment_id if known else self._client.create_experiment(experiment)
        return self._client.create_run(number, run_name=name).info.run_id

    def begin(self, config: Hyperparameters) -> None:
        # MLflow's parameters cannot change: a restart with other settings keeps the first values.
        known = self._client.get_run(self._run).data.params
        params = [self._param(k, str(v)[:500]) for k, v in config.items() if k not in known]
        for first in range(0, len(params), 100):
            self._client.log_batch(self._run, params=params[first : first + 100])

    def write(self, step: int, split: str, scalars: Mapping[str, float]) -> None:
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
    """A writer to Weights & Biases, configured by environment variables (WANDB_PROJECT, ...).

    When a workdir is resumed, its Weights & Biases run continues.
    """

    def __init__(self, workdir: str):
        self._wandb = _import_required("wandb", "wandb")
        self.failures = (self._wandb.Error,)
        file = OwnFile(workdir, "wandb_run")
        file.see()
        known = side_files.take_text(file.path)
        if known is None:
            known = uuid.uuid4().hex[:16]
            file.write(known.encode())
        with _explain_errors("wandb", "WANDB_API_KEY, or WANDB_MODE=offline", self.failures):
            self._run = self._wandb.init(
                project=os.environ.get("WANDB_PROJECT", "tftpu"),
                id=known,
                resume="allow",
                name=os.path.basename(workdir),
                dir=None if files.is_remote(workdir) else workdir,
                settings=self._wandb.Settings(console="off"),
            )

    def begin(self, config: Hyperparameters) -> None:
        self._run.config.update(dict(config), allow_val_change=True)

    def write(self, step: int, split: str, scalars: Mapping[str, float]) -> None:
        self._run.log({f"{split}/{k}": v for k, v in scalars.items()}, step=step)

    def write_text(self, step: int, name: str, text: str) -> None:
        self._run.log({name: self._wandb.Html(f"<pre>{text}</pre>")}, step=step)

    def write_images(self, step: int, name: str, images: np.ndarray) -> None:
        self._run.log({name: [self._wandb.Image(image) for image in images]}, step=step)

    def close(self) -> None:
        self._run.finish()


# Functions that build the writers named in `TrainConfig.writers`, given the workdir and the metric
# that decides which step is best.
BY_NAME: dict[str, Callable[[str, str], Writer]] = {
    "mlflow": lambda workdir, _: MLflow(workdir),
    "wandb": lambda workdir, _: WandB(workdir),
    "hypertune": lambda _, metric: Hypertune(metric),
}


@contextlib.contextmanager
def _explain_errors(
    module: str, variable: str, failures: tuple[type[Exception], ...]
) -> Iterator[None]:
    """Turns the errors of a service at its start into a UserError."""
    try:
        yield
    except failures as error:
        first = find_first_line(error)[:200].rstrip(".")
        raise UserError(
            f"The writer {module!r} cannot start: {first}. Set {variable}, or remove the "
            "writer from the option train.writers."
        ) from error


def _import_required(module: str, package: str) -> Any:
    try:
        return __import__(module)
    except ImportError as error:
        raise UserError(
            f"The writer {module!r} is not installed: run `pip install {package}`, or remove "
            "it from the option train.writers."
        ) from error
