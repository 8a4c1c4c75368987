"""Predicts records with the best checkpoint of a run, and writes each prediction exactly once.

The input is a split of the run's own data, evaluation or training. Depending on the kind of the
data, it may also be images:FOLDER (all images below it), tfrecord:FOLDER, tfrecord:FOLDER:SPLIT,
text:FILES (each line or record), sentence:TEXT (that text) or bigquery:TABLE; for data of your own
class, what its prediction() reads, such as FILE.csv.

The output is a folder of shards and a manifest, which is written last. Each shard has the
predictions for a fixed range of records, with the file of every record, and its number where a file
holds several. Up to 5 predictions are printed, too, without long lists. After an interruption, the
same command continues and writes damaged files again; with --verify it only names them.

    tftpu predict runs/digits_resnet --input=images:scans --output=predicted
"""

import dataclasses
import functools
import hashlib
import json
import os
import re
import shlex
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tftpu.checkpoint import manifest as checkpoint
from tftpu.config import DataConfig, Experiment
from tftpu.errors import UserError, counted, did_you_mean
from tftpu.inference.prediction import plans
from tftpu.input_pipelines import addresses
from tftpu.input_pipelines.sources import Images, StreamedImages, Texts
from tftpu.launch.output import reporting
from tftpu.launch.run import finished, result
from tftpu.launch.settings import own_code
from tftpu.launch.settings.options import DeviceOptions, flag, required
from tftpu.runtime.slow import report_activity
from tftpu.storage import files

if TYPE_CHECKING:
    from tftpu.inference.predict import Job
    from tftpu.input_pipelines.unlabelled import UnlabelledRecords

_FORMATS = ("jsonl", "csv", "tfrecord", "parquet", "bigquery")
_OUTPUTS = ("classes", "top5", "logits", "embedding")
_SECONDS = 10.0  # seconds between two lines of progress
_FIELDS = 5  # names of fields that are suggested
_ROWS = 5  # most predictions that are printed
_VALUES = 20  # most values of a list that is printed
_VALUES_BESIDE_CLASS = 5  # as many as those of top5


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
        "1/1", "number of this machine, and of all that share the work", metavar="K/N"
    )
    skip_bad: bool = flag(False, "write the reason for a record that cannot be read, and continue")
    verify: bool = flag(False, "only check the files that are there, by their checksums")


