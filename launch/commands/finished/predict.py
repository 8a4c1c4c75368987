"""Predicts records with the best checkpoint of a run, and writes each prediction exactly once.

The input is a split of the run's own data, evaluation or training. Depending on the kind of the
data, it may also be images:FOLDER (all images below it), tfrecord:FOLDER, tfrecord:FOLDER:SPLIT,
text:FILES (each line or record), sentence:TEXT (that text) or bigquery:TABLE; for data of your own
class, what its prediction() reads, such as FILE.csv.

The output is a folder of shards and a manifest, which is written last. Each shard has the
predictions for a fixed range of records, with the file of every record, and its number where a file
holds several. If there are 5 predictions or fewer, they are printed, too, without long lists. After
an interruption, the same command continues and writes damaged files again; with --verify it only
names them.

    tftpu predict runs/digits_resnet --input=images:scans --output=predicted
"""

import dataclasses
import functools
import hashlib
import json
import os
import re
import shlex
from typing import TYPE_CHECKING, Any

from tftpu.checkpoint import manifest as checkpoint
from tftpu.config import Experiment
from tftpu.errors import UserError, counted, did_you_mean
from tftpu.inference.prediction import plans
from tftpu.input_pipelines import addresses
from tftpu.input_pipelines.sources import Texts
from tftpu.launch.output import reporting
from tftpu.launch.predictions.outputs import OutputSelector, read_class_names
from tftpu.launch.predictions.printing import (
    ROWS,
    ProgressPrinter,
    collect_rows,
    print_rows,
    print_summary,
)
from tftpu.launch.predictions.records import check_has_fields, name_labels, open_records
from tftpu.launch.run import finished, result
from tftpu.launch.settings.options import DeviceOptions, flag, required
from tftpu.runtime.slow import report_activity
from tftpu.storage import files

if TYPE_CHECKING:
    from tftpu import Trainer
    from tftpu.inference.predict import Job
    from tftpu.input_pipelines.unlabelled import UnlabelledRecords

_FORMATS = ("jsonl", "csv", "tfrecord", "parquet", "bigquery")
_OUTPUTS = ("classes", "top5", "logits", "embedding")
_FIELDS = 5  # maximum number of field names in the advice on --keep


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(DeviceOptions, finished.FinishedRunOptions):
    """The run, what to predict, and how to write it."""

    workdir: str = required("RUN", "folder of the run, such as runs/digits_resnet", word=True)
    input: str = required(
        "KIND:WHAT",
        "records to predict, such as images:FOLDER or evaluation",
    )
    output: str = required("DIR", "folder of the predictions, local or gs://")
    format: str = flag("jsonl", "jsonl, csv, tfrecord, parquet or bigquery", metavar="NAME")
    table: str | None = flag(
        None,
        "for bigquery: PROJECT.DATASET.TABLE to load the shards into",
        metavar="TABLE",
    )
    outputs: str | None = flag(
        None,
        "what to write: classes, top5, logits, embedding",
        metavar="NAME,...",
        shown="classes of a classifier, else logits",
    )
    keep: str = flag(
        "", "fields of the input to write as well, such as label,source", metavar="FIELD,..."
    )
    batch_size: int | None = flag(
        None,
        "records predicted at a time, over all devices",
        minimum=1,
        metavar="N",
        shown="data.global_batch_size of the run",
    )
    records_per_shard: int = flag(4096, "records in a file of the output", minimum=1, metavar="N")
    shard: str = flag(
        "1/1", "number of this machine, and number of machines that share the work", metavar="K/N"
    )
    skip_bad: bool = flag(False, "write the reason for a record that cannot be read, and continue")
    verify: bool = flag(False, "only check the files of the output, with their checksums")

    @property
    def kept_fields(self) -> tuple[str, ...]:
        """The fields of the input that are written beside the predictions."""
        return tuple(name for name in self.keep.split(",") if name)

    @property
    def file_format(self) -> str:
        """The format of the files: BigQuery loads Parquet."""
        return "parquet" if self.format == "bigquery" else self.format


