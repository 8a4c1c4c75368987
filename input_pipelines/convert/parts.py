"""What `tftpu data convert` reads: sources cut into parts that any process reads on its own.

    tfds:NAME            a TFDS data set that is prepared
    images:FOLDER        a folder of images for each class
    index:FILE           a CSV or JSON-lines file with the columns image and label; images beside it
    text:PATTERN         plain files, a document each, or JSON lines (.jsonl)
    tfrecord:FOLDER      a data set of shards, to be cut or shuffled anew
    bigquery:TABLE       project.dataset.table; or bigquery:SELECT ...

A part always gives the same examples in the same order: all that is shuffled is shuffled later.
"""

import csv
import dataclasses
import fnmatch
import io
import itertools
import json
import os
import re
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np

from tftpu.errors import UserError, did_you_mean
from tftpu.input_pipelines.convert import packing
from tftpu.input_pipelines.formats import manifest as manifests
from tftpu.input_pipelines.formats import tfrecord
from tftpu.input_pipelines.formats.manifest import Feature
from tftpu.storage import buckets, files

IMAGES = (".jpg", ".jpeg", ".png")
PART_EXAMPLES = 512  # images of a part
PART_BYTES = 64 << 20  # of text
_WIDER = {"bool": "uint8", "int8": "int32", "int16": "int32", "uint32": "int64"}
_MAGIC = (b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n")


@dataclasses.dataclass(frozen=True)
class Options:
    """How a source is read; what does not concern it has to be left alone.

    Args:
        split: of the source (tfds, tfrecord), and its name in the output; NAME=SPLIT where the two
            differ, as validation=train[90%:].
        data_dir: of TFDS.
        features: names of those wanted; (): all.
        tokenizer, end_of_text, context: of text; see `packing`.
        field: of JSON lines, what holds the text.
        snapshot: of BigQuery, the time whose rows are read, as 2026-11-20T12:00:00Z.
    """

    split: str = "train"
    data_dir: str | None = None
    features: tuple[str, ...] = ()
    tokenizer: str | None = None
    end_of_text: str | None = None
    context: int = 1024
    field: str = "text"
    snapshot: str | None = None

    @property
    def source_split(self) -> str:
        """What is read."""
        return self.split.partition("=")[2] or self.split

    @property
    def output_split(self) -> str:
        """What it is called in the output."""
        return self.split.partition("=")[0].partition("[")[0]


class Source(Protocol):
    """A source of examples. It is sent to other processes, so it holds no open files."""

    features: dict[str, Feature]
    about: dict[str, Any]  # what the manifest keeps beside the features
    parts: list[Any]  # JSON each: what names a part
    state: Any  # JSON: other if the source changed; for most the parts, with sizes
    ordered: bool  # whether the parts and their order are the same each time

    def examples(self, part: Any) -> Iterator[dict[str, Any]]:
        """The examples of a part as `records.encode` takes them, in the part's own order.

        Raises:
            UserError: one that cannot be read; it names the file and the record.
        """


def source(address: str, options: Options) -> Source:
    """The source of an address `KIND:WHAT`.

    Raises:
        UserError: no such kind, or nothing there.
    """
    kind, _, what = address.partition(":")
    kinds = {
        "tfds": _Tfds,
        "images": _Images,
        "index": _Index,
        "text": _Text,
        "tfrecord": _TfRecord,
        "bigquery": _bigquery,
    }
    if kind not in kinds or not what:
        near = did_you_mean(kind, kinds)
        raise UserError(f"--source={address} should be KIND:WHAT, as images:FOLDER.{near}")
    found = kinds[kind](what, options)
    if not found.parts:
        raise UserError(f"There is nothing in {address}.")
    return found


class _Ordered:
    """Sources whose parts, and the examples in them, are the same each time."""

    ordered = True

    @property
    def state(self) -> list:
        return self.parts


class _Images(_Ordered):
    def __init__(self, folder: str, options: Options):
        sizes = _tree(folder)
        found = [name for name in sizes if name.lower().endswith(IMAGES)]
        classes = sorted({name.split("/")[0] for name in found if "/" in name})
        if not classes:
            raise UserError(
                f"There are no folders of images ({', '.join(IMAGES)}) in {folder}: one for each "
                "class is expected."
            )
        self.features = _image_features(len(classes))
        self.about = {"classes": classes}
        ids = {name: number for number, name in enumerate(classes)}
        self.parts = _chunks(
            [[f"{folder}/{n}", ids[n.split("/")[0]], sizes[n]] for n in found if "/" in n]
        )

    def examples(self, part):
        return _read_images(part)


class _Index(_Ordered):
    def __init__(self, path: str, options: Options):
        with tfrecord.opened(path) as file:
            lines = _utf8(file.read(), path).removeprefix("\ufeff").splitlines()  # as Excel writes
        if path.endswith(".csv"):
            rows = list(csv.DictReader(io.StringIO("\n".join(lines))))
        else:
            rows = [_json_line(line, f"line {n} of {path}") for n, line in enumerate(lines, 1)]
        folder = os.path.dirname(path) or "."
        sizes = _tree(folder)
        for number, row in enumerate(rows, 1):
            for column in ("image", "label"):
                if row.get(column) in (None, ""):
                    raise UserError(
                        f"Record {number} of {path} has no {column!r}: an index needs the columns "
                        "image and label."
                    )
            if row["image"] not in sizes:
                raise UserError(
                    f"Record {number} of {path}: there is no image {row['image']} in {folder}."
                )
        labels = [str(row["label"]) for row in rows]
        self.about = {}
        if all(label.isdigit() for label in labels):  # ids, not names
            ids = [int(label) for label in labels]
        else:
            self.about["classes"] = sorted(set(labels))
            known = {name: number for number, name in enumerate(self.about["classes"])}
            ids = [known[label] for label in labels]
        self.features = _image_features(max(ids, default=0) + 1)
        self.parts = _chunks(
            [[f"{folder}/{r['image']}", i, sizes[r["image"]]] for r, i in zip(rows, ids)]
        )

    def examples(self, part):
        return _read_images(part)


class _Text(_Ordered):
    def __init__(self, pattern: str, options: Options):
        if options.context < 1:
            raise UserError(f"--context={options.context}: it must be 1 or more.")
        self._options = options
        _, vocabulary = packing.tokenizer(options.tokenizer, options.end_of_text)
        dtype = "uint16" if vocabulary <= 1 << 16 else "int32"
        length = (options.context + 1,)
        self.features = {
            "tokens": Feature("uint8" if vocabulary <= 256 else dtype, length, "raw"),
            "segments": Feature("uint16" if options.context < 1 << 16 else "int32", length, "raw"),
        }
        self.about = {
            "context": options.context,
            "vocabulary": vocabulary,
            "tokenizer": os.path.basename(options.tokenizer) if options.tokenizer else "bytes",
        }
        self.parts = self._cut(_matching(pattern))

    def _cut(self, sizes: dict[str, int]) -> list:
        """[[path, begin, end], ...] a part: some small files, or some of a large JSON-lines one."""
        parts, room = [], 0
        for path, size in sizes.items():
            step = PART_BYTES if path.endswith(".jsonl") else max(size, 1)
            for begin in range(0, size, step):
                piece = [path, begin, min(begin + step, size)]
                if room < piece[2] - begin:
                    parts.append([])
                    room = PART_BYTES
                parts[-1].append(piece)
                room -= piece[2] - begin
        return parts

    def examples(self, part):
        tokens, _ = packing.tokenizer(self._options.tokenizer, self._options.end_of_text)
        documents = (tokens(text) for piece in part for text in self._read(*piece))
        for sequence, segments in packing.pack(documents, self._options.context):
            yield {"tokens": sequence, "segments": segments}

    def _read(self, path: str, begin: int, end: int) -> Iterator[str]:
        with tfrecord.opened(path) as file:
            if not path.endswith(".jsonl"):
                yield _utf8(file.read(), path)
                return
            # A line belongs to the part in which it begins.
            if begin:
                file.seek(begin - 1)
                file.readline()
            while file.tell() < end:
                place = f"the line at byte {file.tell()} of {path}"
                line = file.readline()
                if line.strip():
                    row = _json_line(_utf8(line, place), place)
                    if not isinstance(row.get(self._options.field), str):
                        raise UserError(
                            f"{place}: there is no text in the field {self._options.field!r}; it "
                            f"has {sorted(row)}. Name the right one with --field=NAME."
                        )
                    yield row[self._options.field]


class _TfRecord(_Ordered):
    def __init__(self, folder: str, options: Options):
        found = manifests.read(folder)
        self.features = _chosen(found.features, options.features)
        self.about = {k: v for k, v in found.about.items() if k != "conversions"}
        self._all, self._compression = found.features, found.compression
        self.parts = [
            [found.path(s), s.examples, s.crc32c] for s in found.shards(options.source_split)
        ]

    def examples(self, part):
        import tensorflow as tf

        from tftpu.input_pipelines.formats import example_proto

        parse = example_proto.parser(self._all)
        path, _, _ = part
        records_of_file = enumerate(tfrecord.records(path, self._compression))
        while batch := list(itertools.islice(records_of_file, 256)):
            names = tf.constant([f"record {number} of {path}" for number, _ in batch])
            examples = parse(tf.constant([record for _, (_, record) in batch]), names)
            columns = [examples[name].numpy() for name in self.features]
            for values in zip(*columns):
                yield dict(zip(self.features, values))


class _Tfds(_Ordered):
    def __init__(self, name: str, options: Options):
        from tftpu.input_pipelines.datasets import tfds

        builder = tfds.prepared(name, options.data_dir)
        tfds.count(builder, options.source_split)
        if str(builder.info.file_format) != "FileFormat.TFRECORD":
            raise UserError(f"{name} is prepared as {builder.info.file_format}, not as TFRecord.")
        self._name, self._data_dir = name, options.data_dir
        self.about, self.features = {}, {}
        for feature, kind in _chosen(dict(builder.info.features), options.features).items():
            self.features[feature] = _of_tfds(feature, kind)
            if feature == "label" and getattr(kind, "names", None):
                self.about["classes"] = list(kind.names)
        self.parts = [
            [str(file.filename), file.skip, file.take]
            for file in builder.info.splits[options.source_split].file_instructions
        ]

    def examples(self, part):
        import tensorflow as tf
        import tensorflow_datasets as tfds

        from tftpu.input_pipelines.datasets import tfds as tfds_source

        features = tfds_source.prepared(self._name, self._data_dir).info.features
        encoded = {
            name: tfds.decode.SkipDecoding()
            for name in self.features
            if isinstance(features[name], tfds.features.Image)
        }
        path, skip, take = part
        records = tf.data.TFRecordDataset(path).skip(skip).take(take)
        examples = records.map(lambda r: features.deserialize_example(r, decoders=encoded))
        for example in examples.as_numpy_iterator():
            yield {name: example[name] for name in self.features}


def _bigquery(what: str, options: Options) -> Source:
    from tftpu.input_pipelines.datasets import bigquery

    return bigquery.Table(what, options.features, options.snapshot)


def _of_tfds(name: str, kind) -> Feature:
    """The feature of a record for one of TFDS.

    Raises:
        UserError: records have no such thing.
    """
    import tensorflow_datasets as tfds

    if isinstance(kind, tfds.features.Image):
        return Feature("string", (), "image")
    if isinstance(kind, tfds.features.ClassLabel):
        return Feature("int64", (), num_classes=kind.num_classes)
    if isinstance(kind, tfds.features.Text):
        return Feature("string")
    if isinstance(kind, tfds.features.Tensor) and None not in kind.shape:
        dtype = np.dtype(kind.np_dtype).name
        dtype = _WIDER.get(dtype, dtype)
        if dtype in manifests.DTYPES:
            return Feature(dtype, tuple(kind.shape), "raw" if kind.shape else "list")
    raise UserError(
        f"The feature {name!r} ({kind}) has no static shape and dtype that a record holds: leave "
        "it out with --features=NAME,NAME of those that you want."
    )


def _chosen(features: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    for name in names:
        if name not in features:
            raise UserError(f"There is no feature {name!r}.{did_you_mean(name, features)}")
    return {name: features[name] for name in names or features}


def _image_features(classes: int) -> dict[str, Feature]:
    return {
        "image": Feature("string", (), "image"),
        "label": Feature("int32", (), num_classes=classes),
    }


def _chunks(rows: list) -> list:
    return [rows[i : i + PART_EXAMPLES] for i in range(0, len(rows), PART_EXAMPLES)]


def _tree(folder: str) -> dict[str, int]:
    """The sizes of all files below a folder, by their path from there, sorted."""
    if files.is_remote(folder):
        return {name: file.bytes for name, file in sorted(buckets.listing(folder).items())}
    sizes = {}
    for path, _, names in os.walk(folder):
        for name in names:
            whole = os.path.join(path, name)
            sizes[os.path.relpath(whole, folder).replace(os.sep, "/")] = os.path.getsize(whole)
    return dict(sorted(sizes.items()))


def _matching(pattern: str) -> dict[str, int]:
    """The sizes of the files that a pattern (*, ?, [...]) matches, by their path, sorted."""
    fixed = re.split(r"[*?\[]", pattern, maxsplit=1)[0]
    folder = os.path.dirname(fixed) or "."
    found = {f"{folder}/{name}": size for name, size in _tree(folder).items()}
    pattern = pattern if os.path.dirname(fixed) else f"./{pattern}"
    return {path: size for path, size in found.items() if fnmatch.fnmatchcase(path, pattern)}


def _read_images(part) -> Iterator[dict[str, Any]]:
    for path, label, _ in part:
        with tfrecord.opened(path) as file:
            data = file.read()
        if not data.startswith(_MAGIC):
            raise UserError(f"{path} is neither a JPEG nor a PNG.")
        yield {"image": data, "label": label}


def _json_line(line: str, place: str) -> dict:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise UserError(f"{place} is no JSON: {error}") from error
    if not isinstance(row, dict):
        raise UserError(f"{place} is no JSON object.")
    return row


def _utf8(data: bytes, place: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise UserError(f"{place} is not UTF-8: {error}") from error
