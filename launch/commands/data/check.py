"""Checks the data of a config before a run: shapes, shards, memory, region, and speed.

The speed of this host's input pipeline is compared with what the TPU needs: --need, or the rate
that `tftpu preflight` predicted for the config.

    tftpu data check resnet50_imagenet --hosts=4
"""

import dataclasses
import re
import shlex
from collections.abc import Iterator

from tftpu.config import Experiment
from tftpu.engines import selection
from tftpu.errors import UserError, counted
from tftpu.launch.data_checks.finding import Finding
from tftpu.launch.data_checks.images import inspect_images
from tftpu.launch.data_checks.sources import (
    inspect_memory,
    inspect_plain,
    inspect_region,
    inspect_shapes,
    inspect_shards,
    read_host_memory,
)
from tftpu.launch.data_checks.speed import inspect_speed, measure_speed
from tftpu.launch.data_checks.splits import inspect_evaluation, inspect_overlap
from tftpu.launch.data_checks.values import (
    inspect_lengths,
    inspect_own_values,
    inspect_values,
    read_first_batches,
)
from tftpu.launch.output import reporting
from tftpu.launch.preflight import reports
from tftpu.launch.run import conditions
from tftpu.launch.run.finished import ConfigOrRunOptions
from tftpu.launch.settings import own_code
from tftpu.launch.settings.options import flag
from tftpu.launch.startup import import_tensorflow, leave_devices_alone
from tftpu.runtime.slow import reporting_if_slow
from tftpu.storage import files

SECONDS = 5.0  # seconds for which the pipeline is timed


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(ConfigOrRunOptions):
    """The data to check, and the machines that will read it."""

    workdir: str | None = flag(
        None, "folder with preflight.json", metavar="DIR", shown="runs/<config>"
    )
    hosts: int = flag(1, "number of hosts that share a batch", minimum=1, metavar="N")
    need: float | None = flag(
        None, "examples per second that the TPU consumes", metavar="N", shown="preflight's rate"
    )
    zone: str | None = flag(None, "zone of the TPU, such as us-west4-a", metavar="ZONE")
    gate: str | None = flag(
        None, "condition of `tftpu evaluate --gate` whose metrics must exist", metavar="COND"
    )


def run(options: Options) -> None:
    """Prints each finding about the data once it is known.

    Raises:
        UserError: a finding is an error.
    """
    if options.need is not None and options.need <= 0:
        raise UserError(f"--need is {options.need}: it must be above 0.")
    if options.zone and not re.fullmatch(r"[a-z]+-[a-z]+\d+-[a-z]", options.zone):
        raise UserError(f"--zone={options.zone} is not a zone, such as us-west4-a.")
    with reporting(f"Loading {options.config} and TensorFlow"):
        experiment = options.load_experiment()
        if options.gate:
            conditions.check("--gate", options.gate, experiment)
        own_model = not own_code.is_of_tftpu(type(experiment.model))
        if own_model:  # the checks build the user's model, with Keras
            selection.choose_backend(experiment.cluster)
        import_tensorflow()
        leave_devices_alone()
    errors = 0
    for finding in inspect_data(experiment, options, own_model):
        print(f"  {finding.level:9}{finding.text}", flush=True)
        errors += finding.level == "error"
    if errors:
        raise UserError(f"data check found {counted(errors, 'error')} in {options.name}.")


def inspect_data(experiment: Experiment, options: Options, own: bool) -> Iterator[Finding]:
    """Yields the findings of all checks; errors in shapes or images end the checks.

    Args:
        experiment: the experiment.
        options: options of the command.
        own: whether the model's class is the user's; the checks then build the model.
    """
    data, prepared, hosts = experiment.data, experiment.prepared_data, options.hosts
    with reporting("Opening the data"):
        from tftpu import input_pipelines

        with own_code.failures_of_class(data, "training"):
            pipeline = input_pipelines.training(prepared, experiment.train.seed)
        with own_code.failures_of_class(data, "batch_spec"):
            announced = input_pipelines.batch_spec(prepared, data.global_batch_size // hosts)
        plain = not hasattr(pipeline, "starting_at")
        # A plain `tf.data.Dataset` needs no static shapes: the trainer sets those of its batches.
        seen = announced if plain else pipeline.starting_at(0, 0, hosts).element_spec
    shapes = inspect_shapes(seen, announced)
    yield from shapes
    images = []
    for finding in inspect_images(data):
        images.append(finding)
        yield finding
    if any(finding.level == "error" for finding in [*shapes, *images]):
        return
    yield from inspect_plain(hosts) if plain else inspect_shards(pipeline, hosts)
    yield from [] if plain else inspect_memory(pipeline, hosts, read_host_memory())
    with reporting("Reading the first batches"):
        batches = read_first_batches(pipeline, hosts)
    if own:
        yield from inspect_own_values(experiment, batches)
    else:
        ignored = getattr(experiment.loss, "ignore_class", None)
        yield from inspect_values(experiment.model, batches, ignored)
        yield from inspect_lengths(experiment, batches, hosts)
    evaluation = inspect_evaluation(prepared)
    yield from evaluation
    if evaluation[0].level != "error":
        with reporting_if_slow("Looking for evaluation examples in the training data"):
            opened = pipeline if prepared is data else None
            yield from inspect_overlap(data, opened, experiment.train.seed)
    yield from inspect_region(data.data_dir, options.zone)
    needs, source = read_needs(experiment, options)
    with reporting(f"Reading a batch, then timing the pipeline for {SECONDS:g} s"):
        speed = measure_speed(pipeline, hosts, SECONDS)
    yield from inspect_speed(speed, needs, hosts, None if plain else pipeline.count, source)


def read_needs(experiment: Experiment, options: Options) -> tuple[dict[str, float], str]:
    """Returns the examples/s that each slice needs, and a text on their source or how to get them.

    Args:
        experiment: the experiment.
        options: options of the command, with --need or the folder of a preflight report.
    """
    from tftpu import input_pipelines

    if options.need:
        return {"the TPU": options.need}, ""
    workdir = options.workdir or options.default_workdir
    path, settings = files.join(workdir, reports.FILE), reports.read_settings(workdir)
    words = ["tftpu", "preflight", options.config, *options.overrides]
    words += [f"--workdir={options.workdir}"] if options.workdir else []
    ask = (
        f"to compare it with a TPU: `{shlex.join(words)}`, or give the examples per second that it "
        "needs, as in --need=1000"
    )
    if settings is None:
        return {}, ask
    data = experiment.data
    with own_code.failures_of_class(data, "batch_spec"):
        batch = input_pipelines.batch_spec(experiment.prepared_data, data.global_batch_size)
    if not settings or settings != reports.compute_settings(experiment, batch):
        return {}, f"{path} is {reports.describe_other(settings)}; {ask}"
    rates = reports.read_rates(workdir)
    return (rates, f" (by {path})") if rates else ({}, f"{path} gives no rate; {ask}")