def run(options: Options) -> None:
    """Writes the predictions that do not exist yet; with --verify, only checks the files."""
    chosen, machine = _parse_outputs(options.outputs), _parse_machine(options.shard)
    _check_flags(options)
    folder = options.output.rstrip("/")
    if options.verify:
        _verify(folder)
        return
    finished.check_exists(options.workdir)
    plans.check_same(folder, _describe_plan(options, chosen, machine[1]))
    changed = OutputSelector(chosen)
    with reporting(f"Loading {options.workdir}"):
        experiment, restored, records = _restore(options, changed)
    from tftpu.inference.predict import Job
    from tftpu.inference.prediction.outputs import build_columns, check_kept, name_columns

    names = read_class_names(experiment, changed) if changed.classifies else None
    check_kept(options.kept_fields, name_columns(changed.shape, changed.outputs, names))
    records = name_labels(records, experiment.data, names)
    written: list[dict[str, Any]] = []
    encode = _choose_encoder(options)
    job = Job(
        folder,
        options.file_format,
        collect_rows(encode, written) if records.count <= ROWS else encode,
        build_columns(changed.outputs, changed.probabilities, names),
        {
            "input": options.input,
            "identity": records.identity,
            "step": restored.step,
            "checkpoint": _compute_digest(options.workdir, restored.step),
            "outputs": changed.outputs,
            "class_names": names and hashlib.blake2b("\n".join(names).encode()).hexdigest()[:16],
        },
        options.kept_fields,
        options.records_per_shard,
        machine,
    )
    _check_files(records.count, options)
    report_activity(f"Predicting {counted(records.count, 'record')} with step {restored.step:,}")
    complete = _predict(restored.trainer, records, job)
    print_rows(written)
    if chosen is None:
        held = ", ".join(changed.outputs)
        print(f"The predictions hold {held}; --outputs chooses among {', '.join(_OUTPUTS)}.")
    if records.names and not options.kept_fields:
        fields = shlex.quote(",".join(records.names[:_FIELDS]))
        print(f"--keep={fields} also writes fields of the input; it needs another --output.")
    if complete and options.table is not None:
        _load(job, options.table)


def _check_flags(options: Options) -> None:
    """Raises `UserError` for flags that are wrong, before anything is loaded."""
    if options.format not in _FORMATS:
        raise UserError(
            f"--format has no {options.format!r}.{did_you_mean(options.format, _FORMATS)}"
        )
    files.check_folder("--output", options.output)
    _check_output_name(options)
    _check_table(options)


def _describe_plan(options: Options, chosen: list[str] | None, machines: int) -> dict[str, Any]:
    """Returns the flags and the best checkpoint, as the plan in the output folder records them."""
    known = {
        "input": options.input,
        "keep": list(options.kept_fields),
        "format": options.file_format,
        "records_per_shard": options.records_per_shard,
        "machines": machines,
    }
    known |= {"outputs": chosen} if chosen else {}
    return known | _describe_best(options.workdir)


def _restore(
    options: Options, changed: OutputSelector
) -> tuple[Experiment, finished.RestoredRun, "UnlabelledRecords"]:
    """Returns the config, the restored run, and the records to predict."""
    options.split_cpu(options.config)
    experiment = finished.load_experiment(options.workdir, options)
    data, keep = experiment.data, options.kept_fields
    addresses.check_address(options.input, data)
    if type(data) is Texts and options.input.startswith("text:"):
        data.check_patterns(options.input.removeprefix("text:"))
    check_has_fields(options.input, data, keep)
    # A batch must not be larger than a shard.
    wanted = options.batch_size or data.global_batch_size
    data.global_batch_size = min(wanted, options.records_per_shard)
    options.set_cluster(experiment.cluster)
    experiment.cluster.validate()
    restored, records = finished.restore_for_records(
        experiment,
        options.workdir,
        lambda: open_records(experiment.prepared_data, options.input, options.skip_bad, keep),
        changed,
    )
    return experiment, restored, records


def _predict(trainer: "Trainer", records: "UnlabelledRecords", job: "Job") -> bool:
    """Writes missing predictions; prints a summary; returns whether all machines' rows exist."""
    from tftpu.inference.predict import predict

    progress = ProgressPrinter()
    try:
        complete = predict(trainer, records, job, progress)
    except KeyboardInterrupt as error:
        error.add_note("The same command predicts the records that are missing.")
        raise
    except OSError as error:
        raise UserError(
            f"{job.output} cannot be written ({error.strerror or error}): run the same command "
            "again once it can be written."
        ) from error
    # Earlier runs or other machines may have written some of the rows.
    others = progress.found > 0 or job.machine[1] > 1
    print_summary(job, records, complete, others)
    return complete


