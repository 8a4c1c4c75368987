"""Rents a TPU slice, trains a config on it, and deletes the slice.

The tftpu that is running here and the folder of your own config travel to the machine. A slice of
several hosts needs the JAX engine, and all of its hosts run the same command. A spot slice that is
preempted is replaced by another one, on which the run resumes.

    tftpu launch tpu-vm --config=python_gpt --slice=v5e-8 --zone=us-west4-a --workdir=gs://BUCKET/gpt
"""

import dataclasses

from tftpu.config import Experiment
from tftpu.errors import UserError
from tftpu.launch import startup
from tftpu.launch.cloud import engine, google_cloud, job
from tftpu.launch.cloud.shipping import shipment
from tftpu.launch.cloud.tpu_vm import job as tpu_vm
from tftpu.launch.settings.options import ConfigOptions, flag
from tftpu.tpu.slices import Slice, parse_slice


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(ConfigOptions):
    """The slice to rent, and the run for it."""

    slice: str = flag("v3-8", "TPU slice, such as v5e-4", metavar="SLICE")
    zone: str | None = flag(None, "zone, such as us-west4-a (needed)", metavar="ZONE")
    workdir: str | None = flag(None, "gs://BUCKET/FOLDER of the run (needed)", metavar="DIR")
    package: str | None = flag(
        None,
        "wheel, here or in a bucket, or requirement to install there",
        metavar="PACKAGE",
        shown="the tftpu that is running",
    )
    project: str | None = flag(
        None, "project of Google Cloud that pays", metavar="PROJECT", shown="GOOGLE_CLOUD_PROJECT"
    )
    service_account: str | None = flag(
        None, "e-mail address that the machine runs as", metavar="EMAIL", shown="the default one"
    )
    labels: str = flag("", "labels in addition to tftpu's own", metavar="KEY=VALUE,...")
    queue_timeout: str = flag("24h", "how long to wait for capacity", metavar="TIME")
    timeout: str = flag("7d", "when the run is ended: 90m, 24h, 7d", metavar="TIME")
    preflight: str | None = flag(
        None, "JSON of `tftpu preflight`, to show the price of the run", metavar="FILE"
    )
    spot: bool = flag(False, "rent a cheaper slice, which may be preempted")
    keep: bool = flag(False, "leave the slice running after the run")
    send_data: bool = flag(False, "send data in the folder of the config without asking")
    yes: bool = flag(False, "rent without asking")
    dry_run: bool = flag(False, "print the request, and send nothing")


def run(options: Options) -> None:
    """Prints the request, or rents the slice, trains on it and deletes it.

    Raises:
        UserError: a value that Cloud TPU would reject, a missing value, no
            capacity or quota, or the run failed.
    """
    experiment = options.load_experiment()
    wanted = parse_slice(options.slice)
    trained_by = engine.choose_for_slice(experiment, wanted)
    order = _build_job(options, wanted, trained_by)
    if options.dry_run:
        print(tpu_vm.as_yaml(order), end="")
        return
    order.build_request(
        job.make_unique_name(order.config)
    )  # a mistake in it is found before the question
    print(order.shipment.describe(order.workdir))
    steps = _count_steps(experiment) if options.preflight else None
    print(tpu_vm.describe_price(wanted, steps, options.preflight, options.spot))
    job.confirm_data(order.shipment, options.send_data)
    if not options.yes:
        job.confirm("Rent it?", "--yes", "Not rented.")
    from tftpu.launch.cloud.tpu_vm import client

    client.train(client.create_client(), order)


def _build_job(options: Options, wanted: Slice, trained_by: str) -> tpu_vm.TpuVmJob:
    """Returns the order; a dry run has placeholders for what was not given."""
    project, zone, workdir = options.project, options.zone, options.workdir
    if options.dry_run:
        project, zone = project or "PROJECT", zone or "ZONE"
        workdir = workdir or f"gs://BUCKET/{job.to_resource_name(options.config)}"
    else:
        google_cloud.require("google.cloud.tpu_v2")
        project = google_cloud.resolve_project(project)
    if not zone:
        raise UserError("tftpu launch tpu-vm needs --zone=ZONE, such as --zone=us-west4-a.")
    workdir = workdir or ""
    job.check_bucket_folder("workdir", workdir)
    return tpu_vm.TpuVmJob(
        config=options.config,
        overrides=options.overrides,
        slice=wanted,
        project=project,
        zone=zone,
        workdir=workdir.rstrip("/"),
        shipment=shipment.pack(options.config, options.package, trained_by),
        service_account=options.service_account,
        labels=options.labels,
        queue_timeout=options.queue_timeout,
        timeout=options.timeout,
        keep=options.keep,
        spot=options.spot,
    )


def _count_steps(experiment: Experiment) -> int | None:
    """Returns the number of steps of the run; None if only data that are elsewhere can tell."""
    if experiment.train.steps is not None:
        return experiment.train.steps
    if getattr(experiment.data, "download", False):  # which would start here
        return None
    try:
        startup.import_tensorflow()
        from tftpu.launch.run.experiment import resolve_length

        return resolve_length(experiment).train.length
    except Exception:  # of any kind of data: without them, the run can be rented all the same
        return None
