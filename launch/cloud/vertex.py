"""`tftpu launch vertex`: a config as a Vertex AI custom job.

The specification is a plain dictionary in the words of the service's REST interface
(https://cloud.google.com/vertex-ai/docs/reference/rest/v1/CustomJobSpec), so what `--dry_run`
prints is what is sent, and what `gcloud ai custom-jobs create --config=FILE` takes.
"""

import re
import shlex

import yaml

from tftpu.config import Experiment
from tftpu.errors import UserError
from tftpu.launch.cloud import google_cloud, job, vertex_client
from tftpu.version import __version__

# The slices on which Vertex runs TensorFlow, each one machine:
# https://cloud.google.com/vertex-ai/docs/training/training-with-tpu-vm
MACHINES = {
    "v2-8": {"machineType": "cloud-tpu", "acceleratorType": "TPU_V2", "acceleratorCount": 8},
    "v3-8": {"machineType": "cloud-tpu", "acceleratorType": "TPU_V3", "acceleratorCount": 8},
    "v5e-1": {"machineType": "ct5lp-hightpu-1t", "tpuTopology": "1x1"},
    "v5e-4": {"machineType": "ct5lp-hightpu-4t", "tpuTopology": "2x2"},
}


def run(
    experiment: Experiment,
    config: str,
    overrides: list[str],
    slice: str,
    workdir: str | None,
    image: str | None,
    project: str | None,
    region: str,
    service_account: str | None,
    tensorboard: str | None,
    timeout: str,
    labels: str,
    spot: bool,
    detach: bool,
    dry_run: bool,
) -> None:
    """Prints the job, or sends it and waits for its end.

    Raises:
        UserError: a value that Vertex AI would refuse, something that it needs and that was not
            given, or the job's own failure.
    """
    if dry_run:
        project = project or "PROJECT"  # a placeholder, as those below
    else:
        google_cloud.require("google.cloud.aiplatform_v1")
        project = google_cloud.project(project)
        if not workdir:
            raise UserError(
                "Where should the run lie? Write --workdir=gs://BUCKET/FOLDER: what lies on the "
                "machine is gone with it."
            )
    created = custom_job(
        config,
        overrides,
        slice,
        workdir or f"gs://BUCKET/{job.name_of(config)}",
        image or f"{region}-docker.pkg.dev/{project}/tftpu/tftpu:{__version__}",
        service_account=service_account,
        tensorboard=tensorboard,
        timeout=timeout,
        labels=labels,
        spot=spot,
    )
    # The number in the name of each of these slices is that of its replicas.
    experiment.validate(replicas=int(slice.partition("-")[2]))
    if dry_run:
        print(as_yaml(created, project, region), end="")
        return
    _launch(created, project, region, detach)


def _launch(created: dict, project: str, region: str, detach: bool) -> None:
    client = vertex_client.job_client(region)
    name = vertex_client.submit(client, project, region, created)
    run_folder = _run_folder(created["jobSpec"])
    print(vertex_client.how_to_end(name))
    print(f"Its console output:  gcloud ai custom-jobs stream-logs {name}")
    print(f"The run lies in      {run_folder}", flush=True)
    if detach:
        return
    try:
        vertex_client.watch(client, name, google_cloud.Follower(f"{run_folder}/metrics.jsonl"))
    except KeyboardInterrupt:
        print(f"\nNo longer watching. The job goes on. {vertex_client.how_to_end(name)}")


