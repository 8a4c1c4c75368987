"""The manifest of a data set of TFRecord shards: `dataset.json`, beside the shards.

    FOLDER/dataset.json
    FOLDER/train-00000-of-01024.tfrecord ...

A folder, local or `gs://`, holds one data set. The manifest lists its splits, the shards of each
split in order (with size, checksum and number of examples), and the features of an example. A
record is a serialized `tf.train.Example`, and `Feature` says how its values become tensors
(`example_proto` encodes and parses records, `tfrecord` reads and writes files). The manifest is
written last, so a folder with a manifest is complete. Imports no TensorFlow, except to reach a
bucket.
"""

import dataclasses
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from tftpu.errors import UserError, did_you_mean, find_nearest
from tftpu.storage import files

NAME = "dataset.json"
FORMAT = "tftpu dataset 1"
INDEX_EVERY = 256  # a shard's index keeps the offset of every 256th record
ENCODINGS = ("list", "raw", "image")
DTYPES = ("uint8", "uint16", "int32", "int64", "float32", "string")
COMPRESSIONS = ("", "GZIP")
# The key under which a record keeps the name of the file that it was made from, for `verify`.
SOURCE = "source"
OTHER_FOLDER = "In a config: --config.data.data_dir=FOLDER."
OF_SPLITS = ("conversions", "skipped")  # keys of `about` whose values are dicts by split


@dataclasses.dataclass(frozen=True)
class Feature:
    """One feature of an example: its tensor, and how a record stores it.

    Args:
        dtype: the dtype of the tensor, one of `DTYPES`. Pipelines convert int64 and uint16 to int32
            before they hand a batch to a device.
        shape: the shape of one example's tensor; () is a scalar.
        encoding: "list": the elements in an int64, float or bytes list; "raw": one bytes value,
            the elements in C order, little-endian (fast: for tokens and arrays); "image": one
            bytes value, an image file, which the pipeline decodes (dtype "string", shape ()).
        num_classes: for a class id, which must be in [0, num_classes); 0: not a class id.
    """

    dtype: str
    shape: tuple[int, ...] = ()
    encoding: str = "list"
    num_classes: int = 0

    def validate(self, name: str) -> None:
        """Raises `UserError` for a feature that no record can hold."""
        for field, allowed in (("dtype", DTYPES), ("encoding", ENCODINGS)):
            value = getattr(self, field)
            if value not in allowed:
                value = str(value)
                raise UserError(
                    f"The feature {name!r} has the {field} {value!r}.{did_you_mean(value, allowed)}"
                )
        if any(type(size) is not int or not 0 <= size < 1 << 31 for size in self.shape):
            raise UserError(f"The feature {name!r} has the shape {self.shape}: it must be static.")
        if type(self.num_classes) is not int or not 0 <= self.num_classes < 1 << 31:
            raise UserError(
                f"The feature {name!r} has num_classes={self.num_classes}: give a whole number, "
                "or 0 if the values are not classes."
            )
        if self.encoding == "image" and (self.dtype, self.shape) != ("string", ()):
            raise UserError(
                f"The feature {name!r} is an image, so its dtype must be string and its shape ()."
            )
        if self.encoding == "raw" and self.dtype == "string":
            raise UserError(f"The feature {name!r} is a string, which cannot be raw: use 'list'.")