def run(options: Options) -> None:
    """Writes the predictions that do not exist yet."""
    outputs = options.outputs
    named = None if outputs is None else _parse_choices("outputs", outputs, _OUTPUTS)
    form = options.format
    if form not in _FORMATS:
        raise UserError(f"--format has no {form!r}.{did_you_mean(form, _FORMATS)}")
    machine = _parse_machine(options.shard)
    files.check_folder("--output", options.output)
    _check_output_name(options)
    _check_table(form, options)
    if options.verify:
        _verify(options.output.rstrip("/"))
        return
    form = "parquet" if form == "bigquery" else form
    finished.check_exists(options.workdir)
    keep = _parse_kept_fields(options)
    known = {"input": options.input, "keep": list(keep), "format": form}
    known |= {"records_per_shard": options.records_per_shard, "machines": machine[1]}
    known |= {"outputs": named} if named else {}
    plans.check_same(options.output.rstrip("/"), known | _describe_best(options.workdir))
    changed = _OutputSelector(named)
    with reporting(f"Loading {options.workdir}"):
        options.split_cpu(options.config)
        experiment = finished.load_experiment(options.workdir, options)
        data = experiment.data
        addresses.check_address(options.input, data)
        if type(data) is Texts and options.input.startswith("text:"):
            data.check_patterns(options.input.removeprefix("text:"))
        _check_has_fields(options.input, data, keep)
        wanted = options.batch_size or data.global_batch_size
        # A batch belongs to one shard.
        data.global_batch_size = min(wanted, options.records_per_shard)
        options.set_cluster(experiment.cluster)
        experiment.cluster.validate()
        (trainer, step, _), records = finished.restore_for_records(
            experiment,
            options.workdir,
            lambda: _open_records(experiment.prepared_data, options),
            changed,
        )
    from tftpu.inference.predict import Job, predict
    from tftpu.inference.prediction.outputs import build_columns

    outputs = changed.outputs
    names = _read_class_names(experiment, changed) if changed.classifies else None
    records = _name_labels(records, data, names)
    written: list[dict[str, Any]] = []
    encode = _choose_encoder(form, options)
    job = Job(
        options.output.rstrip("/"),
        form,
        _collect_rows(encode, written) if records.count <= _ROWS else encode,
        build_columns(outputs, changed.probabilities, names),
        {
            "input": options.input,
            "identity": records.identity,
            "step": step,
            "checkpoint": _compute_digest(options.workdir, step),
            "outputs": outputs,
            "class_names": names and hashlib.blake2b("\n".join(names).encode()).hexdigest()[:16],
        },
        keep,
        options.records_per_shard,
        machine,
    )
    _check_files(records.count, options)
    report_activity(f"Predicting {counted(records.count, 'record')} with step {step:,}")
    try:
        complete = predict(trainer, records, job, progress := ProgressPrinter())
    except KeyboardInterrupt as error:
        error.add_note("The same command predicts the records that are missing.")
        raise
    except OSError as error:
        raise UserError(
            f"{job.output} cannot be written ({error.strerror or error}): run the same command "
            "again once it can be written."
        ) from error
    others = progress.found > 0 or machine[1] > 1  # have written some of the rows
    _print_summary(job, records, complete, others)
    _print_rows(written)
    if named is None:
        print(f"They hold {', '.join(outputs)}; --outputs chooses among {', '.join(_OUTPUTS)}.")
    if records.names and not keep:
        fields = shlex.quote(",".join(records.names[:_FIELDS]))
        print(f"--keep={fields} writes fields of the input beside them, to another --output.")
    if complete and options.table is not None:
        _load(job, options.table)


