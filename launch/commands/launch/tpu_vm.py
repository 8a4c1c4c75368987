"""Rents a TPU slice, trains a config on it, and deletes the slice.

The running tftpu and the folder of your own config are sent to the machine. A slice with several
hosts needs the JAX engine, and all of its hosts run the same command. A preempted spot slice is
replaced by another one, on which the run resumes.

    tftpu launch tpu-vm python_gpt --slice=v5e-8 --zone=us-west4-a --workdir=gs://BUCKET/gpt
"""

import dataclasses
import json
from pathlib import Path

from tftpu.config import Experiment
from tftpu.errors import UserError
from tftpu.launch import startup
from tftpu.launch.cloud import engine, job
from tftpu.launch.cloud.options import JobOptions, ProjectOptions, print_dry_run
from tftpu.launch.cloud.tpu_vm import job as tpu_vm
from tftpu.launch.preflight import reports
from tftpu.launch.settings.options import TIME, flag
from tftpu.tpu.slices import Slice, parse_slice


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(ProjectOptions, JobOptions):
    """The slice to rent, and the run for it."""

    zone: str | None = flag(None, "zone, such as us-west4-a (required)", metavar="ZONE")
    queue_timeout: float = flag(86_400.0, "how long to wait for capacity", metavar=TIME, minimum=60)
    preflight: str | None = flag(
        None, "JSON of `tftpu preflight`, to show the price of the run", metavar="FILE"
    )
    keep: bool = flag(False, "keep the slice after the run")
    yes: bool = flag(False, "rent without asking")


def run(options: Options) -> None:
    """Prints the request, or rents the slice, trains on it, and deletes it unless it is kept.

    Raises:
        UserError: Cloud TPU would reject a value, a value is missing, there is no capacity or
            quota, or the run failed.
    """
    experiment = options.load_experiment()
    wanted = parse_slice(options.slice)
    tpu_vm.check_slice(wanted)
    order = _build_job(options, wanted, engine.choose_for_slice(experiment, wanted))
    if options.dry_run:
        print_dry_run(
            tpu_vm.as_yaml(order),
            project=options.project,
            zone=options.zone,
            workdir=options.workdir,
        )
        return
    # Finds mistakes in the request before the user is asked anything.
    order.build_request(job.make_unique_name(order.config))
    print(order.shipment.describe(order.workdir))
    steps = _count_steps(experiment) if options.preflight else None
    print(tpu_vm.describe_price(wanted, steps, options.preflight, options.spot))
    if options.preflight and _is_of_another(experiment, options.preflight):
        other = reports.describe_other("known")
        print(f"But {options.preflight} is {other}: this run may cost more or less.")
    job.confirm_data(order.shipment, options.send_data)
    if not options.yes:
        job.confirm("Rent it?", "--yes", "Not rented.")
    from tftpu.launch.cloud.tpu_vm import client

    client.train(client.create_client(), order)


def _build_job(options: Options, wanted: Slice, trained_by: str) -> tpu_vm.TpuVmJob:
    """Returns the job to create; in a dry run, placeholders stand for missing values."""
    project = options.resolve_project("google.cloud.tpu_v2", options.dry_run)
    zone = options.zone or ("ZONE" if options.dry_run else None)
    if not zone:
        raise UserError("tftpu launch tpu-vm needs --zone=ZONE, such as --zone=us-west4-a.")
    return tpu_vm.TpuVmJob(
        project=project,
        zone=zone,
        queue_timeout=int(options.queue_timeout),
        keep=options.keep,
        **options.build_fields(wanted, trained_by),
    )


def _is_of_another(experiment: Experiment, report: str) -> bool:
    """Returns whether a report of preflight is known to be of another step than that of the run."""
    settings = json.loads(Path(report).read_text()).get("settings")
    if not settings or getattr(experiment.data, "download", False):
        return False
    try:
        startup.import_tensorflow()
        from tftpu import input_pipelines

        size = experiment.data.global_batch_size
        batch = input_pipelines.batch_spec(experiment.prepared_data, size)
    except Exception:  # data that cannot be read here do not prevent renting a slice
        return False
    return settings != reports.compute_settings(experiment, batch)


def _count_steps(experiment: Experiment) -> int | None:
    """Returns the number of steps of the run; None if it depends on data that are not here."""
    if experiment.train.steps is not None:
        return experiment.train.steps
    # Counting the examples would download the data to this machine.
    if getattr(experiment.data, "download", False):
        return None
    try:
        startup.import_tensorflow()
        from tftpu.launch.run.experiment import resolve_length

        return resolve_length(experiment).train.length
    except Exception:  # data that cannot be read here do not prevent renting a slice
        return None
