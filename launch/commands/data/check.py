"""Checks the data of a config before a run: shapes, shards, memory, region, and speed.

The speed of this host's input pipeline is compared with what the TPU needs: --need, or the rate
that `tftpu preflight` predicted for the config.

    tftpu data check resnet50_imagenet --hosts=4
"""

import contextlib
import dataclasses
import io
import math
import os
import re
import shlex
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from tftpu.amounts import format_duration, format_size
from tftpu.config import Experiment
from tftpu.engines import selection
from tftpu.errors import UserError, counted
from tftpu.input_pipelines.sources import Images, StreamedImages, Synthetic, Text, Tokens
from tftpu.launch.output import reporting
from tftpu.launch.preflight import reports
from tftpu.launch.run import conditions
from tftpu.launch.run.finished import ConfigOrRunOptions
from tftpu.launch.settings import own_code
from tftpu.launch.settings.options import flag
from tftpu.launch.startup import import_tensorflow, leave_devices_alone
from tftpu.runtime.notes import without_notes
from tftpu.runtime.slow import report_activity, reporting_if_slow
from tftpu.storage import files

SECONDS = 5.0  # seconds for which the pipeline is timed
_SMALL, _LARGE = 8 << 20, 1 << 30  # bytes below and above which a shard is small or large
_BATCHES = 3  # batches whose numbers are compared with the model's limits
_SHOWN = 10  # most damaged images that are named
_DECODED = 200  # images decoded between two looks at the clock
_PROGRESS = 10.0  # seconds between two lines of progress
_BRIEF = 5.0  # seconds of an epoch for which no other machine is worth its price
_MEMORY = 0.5  # largest share of the host's memory that the pipeline may take

Pipeline = Any  # of `tftpu.input_pipelines.training`


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(ConfigOrRunOptions):
    """The data to check, and the machines that will read it."""

    workdir: str | None = flag(
        None, "folder with preflight.json", metavar="DIR", shown="runs/<config>"
    )
    hosts: int = flag(1, "number of hosts that share a batch", minimum=1, metavar="N")
    need: float | None = flag(
        None, "examples per second that the TPU consumes", metavar="N", shown="preflight's"
    )
    zone: str | None = flag(None, "zone of the TPU, such as us-west4-a", metavar="ZONE")
    gate: str | None = flag(
        None, "condition of `tftpu evaluate --gate`: whether its metrics will exist", metavar="COND"
    )


