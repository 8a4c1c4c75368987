"""Trains a config on Vertex AI, as a custom job.

The tftpu that is running here and the folder of your own config travel to the job. Slices of v6e,
and of more than 4 chips, need the JAX engine.

    tftpu launch vertex --config=resnet50_imagenet --slice=v5e-4 --workdir=gs://BUCKET/resnet50
"""

import dataclasses

from tftpu.errors import UserError
from tftpu.launch import keras_objects
from tftpu.launch.cloud import engine, google_cloud, job, shipment, vertex
from tftpu.launch.options import ConfigOptions, flag
from tftpu.tpu.slices import Slice, parse_slice
from tftpu.version import __version__


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(ConfigOptions):
    """The config to run, and the job for it."""

    slice: str = flag("v3-8", "TPU slice, such as v5e-4", metavar="SLICE")
    workdir: str | None = flag(None, "gs://BUCKET/FOLDER of the run (needed)", metavar="DIR")
    image: str | None = flag(
        None,
        "container image made from launch/Dockerfile",
        metavar="IMAGE",
        shown="tftpu in the project's registry",
    )
    package: str | None = flag(
        None,
        "wheel, here or in a bucket, or requirement to install there",
        metavar="PACKAGE",
        shown="the tftpu that is running",
    )
    project: str | None = flag(
        None, "project of Google Cloud that pays", metavar="PROJECT", shown="GOOGLE_CLOUD_PROJECT"
    )
    region: str = flag("us-central1", "region of the job", metavar="REGION")
    service_account: str | None = flag(
        None, "e-mail address that the job runs as", metavar="EMAIL", shown="the default one"
    )
    tensorboard: str | None = flag(None, "resource name of a Vertex AI TensorBoard", metavar="NAME")
    timeout: str = flag("7d", "when the job is ended: 90m, 24h, 7d", metavar="TIME")
    labels: str = flag("", "labels in addition to tftpu's own", metavar="KEY=VALUE,...")
    spot: bool = flag(False, "use cheaper machines, which may be preempted")
    detach: bool = flag(False, "do not wait for the end of the job")
    dry_run: bool = flag(False, "print the job, and send nothing")


def run(options: Options) -> None:
    """Prints the job, or sends it and waits for its end.

    Raises:
        UserError: a value that Vertex AI would reject, a missing value, or
            the job failed.
    """
    experiment = options.experiment()
    keras_objects.check_names(experiment)
    wanted = parse_slice(options.slice)
    vertex.check_slice(wanted)
    trained_by = engine.for_slice(experiment, wanted)
    vertex.check_engine(wanted, trained_by)
    order = _order(options, wanted, trained_by)
    created = order.custom_job()
    if options.dry_run:
        print(order.as_yaml(created), end="")
        return
    _launch(order, created, options.detach)


def _order(options: Options, wanted: Slice, trained_by: str) -> vertex.Order:
    """Returns the order; a dry run has placeholders for what was not given."""
    project, workdir = options.project, options.workdir
    if options.dry_run:
        project = project or "PROJECT"
        workdir = workdir or f"gs://BUCKET/{job.name_of(options.config)}"
    else:
        google_cloud.require("google.cloud.aiplatform_v1")
        project = google_cloud.project(project)
    if not workdir:
        raise UserError(
            "tftpu launch vertex needs --workdir=gs://BUCKET/FOLDER: files on the machine are "
            "deleted with it."
        )
    image = options.image or f"{options.region}-docker.pkg.dev/{project}/tftpu/tftpu:{__version__}"
    return vertex.Order(
        config=options.config,
        overrides=options.overrides,
        slice=wanted,
        project=project,
        region=options.region,
        workdir=workdir,
        image=image,
        shipment=shipment.of(options.config, options.package, trained_by),
        service_account=options.service_account,
        tensorboard=options.tensorboard,
        timeout=options.timeout,
        labels=options.labels,
        spot=options.spot,
    )


def _launch(order: vertex.Order, created: vertex.CustomJob, detach: bool) -> None:
    from tftpu.launch.cloud import vertex_client

    print(order.shipment.description(order.base_folder))
    client = vertex_client.job_client(order.region)
    name = vertex_client.submit(client, order, created)
    print(vertex_client.how_to_end(name))
    print(f"Its console output:  gcloud ai custom-jobs stream-logs {name}")
    print(f"The run is in        {order.run_folder}", flush=True)
    if detach:
        return
    metrics = google_cloud.Follower(f"{order.run_folder}/metrics.jsonl")
    try:
        vertex_client.watch(client, name, metrics)
    except KeyboardInterrupt:
        print(f"\nNo longer watching. The job keeps running. {vertex_client.how_to_end(name)}")
