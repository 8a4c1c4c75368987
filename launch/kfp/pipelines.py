"""The pipeline that joins the steps: data, training, evaluation, and the use of a good model."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from kfp import dsl

from tftpu.errors import UserError
from tftpu.launch.kfp import steps

RETRIES = 3  # retries of a search or a training; each retry resumes it
_WAIT = "60s"  # time before the first retry

Task = Any  # `dsl.PipelineTask`
Text = Any  # a Python string, or a parameter of the pipeline


@dataclasses.dataclass(frozen=True, kw_only=True)
class PipelinePlan:
    """The steps of a training pipeline.

    Attributes:
        image: container image of the steps.
        source: address of data to convert first, as for `tftpu data convert --source`; None if the
            data exist already.
        convert_flags: further flags of `tftpu data convert`.
        predict: address of records to predict in the end, as for `tftpu predict --input`, or None.
        search: the space of a search before the training; None searches nothing.
        search_flags: further flags of `tftpu search`.
        train: a function that takes the folder of the run and returns the task that trains; None
            uses `steps.train`, which is retried if it fails.
        run: placeholder that Kubeflow replaces with the name of each run of the pipeline.
        setup: in a pipeline of `tftpu launch`, shell functions that install the user's code.
    """

    image: str
    source: str | None = None
    convert_flags: str = ""
    predict: str | None = None
    search: Sequence[str] | None = None
    search_flags: str = ""
    train: Callable[[Text], Task] | None = None
    run: str = dsl.PIPELINE_JOB_ID_PLACEHOLDER
    setup: Text = ""

    def add(self, config: Text, workdir: Text, gate: Text, overrides: Text) -> None:
        """Adds the steps to the pipeline whose function calls this.

        Args:
            config: name of a config, or path of one in the image.
            workdir: the folder in which each run of the pipeline gets its own folder.
            gate: condition that the metrics must meet, such as "accuracy>=0.95".
            overrides: changes of the config, as on the command line.
        """
        begun = self._add_task(steps.new_run, workdir=workdir, run=self.run, condition=gate)
        run: Text = begun.output
        config_of = {"config": config, "overrides": overrides}
        ready = begun
        if self.source:
            flags = {"source": self.source, "flags": self.convert_flags}
            ready = self._add_command(steps.convert, output=f"{run}/data", **flags)
            config_of["data_dir"] = f"{run}/data"
        ready = self._add_command(steps.check, ready, condition=gate, **config_of)
        if self.search is not None:
            more = {"space": list(self.search), "flags": self.search_flags}
            where = f"{run}/search"
            ready = self._add_command(steps.search, ready, workdir=where, **more, **config_of)
            _set_retry(ready)
            config_of["best"] = ready.output
        if self.train:
            trained = self.train(run).set_caching_options(False).after(ready)
        else:
            trained = self._add_command(steps.train, ready, workdir=run, **config_of)
            _set_retry(trained)
        of_run = {"workdir": run, "config": config}
        evaluated = self._add_command(steps.evaluate, trained, **of_run)
        passed = self._add_task(steps.gate, metrics=evaluated.outputs["metrics"], condition=gate)
        self._add_command(steps.export, passed, output=f"{run}/export", **of_run)
        if self.predict:
            places = {"input": self.predict, "output": f"{run}/predictions"}
            self._add_command(steps.predict, passed, **places, **of_run)

    def _add_command(self, step: Callable[..., Task], *before: Task, **arguments: Text) -> Task:
        made = self._add_task(step, setup=self.setup, **arguments)
        return made.after(*before) if before else made

    def _add_task(self, step: Callable[..., Task], **arguments: Text) -> Task:
        # Caching is off, because a folder may hold other data at the next run.
        return step(**arguments).set_container_image(self.image).set_caching_options(False)


def _set_retry(task: Task) -> None:
    task.set_retry(RETRIES, backoff_duration=_WAIT)


def training_pipeline(
    image: str = steps.IMAGE,
    *,
    source: str | None = None,
    convert_flags: str = "",
    predict: str | None = None,
    search: Sequence[str] | None = None,
    search_flags: str = "",
) -> Any:
    """Returns a pipeline that checks the data, trains, evaluates, and exports a good model.

    Its parameters are `config`, `workdir`, `gate` (such as "accuracy>=0.95") and `overrides`. Each
    run of the pipeline has its own folder in `workdir`, named after its ID. The folder is the
    training's workdir, and contains `export`, `data`, `search` and `predictions`.

    Args:
        image: container image of the steps, with tftpu, its extra kfp, and your own code.
        source: address of data to convert first, such as "images:gs://BUCKET/photos"; the
            config's `data.data_dir` is then the result. None if the data exist already.
        convert_flags: further flags of `tftpu data convert`.
        predict: address of records to predict after the gate, such as "images:gs://BUCKET/new", or
            None.
        search: the space of a search before the training, which then uses the best values, such as
            ["optimizer.learning_rate=log:1e-4..1e-1"]; [] uses the config's, None searches nothing.
        search_flags: further flags of `tftpu search`, such as "--config.train.steps=100".

    Raises:
        UserError: `search` is not a list.
    """
    if isinstance(search, str):
        raise UserError(f"search={search!r} is a text: give a list of texts, [{search!r}].")
    layout = PipelinePlan(
        image=image,
        source=source,
        convert_flags=convert_flags,
        predict=predict,
        search=search,
        search_flags=search_flags,
    )

    @dsl.pipeline(name="tftpu-training", description="Trains, and exports a model that is good.")
    def tftpu_training(config: str, workdir: str, gate: str, overrides: str = "") -> None:
        layout.add(config, workdir, gate, overrides)

    return tftpu_training
