"""Converts any source of data to shuffled TFRecord shards of equal size, with a manifest.

The same command resumes a conversion that was interrupted. A folder of splits (train, val, test),
each with a folder for each class, is converted with all its splits.

    tftpu data convert --source=images:photos --output=data/photos
"""

import dataclasses
import json
import shlex

from tftpu.errors import UserError
from tftpu.launch.settings.options import flag, required
from tftpu.launch.startup import import_tensorflow
from tftpu.runtime.slow import reporting_if_slow


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The source, the data set to write, and how to convert."""

    source: str = required(
        "KIND:WHAT",
        "source to convert; KIND is tfds, images, index, text, tfrecord or bigquery",
        hint=lambda: "An example of a source is images:FOLDER.",
        word=True,
    )
    output: str = required("DIR", "folder of the data set, local or gs://")
    split: str = flag(
        "",
        "name of the split; for tfds also NAME=SPLIT",
        metavar="NAME",
        shown="train, or all splits of a folder",
    )
    validation_fraction: float = flag(
        0.0, "for images, index: share of each class for the split validation", metavar="SHARE"
    )
    skip_bad: bool = flag(False, "for images, index: leave out files that cannot be decoded")
    seed: int = flag(0, "seed of the shuffle", metavar="N")
    shard_mb: float = flag(150.0, "approximate size of a shard in MiB", metavar="MIB")
    min_shards: int = flag(1, "minimum number of shards; at least one per host", metavar="N")
    compression: str = flag("", "GZIP, or nothing", metavar="GZIP")
    workers: int = flag(0, "number of processes", metavar="N", shown="one per core")
    staging: str | None = flag(None, "local folder for intermediate records", metavar="DIR")
    data_dir: str | None = flag(None, "for tfds: folder of prepared data sets", metavar="DIR")
    classes: str = flag(
        "", "for images, index, tfrecord: names of all classes, by id", metavar="NAME,..."
    )
    num_classes: int = flag(
        0, "for index, tfrecord: number of class ids", metavar="N", minimum=0, shown="as found"
    )
    image_feature: str = flag(
        "image", "for tfrecord of other writers: feature of the image", metavar="NAME"
    )
    label_feature: str = flag(
        "label", "for tfrecord of other writers: feature of the label", metavar="NAME"
    )
    first_class: int = flag(
        0, "for tfrecord of other writers: lowest class id, which becomes 0", metavar="N", minimum=0
    )
    features: str = flag(
        "", "for tfds, tfrecord, bigquery: features to keep", metavar="NAME,...", shown="all"
    )
    tokenizer: str | None = flag(
        None, "for text: path of a tokenizer.json", metavar="FILE", shown="bytes"
    )
    end_of_text: str | None = flag(
        None, "for text: token written after each document", metavar="TOKEN"
    )
    context: int = flag(1024, "for text: tokens in a sequence", metavar="N")
    field: str = flag("text", "for text in tables, JSON: field with the text", metavar="NAME")
    snapshot: str | None = flag(
        None, "for bigquery: time of the rows, ISO 8601", metavar="TIME", shown="now"
    )
    runner: str | None = flag(
        None, "runner of Apache Beam, such as DataflowRunner", metavar="NAME", shown="no Beam"
    )
    beam_options: str = flag("", "options of that runner, such as '--project=P'")


def run(options: Options) -> None:
    """Converts on this machine, or as a job of Apache Beam."""
    if options.beam_options and not options.runner:
        raise UserError(
            "--beam_options needs --runner=NAME, such as DirectRunner or DataflowRunner."
        )
    with reporting_if_slow("Loading TensorFlow"):
        import_tensorflow()
    from tftpu.input_pipelines.convert import converter, splits
    from tftpu.input_pipelines.convert.conversion import Conversion
    from tftpu.input_pipelines.convert.readers.reader import ReadOptions

    source_options = ReadOptions(
        split=options.split,
        data_dir=options.data_dir,
        features=_split_names(options.features),
        tokenizer=options.tokenizer,
        end_of_text=options.end_of_text,
        context=options.context,
        field=options.field,
        snapshot=options.snapshot,
        skip_bad=options.skip_bad,
        classes=_split_names(options.classes),
        num_classes=options.num_classes,
        image_feature=options.image_feature,
        label_feature=options.label_feature,
        first_class=options.first_class,
    )
    conversion = Conversion(
        options.source,
        options.output.rstrip("/"),
        source_options,
        options.seed,
        options.shard_mb,
        options.min_shards,
        options.compression,
    )
    for one in splits.plan_conversions(conversion, options.validation_fraction):
        if options.runner:
            from tftpu.input_pipelines.convert import beam

            beam.run(one, [f"--runner={options.runner}", *shlex.split(options.beam_options)])
        else:
            converter.run(one, options.workers, options.staging)
    if options.validation_fraction and options.source.startswith("images:"):
        print(
            "To train on it: --config.data.format=tfrecord --config.data.data_dir="
            f"{shlex.quote(conversion.output)} --config.data.eval_split=validation\n"
            'Or in the config, for all commands: StreamedImages(format="tfrecord", '
            f'data_dir={json.dumps(conversion.output)}, eval_split="validation", ...)'
        )


def _split_names(text: str) -> tuple[str, ...]:
    """Splits a comma-separated list into names; strips spaces and drops empty names."""
    return tuple(name.strip() for name in text.split(",") if name.strip())
