"""The request of `tftpu launch vertex-pipeline`: a training pipeline for Vertex AI Pipelines.

The training is the same custom job as in `tftpu launch vertex`, because a step of a pipeline cannot
ask for the topology of a slice. Google's own component for custom jobs creates it, follows it, and
cancels it with the pipeline; its container image and arguments are a published interface
(https://cloud.google.com/vertex-ai/docs/pipelines/customjob-component).
"""

import dataclasses
import json
import re
import shlex
from typing import Any

from tftpu.errors import UserError, did_you_mean
from tftpu.launch.cloud import job
from tftpu.launch.cloud.vertex import training_job
from tftpu.launch.cloud.vertex.pipeline_client import OUTPUTS
from tftpu.launch.kfp.pipelines import PipelinePlan

_LAUNCHER = "gcr.io/ml-pipeline/google-cloud-pipeline-components:2.22.0"
_MODULE = "google_cloud_pipeline_components.container.v1.custom_job.launcher"
_FILES = ("images", "index", "text", "tfrecord")  # kinds of sources that are files
_SOURCES = (*_FILES, "tfds", "bigquery")
_PREDICTED = ("images", "tfrecord", "bigquery")
_SPLITS = ("evaluation", "training")  # values of --predict that name a split of the data
# Placeholder for the run's folder in the training request, until it is known.
_RUN = "folder-of-the-run"

Spec = dict[str, Any]  # JSON with the field names of the REST interface


@dataclasses.dataclass(frozen=True, kw_only=True)
class VertexPipeline:
    """A pipeline to run once or on a schedule.

    Attributes:
        training: the custom job that trains.
        gate: condition that the metrics must meet, such as "accuracy>=0.95".
        source: data to convert first; None if the config's data exist already.
        convert_flags: further flags of the conversion.
        predict: records to predict after the gate; None predicts nothing.
        cron: times of the runs, such as "0 3 * * 1"; None runs it once, now.
    """

    training: training_job.VertexJob
    gate: str
    source: str | None = None
    convert_flags: str = ""
    predict: str | None = None
    cron: str | None = None

    def check(self) -> None:
        """Raises `UserError` if the source, the records to predict or the schedule is invalid."""
        for flag, given, kinds, splits in (
            ("source", self.source, _SOURCES, ()),
            ("predict", self.predict, _PREDICTED, _SPLITS),
        ):
            kind, _, what = (given or "").partition(":")
            if given is None or given in splits:
                continue
            if kind not in kinds or not what:
                allowed = ", ".join([*splits, *(f"{kind}:…" for kind in kinds)])
                raise UserError(
                    f"--{flag}={given} has to be one of {allowed}."
                    f"{did_you_mean(kind, [*splits, *kinds])}"
                )
            if kind in _FILES and not what.startswith("gs://"):
                raise UserError(
                    f"--{flag}={given} is not in a bucket, but a pipeline reads only buckets: "
                    f"give {kind}:gs://BUCKET/FOLDER."
                )
        # Google checks the time zone; most mistakes are in the number of fields.
        if self.cron and len(re.sub(r"^(CRON_)?TZ=\S+\s+", "", self.cron).split()) != 5:
            raise UserError(
                f"--cron='{self.cron}' needs five fields: minute, hour, day, month and weekday. "
                "--cron='0 3 * * 1' starts a run on Mondays at 3:00 UTC, and "
                "--cron='TZ=Europe/Berlin 0 3 * * 1' at 3:00 in Berlin."
            )

    def compile_spec(self) -> Spec:
        """Returns the compiled pipeline, in Kubeflow Pipelines' intermediate representation."""
        from google.protobuf import json_format
        from kfp import dsl

        training = self.training
        shipment, folder = training.shipment, training.workdir
        setup = job.build_container_setup(shipment, folder, [])
        if shipment.engine == "jax":  # every step except the training runs on CPUs
            setup += "\nexport JAX_PLATFORMS=cpu"

        @dsl.pipeline(name=job.to_resource_name(training.config))
        def pipeline(gate: str = self.gate, setup: str = setup) -> None:
            layout = PipelinePlan(
                image=training.image,
                source=self.source,
                convert_flags=self.convert_flags,
                predict=self.predict,
                train=self._build_train_task,
                # Vertex AI replaces this placeholder with the ID of the pipeline job
                run=dsl.PIPELINE_JOB_NAME_PLACEHOLDER,
                setup=setup,
            )
            layout.add(shipment.config, folder, gate, shlex.join(training.overrides))

        made: Any = pipeline
        # Not kfp's YAML: a comment in it lists the defaults, and line breaks in `setup` end it.
        return json_format.MessageToDict(made.pipeline_spec)

    def build_pipeline_job(self) -> Spec:
        """Returns the PipelineJob to create.

        Raises:
            UserError: Vertex AI would reject a value of the training job.
        """
        training = self.training
        found: Spec = {
            "displayName": job.to_resource_name(training.config),
            "pipelineSpec": self.compile_spec(),
            "runtimeConfig": {"gcsOutputDirectory": f"{training.workdir}{OUTPUTS}"},
            "labels": training.build_custom_job()["labels"],
        }
        if training.service_account:
            found["serviceAccount"] = training.service_account
        return found

    def as_yaml(self, created: Spec) -> str:
        """Formats a job's compiled pipeline as YAML; a comment lists the files that are sent."""
        training = self.training
        place = f"pipeline for Vertex AI, project {training.project}, region {training.region}"
        times = f"at {self.cron}" if self.cron else "once"
        return training.format_request(f"{place}, {times}", created["pipelineSpec"])

    def _build_train_task(self, run: Any) -> Any:
        """Returns the task that creates the custom job and waits for its end.

        The task is not retried. The service itself restarts a job whose machines are lost; after
        another end, such as the time limit, a new attempt would end the same way and cost again.
        """
        from kfp import dsl

        base = self.training.workdir
        data = [f"--config.data.data_dir={base}/{_RUN}/data"] if self.source else []
        overrides = (*self.training.overrides, *data)
        wanted = dataclasses.replace(self.training, overrides=overrides, subfolder=_RUN)
        payload = json.dumps(_to_snake_case(wanted.build_custom_job()))
        place = ["--project", wanted.project, "--location", wanted.region]

        @dsl.container_component
        def train(folder: str, gcp_resources: dsl.OutputPath(str)):  # pyright: ignore[reportInvalidTypeForm]
            first, *others = payload.split(json.dumps(f"{base}/{_RUN}")[1:-1])
            parts: list[Any] = [first]
            for text in others:
                parts += [folder, text]
            return dsl.ContainerSpec(
                image=_LAUNCHER,
                command=["python3", "-u", "-m", _MODULE],
                args=[
                    *("--type", "CustomJob", "--payload", dsl.ConcatPlaceholder(parts)),
                    *(*place, "--gcp_resources", gcp_resources),
                ],
            )

        return train(folder=run)


def _to_snake_case(value: Any) -> Any:
    """Converts camelCase field names to snake_case, which Google's custom-job component reads."""
    if isinstance(value, dict):
        return {
            re.sub("[A-Z]", lambda c: f"_{c[0].lower()}", k): _to_snake_case(v)
            for k, v in value.items()
        }
    return [_to_snake_case(part) for part in value] if isinstance(value, list) else value