@dataclasses.dataclass(frozen=True)
class Shard:
    """One file of a split.

    Args:
        name: the path of the file relative to the manifest's folder, in or below which it is.
        examples: the number of its records.
        bytes: its size.
        crc32c: the CRC32C of the complete file, eight hexadecimal digits; "" if unknown.
        offsets: positions of records 0, n, 2n, ... in the file, with n = `INDEX_EVERY`, so that a
            run can resume inside a shard without reading it from the start; empty if compressed.
    """

    name: str
    examples: int
    bytes: int
    crc32c: str = ""
    offsets: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Manifest:
    """A data set: the features of an example, and the shards of each split in order.

    Args:
        folder: the folder of the data set; not part of the file.
        features: the features by name.
        splits: the splits by name, the shards in order.
        compression: "" or "GZIP", for all shards.
        about: further facts for readers, as JSON values, such as {"classes": [...], "tokenizer":
            ...}.
    """

    folder: str
    features: dict[str, Feature]
    splits: dict[str, tuple[Shard, ...]]
    compression: str = ""
    about: dict[str, Any] = dataclasses.field(default_factory=dict)

    def build_path(self, shard: Shard) -> str:
        """Returns the path of a shard."""
        return files.join(self.folder, shard.name)

    def list_shards(self, split: str) -> tuple[Shard, ...]:
        """Returns the shards of a split.

        Raises:
            UserError: there is no such split, or it has no examples.
        """
        if split not in self.splits:
            near = find_nearest(split, self.splits) or "NAME"
            raise UserError(
                f"The data set in {self.folder} has no split {split!r}."
                f"{did_you_mean(split, self.splits)} In a config, set the field that names it: "
                f"--config.data.eval_split={near} or --config.data.train_split={near}."
            )
        if not self.count_examples(split):
            raise UserError(f"The split {split!r} of the data set in {self.folder} is empty.")
        return self.splits[split]

    def count_examples(self, split: str) -> int:
        """Returns the number of examples in a split."""
        return sum(shard.examples for shard in self.splits[split])


_FEATURE = re.compile(  # a name may hold any character, for example image/class/label
    r"(.*\S)\s*:\s*(\w+)\s*(?:\[([\d,\s]*)\])?\s*(raw|list)?\s*(?:num_classes=(\d+))?"
)


def parse_features(spec: Iterable[str]) -> dict[str, Feature]:
    """Parses lines such as "x: float32[28,28]" to features by name.

    Args:
        spec: a line for each feature: NAME: DTYPE[SIZE,SIZE], followed by `raw` or `num_classes=N`
            if they apply. The dtype may also be `image`.

    Raises:
        UserError: a line does not follow this syntax, or a dtype or shape is not valid.
    """
    features = {}
    for line in spec:
        match = _FEATURE.fullmatch(line.strip())
        if not match:
            raise UserError(
                f"The feature {line!r} cannot be read: write NAME: DTYPE[SIZE,SIZE], followed by "
                "raw or num_classes=N if they apply. An example is 'y: int64 num_classes=10'."
            )
        name, dtype, shape, more, classes = match.groups()
        features[name] = Feature(
            "string" if dtype == "image" else dtype,
            tuple(int(size) for size in shape.split(",") if size.strip()) if shape else (),
            "image" if dtype == "image" else more or "list",
            int(classes or 0),
        )
        features[name].validate(name)
    return features


def describe_features(features: Mapping[str, Feature]) -> str:
    """Returns features as one line, each quoted and in the syntax that `parse_features` reads."""
    lines = []
    for name, feature in features.items():
        size = f"[{','.join(map(str, feature.shape))}]" if feature.shape else ""
        raw = " raw" if feature.encoding == "raw" else ""
        classes = f" num_classes={feature.num_classes}" if feature.num_classes else ""
        dtype = "image" if feature.encoding == "image" else feature.dtype
        lines.append(f"{name}: {dtype}{size}{raw}{classes}")
    return ", ".join(map(repr, lines))


def write(manifest: Manifest) -> None:
    """Writes `dataset.json` into the manifest's folder, atomically. Call it after the shards.

    Raises:
        UserError: a value in the manifest is not valid, or a shard is outside of its folder.
    """
    _validate(manifest, files.join(manifest.folder, NAME))
    files.write_whole(files.join(manifest.folder, NAME), to_json(manifest).encode())