def _describe_best(workdir: str) -> dict[str, Any]:
    """Returns what a plan says of the best checkpoint of a run; {} if none is marked.

    Without one, the newest that is not damaged is used, which only restoring it shows.
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


class _OutputSelector:
    """Changes the run's model to one with the requested outputs.

    Args:
        outputs: names of outputs; None: the classes of a classifier, or else the logits.

    Attributes:
        outputs: the names of the outputs; set once the model is built.
        probabilities: whether the model returns probabilities; set once it is built.
        shape: the shape of its outputs; set once it is built.
    """

    def __init__(self, outputs: list[str] | None):
        self.outputs = outputs or []
        self.probabilities = False
        self.shape: Any = ()

    @property
    def classifies(self) -> bool:
        """True if classes are requested."""
        return bool({"classes", "top5"} & set(self.outputs))

    def __call__(self, model: Any) -> Any:
        from tftpu.inference.prediction import outputs

        self.outputs = self.outputs or [outputs.choose_default(model)]
        self.shape = getattr(model, "output_shape", ())
        if self.classifies:
            self.probabilities = outputs.has_probabilities(model)
        if "embedding" not in self.outputs:
            return model
        changed = outputs.add_embedding(model)
        changed.compile(optimizer=model.optimizer)
        return changed


class ProgressPrinter:
    """Prints lines that say how far a prediction is.

    Attributes:
        found: the number of records that were predicted before.
    """

    def __init__(self) -> None:
        self.found = 0
        self._first: tuple[int, float] | None = None
        self._said = 0.0

    def __call__(self, done: int, count: int) -> None:
        now = time.monotonic()
        if self._first is None:
            self._first, self._said, self.found = (done, now), now, done
            if done:
                print(f"{done:,} of {count:,} records are there already", flush=True)
        elif done < count and now - self._said >= _SECONDS:
            begun, since = self._first
            rate = (done - begun) / (now - since)
            left = (count - done) / rate
            print(f"{done:,} of {count:,} records  {rate:,.0f}/s  {left:,.0f} s left", flush=True)
            self._said = now


def _print_summary(job: "Job", records: "UnlabelledRecords", complete: bool, others: bool) -> None:
    """Prints how many predictions and errors are where.

    Args:
        job: what was predicted.
        records: the records, with those that this process could not read.
        complete: whether the predictions of all machines are there.
        others: whether other processes wrote some of the rows; these may hold errors, too.
    """
    machine, machines = job.machine
    if records.skipped:
        print(
            f"tftpu: warning: {counted(len(records.skipped), 'record')} could not be read; what "
            "was wrong stands in the row of each, as its error.",
            file=sys.stderr,
        )
    if complete:
        shards = -(-records.count // job.records_per_shard)
        number = "00000" if shards == 1 else "*"
        name = f"predictions-{number}-of-{shards:05d}.{job.format}"
        errors = len(records.skipped)
        said = counted(records.count - errors, "prediction")
        said += f" and {counted(errors, 'error')}" if errors else ""
        said = counted(records.count, "row") if others else said
        print(f"{said} in {files.join(job.output, name)}")
    else:
        print(
            f"the predictions of machine {machine} of {machines} are in {job.output}; those of "
            "others are missing"
        )


def _print_rows(rows: Sequence[dict[str, Any]]) -> None:
    """Prints predictions as lines of JSON, without long lists; none if nothing else is left."""
    from tftpu.input_pipelines.formats.results import KEYS

    for row in rows:
        most = _VALUES_BESIDE_CLASS if "class" in row else _VALUES
        shown = {name: value for name, value in row.items() if np.size(value) <= most}
        if shown.keys() - set(KEYS):
            print(json.dumps(shown, ensure_ascii=False))


def _check_has_fields(address: str, data: DataConfig, keep: Sequence[str]) -> None:
    """Raises `UserError` for fields of files of images, before anything is loaded."""
    if type(data) not in (Images, StreamedImages):  # another class may read anything
        return
    of_files = getattr(data, "format", "") in ("folder", "index")
    if keep and (address.partition(":")[0] == "images" or (":" not in address and of_files)):
        raise UserError(
            f"--keep={','.join(keep)}: pictures in files have no fields, and each row names its "
            "file: leave out --keep."
        )


def _check_output_name(options: Options) -> None:
    """Raises `UserError` for a new folder whose name is that of a file."""
    name, ending = os.path.splitext(options.output)
    known = (".jsonl", ".json", ".csv", ".txt", ".parquet", ".tfrecord")
    if ending in known and not files.exists(options.output):
        form = ending[1:] if ending[1:] in _FORMATS else options.format
        format_flag = "" if form == "jsonl" else f" --format={form}"
        raise UserError(
            f"--output={options.output} has the name of a file, but the predictions are several "
            f"files in a folder: give a folder, --output={name}{format_flag}."
        )


def _check_table(form: str, options: Options) -> None:
    """Checks the flags of a table before hours are spent on its rows."""
    if (form == "bigquery") != (options.table is not None):
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
    # If another process or version writes the same rows again, they get the same job and are loaded
    # once.
    name = bigquery_load.load(uris, table, job.output + json.dumps(manifest, indent=1))
    print(f"loaded into {table} by the job {name}")


def _parse_choices(flag_name: str, text: str, known: tuple[str, ...]) -> list[str]:
    chosen = [name for name in text.split(",") if name]
    for name in chosen:
        if name not in known:
            raise UserError(f"--{flag_name} has no {name!r}.{did_you_mean(name, known)}")
    if not chosen:
        raise UserError(f"--{flag_name} is empty: choose from {', '.join(known)}.")
    return chosen


def _parse_machine(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text)
    if not found or not 1 <= int(found[1]) <= int(found[2]):
        raise UserError(
            f"--shard={text} must be K/N: the number of this machine, and the number of all "
            "machines."
        )
    return int(found[1]), int(found[2])


def _open_records(data: DataConfig, options: Options) -> tuple["UnlabelledRecords", Any]:
    from tftpu import input_pipelines

    with own_code.failures_of_class(data, "prediction"):
        try:
            records = input_pipelines.prediction(
                data, options.input, options.skip_bad, _parse_kept_fields(options)
            )
        except FileNotFoundError as error:
            # Not every library names the file apart from its message.
            path = str(error.filename or error)
            what = options.input.rpartition(":")[2]
            if what not in path:  # a file of the class itself
                raise
            missing = own_code.explain_missing(str(error.filename or what))
            hint = ""
            if options.input in path and set(": ") & set(options.input):
                reader = f"{type(data).__name__}.prediction"
                hint = f" {reader} takes the whole of {options.input!r} for a path."
            raise UserError(f"--input={options.input}: {missing}{hint}") from error
    return records, records.features([range(1)])


def _parse_kept_fields(options: Options) -> tuple[str, ...]:
    return tuple(name for name in options.keep.split(",") if name)


def _choose_encoder(form: str, options: Options) -> Any:
    """Returns the function that encodes a shard."""
    from tftpu.input_pipelines.formats import results

    encode = getattr(results, form)
    if form in ("csv", "parquet"):
        return functools.partial(encode, with_errors=options.skip_bad)
    return encode


def _collect_rows(encode: Any, rows: list[dict[str, Any]]) -> Any:
    """Returns a function that encodes a shard, and appends its rows to a list."""
    from tftpu.input_pipelines.formats import results

    def encode_and_collect(columns: results.Columns, errors: results.Errors) -> bytes:
        rows.extend(results.iterate_rows(columns, errors))
        return encode(columns, errors)

    return encode_and_collect


def _read_class_names(experiment: Experiment, changed: _OutputSelector) -> list[str] | None:
    """Returns the names of the classes, if this machine has them; see `finished.read_class_names`.

    Raises:
        UserError: the model has another number of classes.
    """
    names = finished.read_class_names(experiment)
    classes = changed.shape[-1] if isinstance(changed.shape, tuple) and changed.shape else None
    if names is not None and classes is not None and len(names) != classes:
        raise UserError(
            f"{type(experiment.data).__name__}.class_names() returns {len(names)} names, but the "
            f"model has {classes} classes."
        )
    return names


def _name_labels(
    records: "UnlabelledRecords", data: DataConfig, names: list[str] | None
) -> "UnlabelledRecords":
    """Returns the records with the class name beside a kept label, if that is a class id."""
    label, first = getattr(data, "label_feature", "label"), getattr(data, "first_class", 0)
    read = records.fields
    if names is None or read is None or label not in records.names:
        return records

    def read_with_names(numbers: range, kept: Sequence[str]) -> dict[str, Any]:
        found = dict(read(numbers, kept))
        ids = np.asarray(found.get(label, ""))
        if ids.ndim == 1 and ids.dtype.kind in "iu":
            known = {first + number: name for number, name in enumerate(names)}
            found[f"{label}_name"] = [known.get(number, "") for number in ids.tolist()]
        return found

    return dataclasses.replace(records, fields=read_with_names)


def _check_files(count: int, options: Options) -> None:
    """Raises `UserError` for more shards than BigQuery loads at once."""
    from tftpu.input_pipelines.datasets.bigquery_load import MOST

    shards = -(-count // options.records_per_shard)
    if options.table is not None and shards > MOST:
        raise UserError(
            f"{count:,} records make {shards:,} shards, but BigQuery loads at most {MOST:,} at "
            f"once: set --records_per_shard={-(-count // MOST)} or more."
        )
