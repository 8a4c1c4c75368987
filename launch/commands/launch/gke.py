"""Trains a config on a cluster of Google Kubernetes Engine, as a JobSet.

The running tftpu and the folder of your own config are sent to the pods, one for each host of the
slice. A slice with several hosts needs the JAX engine. All pods start again after a preemption or a
crash, and the run resumes. Prepare the cluster as the guide on launching says.

    tftpu launch gke python_gpt --slice=v5e-8 --workdir=gs://BUCKET/gpt
"""

import dataclasses

from tftpu.launch.cloud import engine, job
from tftpu.launch.cloud.gke import job as gke
from tftpu.launch.cloud.gke.options import ClusterOptions
from tftpu.launch.cloud.options import JobOptions, print_dry_run
from tftpu.launch.settings.options import TIME, flag
from tftpu.tpu.slices import Slice, parse_slice

IMAGE = "python:3.12-slim-bookworm"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(ClusterOptions, JobOptions):
    """The config to run, and the JobSet for it."""

    slice: str = flag("v5e-8", "TPU slice, such as v5e-16", metavar="SLICE", aliases=("slices",))
    image: str = flag(IMAGE, "container image with bash and Python", metavar="IMAGE")
    service_account: str | None = flag(
        None,
        "Kubernetes service account that may use the bucket",
        metavar="NAME",
        shown="the namespace's own",
    )
    queue_timeout: float = flag(86_400.0, "how long to wait for machines", metavar=TIME, minimum=60)
    timeout: float = flag(604_800.0, "time limit of an attempt", metavar=TIME, minimum=60)
    restarts: int = flag(10, "largest number of automatic restarts", minimum=0, metavar="N")
    detach: bool = flag(False, "do not wait for the end of the run")


def run(options: Options) -> None:
    """Prints the JobSet, or creates it and waits for its end.

    Raises:
        UserError: GKE would reject a value, a value is missing, or the run failed.
    """
    experiment = options.load_experiment()
    wanted = parse_slice(options.slice)
    gke.check_slice(wanted)
    queue_s = int(options.queue_timeout)
    order = _build_job(options, wanted, engine.choose_for_slice(experiment, wanted))
    created = order.build_jobset(job.make_unique_name(order.config))
    if options.dry_run:
        print_dry_run(order.as_yaml(created), workdir=options.workdir)
        return
    _launch(options, order, created, queue_s)


def _build_job(options: Options, wanted: Slice, trained_by: str) -> gke.GkeJob:
    """Returns the job to create; in a dry run, placeholders stand for missing values."""
    options.check()
    if options.service_account:
        gke.check_account(options.service_account)
    return gke.GkeJob(
        namespace=options.namespace,
        image=options.image,
        restarts=options.restarts,
        **options.build_fields(wanted, trained_by),
    )


def _launch(options: Options, order: gke.GkeJob, created: gke.JobSet, queue_s: int) -> None:
    from tftpu.launch.cloud.gke import client, follow

    cluster = client.connect(options.namespace, options.context)
    order.confirm_shipment(options.send_data)
    name = created["metadata"]["name"]
    client.submit(cluster, order, created)
    print(f"Created {order.slice.name} as the JobSet {name}.")
    print(f"This ends it:   {cluster.format_deletion(name)}")
    print(f"The run is in   {order.workdir}", flush=True)
    if options.detach:
        print(follow.describe_running(cluster, name))
    else:
        follow.watch(cluster, name, queue_s)