def custom_job(
    config: str,
    overrides: list[str],
    slice_name: str,
    workdir: str,
    image: str,
    *,
    service_account: str | None = None,
    tensorboard: str | None = None,
    timeout: str = "7d",
    labels: str = "",
    spot: bool = False,
) -> dict:
    """A CustomJob as the REST interface writes it.

    Args:
        config: name of a config, or path of a user's own, which travels inside the job.
        overrides: "--config.train.steps=500" and the like, handed on as they are.
        slice_name: one of `MACHINES`.
        workdir: "gs://bucket/folder"; the run lies there.
        image: a container image built from `launch/Dockerfile`.
        service_account: e-mail address that the job runs as.
        tensorboard: resource name of a Vertex AI TensorBoard; needs a service account.
        timeout: "90m", "24h" or "7d".
        labels: "key=value,key=value", besides tftpu's own.
        spot: cheaper, may be preempted; the run then goes on from its last checkpoint.

    Raises:
        UserError: a value that Vertex AI would refuse.
    """
    machine = _machine(slice_name)
    job.check_bucket_folder("workdir", workdir)
    if tensorboard and not service_account:
        raise UserError(
            "--tensorboard needs --service_account=NAME@PROJECT.iam.gserviceaccount.com: Vertex AI "
            "uploads the events as that account, and refuses the job without one."
        )
    workdir = workdir.rstrip("/")
    spec = {"baseOutputDirectory": {"outputUriPrefix": workdir}}
    if service_account:
        spec["serviceAccount"] = service_account
    if tensorboard:
        spec["tensorboard"] = _tensorboard(tensorboard)
    arguments = [*overrides, f"--workdir={_run_folder(spec)}", "--tpu=local"]
    container = {"imageUri": image, **job.container_command(config, arguments)}
    pool = {"machineSpec": machine, "replicaCount": 1, "containerSpec": container}
    scheduling = {
        "timeout": f"{job.seconds(timeout)}s",
        "restartJobOnWorkerRestart": True,  # the run goes on from its last checkpoint
    }
    if spot:
        scheduling["strategy"] = "SPOT"
    spec = {"workerPoolSpecs": [pool], "scheduling": scheduling, **spec}
    return {
        "displayName": job.unique_name(config),
        "jobSpec": spec,
        "labels": job.labels(config, slice_name, labels),
    }


def as_yaml(created: dict, project: str, region: str) -> str:
    """The job's specification for `gcloud`, under the command that takes it."""
    labels = ",".join(f"{key}={value}" for key, value in created["labels"].items())
    command = [
        *("gcloud", "ai", "custom-jobs", "create", "--config=FILE"),
        f"--project={project}",
        f"--region={region}",
        f"--display-name={created['displayName']}",
        f"--labels={labels}",
    ]
    return f"# {shlex.join(command)}\n" + yaml.safe_dump(created["jobSpec"], sort_keys=False)


def _machine(slice_name: str) -> dict:
    if slice_name in MACHINES:
        return dict(MACHINES[slice_name])
    there_are = f"There, TensorFlow runs on {', '.join(MACHINES)}."
    generation = slice_name.partition("-")[0].replace("v5litepod", "v5e")
    if generation in ("v2", "v3", "v5e"):
        why = "is more than one machine on Vertex AI, and one TensorFlow process drives one"
    elif generation in ("v4", "v5p", "v6e"):
        why = "has no TensorFlow on Vertex AI"
    else:
        raise UserError(f"{slice_name!r} is not the name of a slice of Vertex AI. {there_are}")
    raise UserError(
        f"{slice_name} {why}. {there_are} `tftpu launch tpu-vm --slice={slice_name}` rents it as "
        "a TPU VM."
    )


def _run_folder(spec: dict) -> str:
    """Where the run lies: Vertex AI's TensorBoard reads `logs` of the job's output directory."""
    folder = spec["baseOutputDirectory"]["outputUriPrefix"]
    return f"{folder}/logs" if "tensorboard" in spec else folder


def _tensorboard(name: str) -> str:
    if not re.fullmatch(r"projects/[^/\s]+/locations/[^/\s]+/tensorboards/\d+", name):
        raise UserError(
            f"--tensorboard={name} is not the resource name of a TensorBoard: write "
            "projects/PROJECT/locations/REGION/tensorboards/NUMBER."
        )
    return name