def _describe_best(workdir: str) -> dict[str, Any]:
    """Returns the best checkpoint of a run as a plan records it; {} if it is unknown or missing.

    The newest undamaged checkpoint is then used, which is known only after it was restored.
    """
    best = result.read_best(workdir)
    if best is None or best.step not in checkpoint.list_steps(files.join(workdir, "checkpoints")):
        return {}
    return {"step": best.step, "checkpoint": _compute_digest(workdir, best.step)}


def _compute_digest(workdir: str, step: int) -> str:
    return checkpoint.compute_digest(files.join(workdir, "checkpoints", str(step)))


def _verify(output: str) -> None:
    """Checks complete predictions. Raises `UserError` if any file is damaged."""
    from tftpu.inference.predict import verify

    problems = verify(output)
    if problems:
        listed = "\n".join(f"  {problem}" for problem in problems)
        raise UserError(
            f"{output} has damaged files, which the same command without --verify writes "
            f"again:\n{listed}"
        )
    print(f"all files in {output} are as they were written")


def _check_output_name(options: Options) -> None:
    """Raises `UserError` if the output does not exist and has the ending of a file."""
    name, ending = os.path.splitext(options.output)
    known = (".jsonl", ".json", ".csv", ".txt", ".parquet", ".tfrecord")
    if ending in known and not files.exists(options.output):
        form = ending[1:] if ending[1:] in _FORMATS else options.format
        format_flag = "" if form == "jsonl" else f" --format={form}"
        raise UserError(
            f"--output={options.output} has the name of a file, but the predictions are several "
            f"files in a folder: give a folder, --output={name}{format_flag}."
        )


def _check_table(options: Options) -> None:
    """Raises `UserError` for wrong flags of the BigQuery table, before hours of prediction."""
    if (options.format == "bigquery") != (options.table is not None):
        raise UserError(
            "--format=bigquery and --table=PROJECT.DATASET.TABLE must be given together."
        )
    if options.table is None:
        return
    if not re.fullmatch(r"[^.\s]+\.\w+\.[\w-]+", options.table):
        raise UserError(f"--table={options.table} must have the form PROJECT.DATASET.TABLE.")
    if not files.is_remote(options.output):
        raise UserError(
            f"--output={options.output} must be gs://BUCKET/FOLDER, because BigQuery loads the "
            "shards from a bucket."
        )


def _load(job: "Job", table: str) -> None:
    from tftpu.inference.prediction.sums import remove_sums
    from tftpu.input_pipelines.datasets import bigquery_load

    manifest = remove_sums(json.loads(files.read(files.join(job.output, plans.MANIFEST))))
    uris = [files.join(job.output, shard["name"]) for shard in manifest["shards"]]
    # The job's ID is a hash of the table and this text. So the same rows are loaded only once, even
    # if another process or version writes them again.
    name = bigquery_load.load(uris, table, job.output + json.dumps(manifest, indent=1))
    print(f"loaded into {table} by the job {name}")


def _parse_outputs(text: str | None) -> list[str] | None:
    """Returns the requested outputs; None means those that the model has by default."""
    if text is None:
        return None
    chosen = [name for name in text.split(",") if name]
    for name in chosen:
        if name not in _OUTPUTS:
            raise UserError(f"--outputs: there is no {name!r}.{did_you_mean(name, _OUTPUTS)}")
    if not chosen:
        raise UserError(f"--outputs is empty: choose from {', '.join(_OUTPUTS)}.")
    return chosen


def _parse_machine(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text)
    if not found or not 1 <= int(found[1]) <= int(found[2]):
        raise UserError(
            f"--shard={text} must be K/N: the number of this machine, and the number of all "
            "machines."
        )
    return int(found[1]), int(found[2])


def _choose_encoder(options: Options) -> Any:
    """Returns the function that encodes a shard in the format of the options."""
    from tftpu.input_pipelines.formats import results

    encode = getattr(results, options.file_format)
    if options.file_format in ("csv", "parquet"):
        return functools.partial(encode, with_errors=options.skip_bad)
    return encode


def _check_files(count: int, options: Options) -> None:
    """Raises `UserError` if there are more shards than BigQuery loads at once."""
    from tftpu.input_pipelines.datasets.bigquery_load import MOST

    shards = -(-count // options.records_per_shard)
    if options.table is not None and shards > MOST:
        raise UserError(
            f"{count:,} records make {shards:,} shards, but BigQuery loads at most {MOST:,} at "
            f"once: set --records_per_shard={-(-count // MOST)} or more."
        )