@dataclasses.dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        level: "ok", "warning" or "error".
        text: one line, or more with the names of files.
    """

    level: str
    text: str


def run(options: Options) -> None:
    """Prints each finding once it is known.

    Raises:
        UserError: one of them is an error.
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
        if own_model:  # it is built
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
    """Yields the findings of all checks; errors in shapes or images are the last.

    Args:
        experiment: the experiment.
        options: those of the command.
        own: whether the model is of the user's own, and so is built.
    """
    data, prepared, hosts = experiment.data, experiment.prepared_data, options.hosts
    with reporting("Opening the data"):
        from tftpu import input_pipelines

        with own_code.failures_of_class(data, "training"):
            pipeline = input_pipelines.training(prepared, experiment.train.seed)
        with own_code.failures_of_class(data, "batch_spec"):
            announced = input_pipelines.batch_spec(prepared, data.global_batch_size // hosts)
        plain = not hasattr(pipeline, "starting_at")
        # The trainer itself gives the batches of a plain `tf.data.Dataset` a static shape.
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
        speed = measure_speed(pipeline, hosts)
    yield from inspect_speed(speed, needs, hosts, None if plain else pipeline.count, source)


def inspect_images(data: Any) -> Iterator[Finding]:
    """Counts the classes of a folder or an index of images, and decodes the images."""
    if not isinstance(data, StreamedImages) or data.format == "tfds":
        return
    from tftpu.input_pipelines import overlap
    from tftpu.input_pipelines.datasets import image_survey, streamed_images

    if data.format == "tfrecord":
        yield from (Finding("ok", line) for line in image_survey.describe_shards(data))
        if few := image_survey.describe_few(data.eval_split, image_survey.count_evaluation(data)):
            yield Finding("warning", few)
        return
    try:
        splits = {
            split: streamed_images.list_split(data, split)
            for split in dict.fromkeys((data.train_split, data.eval_split))
        }
    except UserError as error:
        yield Finding("error", str(error))
        return
    yield from (Finding("ok", line) for line in image_survey.describe_classes(splits))
    if few := image_survey.describe_few(data.eval_split, len(splits[data.eval_split].images)):
        yield Finding("warning", few)
    yield from (Finding("warning", line) for line in image_survey.find_imbalance(splits))
    if len(splits) == 2 and (same := overlap.describe_images(*splits.values())):
        yield Finding("warning", same)
    paths = [path for found in splits.values() for path in image_survey.sample_paths(found)]
    report_activity(f"Decoding {counted(len(paths), 'image')}")
    damaged: dict[str, str] = {}
    said = time.monotonic()
    for first in range(0, len(paths), _DECODED):
        if time.monotonic() - said >= _PROGRESS:
            report_activity(f"{first:,} of {len(paths):,} images")
            said = time.monotonic()
        with without_notes((b"",)):  # the libraries print what they find, without the file's name
            damaged |= image_survey.find_damaged(paths[first : first + _DECODED])
    yield _describe_damaged(damaged, len(paths), data.on_bad_record == "skip")


def _describe_damaged(damaged: dict[str, str], decoded: int, skips: bool) -> Finding:
    """Returns how many images are damaged, what to do, and the first of them."""
    if not damaged:
        return Finding("ok", f"{counted(decoded, 'image')} can be decoded")
    advice = "they are skipped"
    if not skips:
        advice = "remove or replace them, or skip them with --config.data.on_bad_record=skip"
    lines = [f"{len(damaged):,} of {counted(decoded, 'image')} cannot be decoded: {advice}"]
    lines += [f"{path} {why}" for path, why in list(damaged.items())[:_SHOWN]]
    if len(damaged) > _SHOWN:
        lines.append(f"and {len(damaged) - _SHOWN:,} others")
    return Finding("warning" if skips else "error", f"\n{'':13}".join(lines))


def inspect_evaluation(data: Any) -> list[Finding]:
    """Checks that the evaluation split is there and another one, and reads its first batch."""
    from tftpu import input_pipelines
    from tftpu.launch.run import summary

    with reporting_if_slow("Reading the evaluation split"):
        try:
            with own_code.failures_of_class(data, "evaluation"):
                batches = input_pipelines.evaluation(data)
        except UserError as error:
            return [Finding("error", f"evaluation: {error}")]
        if batches is None:
            return [Finding("ok", "the data have no evaluation split")]
        is_empty = next(iter(batches), None) is None
    if is_empty:
        return [Finding("error", "the evaluation split is empty.")]
    same = summary.describe_same_split(data)
    readable = Finding("ok", "the evaluation split can be read")
    return [readable, *([Finding("warning", same)] if same else [])]


def inspect_overlap(data: Any, pipeline: Pipeline | None, seed: int) -> list[Finding]:
    """Looks for evaluation examples in the training split.

    Augmentation changes pictures (see `inspect_images`), synthetic examples are all alike, and a
    repeated document stands in other windows.

    Args:
        data: the data, before a model's preprocessor.
        pipeline: their training split, if it is open.
        seed: of the training split.
    """
    import tensorflow as tf

    from tftpu import input_pipelines
    from tftpu.input_pipelines import overlap
    from tftpu.launch.run import summary

    left_out = Images | StreamedImages | Synthetic | Text | Tokens
    if isinstance(data, left_out) or summary.describe_same_split(data):
        return []
    hidden = contextlib.redirect_stdout(io.StringIO())  # printed when they were opened before
    try:
        with own_code.failures_of_class(data, "evaluation"), hidden:
            opened = pipeline or input_pipelines.training(data, seed)
            evaluation = input_pipelines.evaluation(data, seed)
            if evaluation is None:
                return []
            training: Any = opened
            if hasattr(opened, "starting_at"):
                steps = -(-opened.count // opened.global_batch_size)
                training = input_pipelines.starting_at(opened, 0).take(steps)
            splits = (split.as_numpy_iterator() for split in (training, evaluation))
            found = overlap.describe_inputs(*splits)
    except (UserError, tf.errors.OpError) as error:
        return [Finding("error", f"reading both splits: {str(error).splitlines()[0]}")]
    return [Finding("warning", found)] if found else []


def read_first_batches(pipeline: Pipeline, hosts: int) -> list[Any]:
    """Returns the first batches of a host, as NumPy arrays."""
    from tftpu import input_pipelines

    batches = input_pipelines.starting_at(pipeline, 0, 0, hosts)
    return list(batches.take(_BATCHES).as_numpy_iterator())


def inspect_values(model: Any, batches: list[Any], ignored: int | None = None) -> list[Finding]:
    """Compares class ids and tokens with the model's classes and vocabulary, if it has them.

    Args:
        model: the config's model, of a family of the zoo: another's fields may mean anything.
        batches: some batches of the data, `(x, y)` or `(x, y, sample_weight)` of arrays.
        ignored: the class id that the loss ignores, its `ignore_class`.
    """
    vocabulary, classes = (getattr(model, name, None) for name in ("vocabulary", "num_classes"))
    if getattr(model, "head", "classes") != "classes":  # the head predicts tokens
        classes = None
    found = []
    for name, part, owner, count in (
        ("tokens", 0, "vocabulary", vocabulary),
        ("labels", 1, "num_classes" if classes else "vocabulary", classes or vocabulary),
    ):
        seen = [_select_weighted_ids(batch, part) for batch in batches if _has(batch, part)]
        numbers = np.concatenate([ids for ids in seen if ids is not None] or [[]])
        if part == 1 and ignored is not None:
            numbers = numbers[numbers != ignored]
        if not isinstance(count, int) or not numbers.size:
            continue
        least, most = int(numbers.min()), int(numbers.max())
        text = f"the {name} of the first batches go from {least} to {most}"
        if least < 0 or most >= count:
            text += f", and model.{owner}={count} takes 0 to {count - 1}: change the data"
            text += f", or set it to {most + 1}." if least >= 0 else "."
            found.append(Finding("error", text))
        else:
            found.append(Finding("ok", f"{text}, within model.{owner}={count}"))
    return found


def inspect_lengths(experiment: Experiment, batches: list[Any], hosts: int) -> list[Finding]:
    """Counts the texts that the preprocessor of a KerasHub model cuts.

    Args:
        experiment: the experiment.
        batches: the first batches.
        hosts: the number of hosts that share a batch.
    """
    masks = [b[0].get("padding_mask") for b in batches if _has(b, 0) and isinstance(b[0], dict)]
    known = [mask.astype(bool) for mask in masks if mask is not None]
    if not known:
        return []
    full = np.concatenate([mask.all(-1) for mask in known])
    most = known[0].shape[-1]
    lengths = count_tokens(experiment, hosts) if full.any() else np.zeros(0, int)
    y = batches[0][1] if _has(batches[0], 1) else None
    # Of texts that are predicted token by token, the last one is a label alone.
    lengths = lengths - (getattr(y, "shape", ())[1:] == (most,))
    cut = int((lengths > most).sum())
    of = f"of {counted(full.size, 'text')} of the first batches"
    if not cut:
        padded = 1 - sum(mask.sum() for mask in known) / sum(mask.size for mask in known)
        text = f"none {of} is cut at {most} tokens; {padded:.0%} of the positions are padding"
        return [Finding("ok", text)]
    from tftpu.models.keras_hub import prepared

    model: Any = experiment.model
    text = f"{cut} {of} {'is' if cut == 1 else 'are'} cut at {most} tokens. "
    text += prepared.describe_longest(model, lengths.max(), most)
    return [Finding("warning", text)]


def count_tokens(experiment: Experiment, hosts: int) -> np.ndarray:
    """Returns the tokens of each text of the first batches of a KerasHub model, uncut."""
    from tftpu import input_pipelines
    from tftpu.models.keras_hub import prepared

    model: Any = experiment.model
    pipeline = input_pipelines.training(experiment.data, experiment.train.seed)
    batches = read_first_batches(pipeline, hosts)
    return np.concatenate([prepared.count_tokens(model, batch) for batch in batches])


def inspect_own_values(experiment: Experiment, batches: list[Any]) -> list[Finding]:
    """Compares labels and ids with the outputs and embeddings of a user's model, which is built.

    Args:
        experiment: the config.
        batches: some batches of the data, of arrays.
    """
    import keras

    from tftpu.engines import keras_internals
    from tftpu.launch.run import experiment as build
    from tftpu.training import batch_values

    experiment = dataclasses.replace(
        experiment, train=dataclasses.replace(experiment.train, steps=1, epochs=None)
    )
    try:
        if build.has_objectives(experiment):  # its losses may take any numbers
            return []
        devices = selection.connect("none", 1, keras.backend.backend()).scope()
        with devices, own_code.failures_of_class(experiment.model, "build"):
            model = build.build_model(experiment)
            keras_internals.build(model, _describe_batch(batches[0]))
    except UserError as error:
        return [Finding("error", f"the model cannot be built for these data: {error}")]
    seen: dict[str, list[Any]] = {}
    for batch in batches:
        for limit, outside in batch_values.compare_with_limits(model, batch):
            if outside:
                return [Finding("error", f"in the first batches, {outside}.")]
            values = np.ravel(limit.values)
            allowed = values[(values >= 0) & (values < limit.size)]  # others have no weight
            seen.setdefault(f"and {limit.owner}", []).append((limit.name, allowed))
    found = []
    for owner, parts in seen.items():
        numbers = np.concatenate([values for _, values in parts])
        if numbers.size:
            text = f"{parts[0][0]} has values from {numbers.min()} to {numbers.max()}"
            found.append(Finding("ok", f"{text} in the first batches, {owner}"))
    return found


def _describe_batch(batch: Any) -> Any:
    """Returns the symbolic tensors of a batch of arrays."""
    import keras

    return keras.tree.map_structure(
        lambda array: keras.KerasTensor(array.shape, array.dtype.name), batch
    )


def _has(batch: Any, part: int) -> bool:
    return isinstance(batch, tuple) and part < len(batch) <= 3


def _select_weighted_ids(batch: Any, part: int) -> np.ndarray | None:
    """Returns the ids in a batch's features or labels with a weight above 0; None without ids."""
    ids = batch[part]
    ids = ids.get("tokens") if isinstance(ids, dict) else ids
    if not isinstance(ids, np.ndarray) or not np.issubdtype(ids.dtype, np.integer):
        return None
    weights = batch[2] if len(batch) > 2 and part == 1 else None
    counts = isinstance(weights, np.ndarray) and weights.shape == ids.shape
    return ids[weights != 0] if counts else ids.reshape(-1)


def inspect_plain(hosts: int) -> list[Finding]:
    """Reports what a plain `tf.data.Dataset` costs in comparison with a pipeline."""
    text = "the data are a tf.data.Dataset: a resumed run reads up to its position again"
    found = [Finding("ok", text)]
    if hosts > 1:
        text = f"each of {hosts} hosts reads all of the tf.data.Dataset, and trains on its part"
        found.append(Finding("warning", text))
    return found


def inspect_shapes(spec: Any, announced: Any) -> list[Finding]:
    """Checks that batches have static shapes and device dtypes, and match what preflight compiles.

    Args:
        spec: element spec of the dataset.
        announced: the result of `batch_spec`.
    """
    import tensorflow as tf

    found = []
    for part in tf.nest.flatten(spec):
        if None in part.shape:
            found.append(Finding("error", f"{part} has no static shape, which a TPU needs."))
        if part.dtype in (tf.string, tf.int64, tf.float64):
            found.append(Finding("error", f"{part}: a TPU does not support {part.dtype.name}."))
    expected = tf.nest.flatten(announced)
    if tf.nest.flatten(spec)[: len(expected)] != expected:  # weights may follow the announced parts
        found.append(Finding("error", f"Batches are {spec}; batch_spec() says {announced}."))
    parts = [f"{p.dtype.name}{list(p.shape)}" for p in tf.nest.flatten(spec)]
    return found or [Finding("ok", f"a host's batch is {', '.join(parts)}")]


def inspect_shards(pipeline: Pipeline, hosts: int) -> list[Finding]:
    """Checks number and size of the files against the number of hosts."""
    from tftpu.input_pipelines.reading.shards import Shards

    source = getattr(pipeline, "source", None)
    if not isinstance(source, Shards):
        return []
    count = len(source.pieces)
    sizes = [piece.bytes or 0 for piece in source.pieces]
    mean = sum(sizes) / count
    tracks = source.plan_tracks(pipeline.global_batch_size).number
    found = []
    if tracks % hosts:
        found.append(
            Finding(
                "warning",
                f"{count} shards make {tracks} streams, which {hosts} hosts cannot share evenly: "
                f"some examples are read by several hosts. Convert to a multiple of {hosts} shards "
                "(--min_shards), and let it divide the global batch.",
            )
        )
    if mean < _SMALL and count > hosts and files.is_remote(source.pieces[0].path):
        size = format_size(mean)
        text = f"shards of {size} are small, and slow to open in a bucket: about 150 is best"
        found.append(Finding("warning", text))
    if mean > _LARGE:
        found.append(
            Finding("warning", f"shards of {format_size(mean)} are large: about 150 is best")
        )
    if source.compression or not all(piece.offsets for piece in source.pieces):
        text = "the shards have no index (or are compressed): resuming inside one reads all of it"
        found.append(Finding("warning", text))
    summary = (
        f"{counted(source.count, 'example')} in {counted(count, 'shard')} of {format_size(mean)}, "
        f"in {counted(tracks, 'stream')}"
    )
    return [Finding("ok", summary), *found]


def inspect_memory(pipeline: Pipeline, hosts: int, limit: int) -> list[Finding]:
    """Checks that the pipeline's buffers fit into the memory of the host.

    Args:
        pipeline: the pipeline of the training split.
        hosts: number of hosts that share a batch.
        limit: the bytes of that memory.
    """
    import tensorflow as tf

    source = getattr(pipeline, "source", pipeline)  # a user's own may have no source
    if hasattr(source, "examples"):
        held = sum(_count_bytes(array) for array in tf.nest.flatten(source.examples))
        what = "the whole data set and 4 batches"
    elif hasattr(source, "estimate_memory"):
        held = source.estimate_memory(pipeline.global_batch_size, hosts)
        what = f"shuffling {min(source.shuffle, source.count):,} examples and 4 batches"
    else:
        held, what = 0, "4 batches"
    spec = pipeline.starting_at(0, 0, hosts).element_spec
    batch = sum(part.dtype.size * math.prod(part.shape) for part in tf.nest.flatten(spec))
    held += 4 * batch  # 4 batches: in production, waiting, and on the way to the device
    text = f"{what} take {format_size(held)} of this host's {format_size(limit)}"
    if held > limit:
        return [Finding("error", f"{text}: lower data.shuffle or data.global_batch_size.")]
    if held > _MEMORY * limit:
        return [Finding("warning", f"{text}: lower data.shuffle if the run is killed.")]
    return [Finding("ok", text)]


def _count_bytes(array: np.ndarray) -> int:
    """Returns the bytes of an array, with those of its texts."""
    return array.nbytes if array.dtype != object else sum(map(sys.getsizeof, array.flat))


def inspect_region(data_dir: str | None, zone: str | None) -> list[Finding]:
    """Checks that the bucket is in the region of the TPU."""
    match = re.match(r"gs://([^/]+)", data_dir or "")
    if not match:
        return [Finding("ok", "the data is in no bucket: --zone has no effect")] if zone else []
    if not zone:
        return [Finding("ok", "region of the bucket not checked: give --zone of the TPU")]
    from tftpu.storage import buckets

    where = buckets.find_location(match[1]).lower()
    text = f"the bucket {match[1]} is in {where}, the TPU in {zone}"
    continent = {"us": "us-", "eu": "europe-"}.get(where)
    same = zone.startswith(continent) if continent else zone.rpartition("-")[0] == where
    if same:
        return [Finding("ok", text)]
    return [Finding("warning", f"{text}: reading across regions is slow, and costs extra.")]


def measure_speed(pipeline: Pipeline, hosts: int) -> float:
    """Returns examples per second of this host's share, after a batch to warm up."""
    import tensorflow as tf

    from tftpu import input_pipelines

    batches = iter(input_pipelines.starting_at(pipeline, 0, 0, hosts))
    share = tf.nest.flatten(next(batches))[0].shape[0]
    start, count = time.perf_counter(), 0
    while count == 0 or time.perf_counter() - start < SECONDS:
        next(batches)
        count += 1
    return count * share / (time.perf_counter() - start)


def read_needs(experiment: Experiment, options: Options) -> tuple[dict[str, float], str]:
    """Returns the examples per second that slices need, and a clause on where that is from.

    Args:
        experiment: the experiment.
        options: those of the command, with --need or the folder of a preflight.
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


def inspect_speed(
    rate: float, needs: dict[str, float], hosts: int, examples: int | None, source: str = ""
) -> list[Finding]:
    """Checks that hosts like this one are fast enough for the TPU.

    Args:
        rate: examples per second of this host.
        needs: the examples per second that each slice needs, by its name.
        hosts: number of hosts.
        examples: number of examples of the training data; None if it is not known.
        source: a clause on where the needs are from, or without any, on how to find them.
    """
    speed, seconds = f"this host gives {rate:,.0f} examples/s", math.inf
    if examples and hosts == 1:
        seconds = examples / rate
        speed = f"an epoch of {counted(examples, 'example')} takes this host "
        speed += f"{format_duration(seconds)} ({rate:,.0f} examples/s)"
    if not needs:
        return [Finding("ok", f"{speed}; {source}" if source else speed)]
    found = []
    for name, need in needs.items():
        wanted = max(1, math.ceil(need / rate))
        text = f"{speed}; {name} needs {need:,.0f}{source}"
        if wanted <= hosts:
            text += f": {hosts} host{'s are' if hosts > 1 else ' is'} enough"
            found.append(Finding("ok", text))
        elif seconds <= _BRIEF:
            found.append(Finding("ok", f"{text}: for epochs this short, this host is enough"))
        else:
            text += (
                f": {wanted:,} hosts like this one, or other machines that prepare the data "
                "(data.service)"
            )
            found.append(Finding("warning", text))
    return found


def read_host_memory() -> int:
    """Returns the bytes of memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
