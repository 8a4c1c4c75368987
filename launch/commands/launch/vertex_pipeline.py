"""Trains a config in a pipeline on Vertex AI, once or on a schedule, and exports a good model.

The steps are check, train, evaluate, a gate on metrics, and export. With --source, a conversion
comes first; with --predict, predictions come last. The training is a custom job on the slice, and
the other steps run on CPUs. The running tftpu and the folder of your own config are sent to all
steps. Each run has its own folder in the workdir. --dry_run prints the compiled pipeline.

    tftpu launch vertex-pipeline digits_resnet --gate='loss<=1' --workdir=gs://BUCKET/runs
"""

import dataclasses
import shlex

from tftpu.config import Experiment
from tftpu.errors import UserError
from tftpu.launch.cloud import job
from tftpu.launch.cloud.options import print_dry_run
from tftpu.launch.cloud.vertex import training_job
from tftpu.launch.cloud.vertex.options import VertexOptions
from tftpu.launch.commands.data import convert
from tftpu.launch.run import conditions
from tftpu.launch.settings import config_flags
from tftpu.launch.settings.options import TIME, flag, required
from tftpu.launch.settings.parsing import parse


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(VertexOptions):
    """The config to train, the steps around it, and when and where they run."""

    gate: str = required(
        "CONDITION",
        "condition for exporting a model, such as 'accuracy>=0.95' or 'loss<=0.3'",
        hint=lambda: "--gate='loss<=inf' exports any model with a finite loss.",
    )
    workdir: str | None = flag(
        None, "gs://BUCKET/FOLDER for the folders of the runs (required)", metavar="DIR"
    )
    source: str | None = flag(
        None,
        "source to convert first, as for `tftpu data convert`; the config trains on the result",
        metavar="KIND:WHAT",
    )
    convert_flags: str = flag(
        "", "further flags of `tftpu data convert`, such as '--validation_fraction=0.1'"
    )
    predict: str | None = flag(
        None, "records to predict at the end, as --input of `tftpu predict`", metavar="KIND:WHAT"
    )
    cron: str | None = flag(
        None, "when to run it, such as '0 3 * * 1'", metavar="FIELDS", shown="once, now"
    )
    timeout: float = flag(604_800.0, "time limit of the training", metavar=TIME, minimum=60)
    spot: bool = flag(False, "train on cheaper machines, which may be preempted")
    dry_run: bool = flag(False, "print the compiled pipeline, and send nothing")


def run(options: Options) -> None:
    """Prints the pipeline, or sends it and waits for its end.

    Raises:
        UserError: Vertex AI would reject a value, kfp or Google's client is not installed, or the
            pipeline failed.
    """
    from tftpu.launch.cloud.vertex import pipeline  # raises `UserError` if kfp is not installed

    order = pipeline.VertexPipeline(
        training=_build_training_job(options),
        gate=options.gate,
        source=options.source,
        convert_flags=options.convert_flags,
        predict=options.predict,
        cron=options.cron,
    )
    order.check()
    if options.convert_flags:
        _check_convert_flags(options)
    created = order.build_pipeline_job()
    if options.dry_run:
        print_dry_run(order.as_yaml(created), project=options.project, workdir=options.workdir)
        return
    _launch(order.training, created, options)


def _load_experiment(options: Options) -> Experiment:
    """Loads the config; with --source, its data are the converted shards, as in the training."""
    if not options.source:
        return options.load_experiment()
    given = config_flags.load(options.config, list(options.overrides)).data
    for change in options.overrides:
        if change.startswith("--config.data.data_dir="):
            raise UserError(
                f"{change} and --source both say where the data are: leave one of them out."
            )
    reads = getattr(given, "format", "tfrecord" if given.data_dir else None)
    if reads != "tfrecord":
        raise UserError(
            f"--source makes TFRecord shards in data.data_dir, but {type(given).__name__} of "
            f"{options.config} does not read them: "
            + (
                "add --config.data.format=tfrecord."
                if reads
                else "give a config whose data does, or leave out --source."
            )
        )
    folder = f"--config.data.data_dir={options.workdir or 'gs://BUCKET'}"
    return dataclasses.replace(options, overrides=(*options.overrides, folder)).load_experiment()


def _build_training_job(options: Options) -> training_job.VertexJob:
    """Returns the custom job that trains; in a dry run, placeholders stand for missing values."""
    experiment = _load_experiment(options)
    conditions.check("--gate", options.gate, experiment)
    return options.build_job(experiment)


def _check_convert_flags(options: Options) -> None:
    """Raises `UserError` for flags that the conversion step of the pipeline would reject."""
    if not options.source:
        raise UserError(
            "--convert_flags sets flags of the conversion, which needs --source: give that, too."
        )
    try:
        argv = shlex.split(options.convert_flags)
    except ValueError as error:
        raise UserError(f"--convert_flags={options.convert_flags}: {error}.") from error
    for name in ("--source", "--output"):
        if any(text.split("=")[0] == name for text in argv):
            raise UserError(f"--convert_flags has {name}, which the pipeline sets.")
    ours = [f"--source={options.source}", "--output=gs://BUCKET/FOLDER"]
    parse("data convert", convert.Options, [*argv, *ours])


def _launch(training: training_job.VertexJob, created: dict, options: Options) -> None:
    from tftpu.launch.cloud.vertex import pipeline_client as client

    training.confirm_shipment(options.send_data)
    given = client.create_clients(training.region)
    if options.cron:
        name = client.submit_schedule(given, training, created, options.cron)
        print(f"Each run trains in a folder of {training.workdir}, and incurs costs. ", end="")
        print(client.explain_how_to_end_schedule(training, name))
        return
    name = client.submit(given, training, created, job.make_unique_name(options.config))
    print(client.explain_how_to_end(name))
    print(f"The run is in {client.resolve_run_folder(training.workdir, name)}", flush=True)
    if not options.detach:
        client.watch(given, name)