def read(folder: str) -> Manifest:
    """Reads the manifest of a folder.

    Raises:
        UserError: there is no manifest, or it is not valid.
    """
    path = files.join(folder, NAME)
    try:
        text = files.read(path).decode()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise UserError(
            f"There is no data set in {folder}: {path} is missing. tftpu writes it last, after "
            "all shards. To read TFRecord files of other programs, use Records, or "
            f"StreamedImages if they hold images. {OTHER_FOLDER}"
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read as a manifest: {error}") from error
    return from_json(text, folder)


def to_json(manifest: Manifest) -> str:
    """Returns the text of `dataset.json`, one shard per line; equal data sets give equal text."""
    head = {
        "format": FORMAT,
        "compression": manifest.compression,
        "features": {
            name: dataclasses.asdict(feature) for name, feature in manifest.features.items()
        },
        "about": manifest.about,
    }
    splits = ",\n".join(
        f"{json.dumps(name)}: [\n"
        + ",\n".join(json.dumps(dataclasses.asdict(s)) for s in shards)
        + "]"
        for name, shards in manifest.splits.items()
    )
    return json.dumps(head, indent=1)[:-2] + ',\n "splits": {\n' + splits + "}\n}\n"


def from_json(text: str, folder: str) -> Manifest:
    """Parses the text that `to_json` writes.

    Raises:
        UserError: the text is not a manifest, has another version, or a value is not valid.
    """
    path = files.join(folder, NAME)
    try:
        value = json.loads(text)
        if value["format"] != FORMAT:
            raise UserError(f"{path} has the format {value['format']!r}: expected {FORMAT!r}.")
        features = {
            name: Feature(**{**feature, "shape": tuple(feature["shape"])})
            for name, feature in value["features"].items()
        }
        splits = {
            name: tuple(Shard(**{**shard, "offsets": tuple(shard["offsets"])}) for shard in shards)
            for name, shards in value["splits"].items()
        }
        manifest = Manifest(folder, features, splits, value["compression"], value["about"])
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise UserError(
            f"{path} cannot be read as a manifest: {type(error).__name__} {error}"
        ) from error
    _validate(manifest, path)
    return manifest


def _validate(manifest: Manifest, path: str) -> None:
    for name, feature in manifest.features.items():
        feature.validate(name)
    if manifest.compression not in COMPRESSIONS:
        raise UserError(
            f"{path}: the compression {manifest.compression!r} is unknown."
            f"{did_you_mean(str(manifest.compression), COMPRESSIONS)}"
        )
    about = manifest.about
    if not isinstance(about, dict) or not isinstance(about.get("conversions", {}), dict):
        raise UserError(f"{path}: 'about' or its 'conversions' is not a JSON object.")
    for shard in (shard for shards in manifest.splits.values() for shard in shards):
        _validate_shard(shard, path)


def _validate_shard(shard: Shard, path: str) -> None:
    if not isinstance(shard.name, str) or not files.is_inside(shard.name):
        raise UserError(
            f"{path} names the shard {shard.name!r}, which is not in the manifest's folder: a "
            "shard must be in that folder."
        )
    sizes = (shard.examples, shard.bytes, *shard.offsets)
    if not all(type(size) is int and 0 <= size < 1 << 63 for size in sizes):
        raise UserError(
            f"{path}: the examples, bytes and offsets of {shard.name} are not whole numbers."
        )
    if not isinstance(shard.crc32c, str) or not re.fullmatch(r"([0-9a-f]{8})?", shard.crc32c):
        raise UserError(
            f"{path}: the checksum of {shard.name} is {shard.crc32c!r}: expected 8 hex digits."
        )
    expected = -(-shard.examples // INDEX_EVERY)
    if shard.offsets and len(shard.offsets) != expected:
        raise UserError(
            f"{path}: {shard.name} has {shard.examples} examples, but {len(shard.offsets)} "
            f"offsets: there must be {expected}, one for every {INDEX_EVERY} records."
        )
    if shard.offsets and not all(a < b for a, b in zip((-1, *shard.offsets), shard.offsets)):
        raise UserError(f"{path}: the offsets of {shard.name} do not increase.")
