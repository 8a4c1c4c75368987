"""The manifest of a data set of TFRecord shards: `dataset.json`, written last, beside them.

    FOLDER/dataset.json
    FOLDER/train-00000-of-01024.tfrecord ...

A folder, local or `gs://`, holds one data set: its splits, the shards of each in their order with
size, checksum and number of examples, and what an example is made of. A record is a serialised
`tf.train.Example`; `Feature` says how its values become tensors (`records.py` reads and writes
them, `tfrecord.py` the files). Nothing here imports TensorFlow, but to reach a bucket.

Where an augmentation plugs in: an image source hands to a function

    (example, seed) -> example      for training; seed (2,), int32, random, a function of the run's
                                    seed, the epoch and the example alone
    example -> example              for evaluation

an example as `{"image": ..., "label": int32 ()}`, the image encoded (a scalar string: JPEG, PNG)
or decoded (height, width, channels), uint8; it returns the same keys with an image of static shape
and a device dtype. A function of a whole batch (MixUp, CutMix) follows the batching:

    (batch, seeds) -> batch         seeds (batch, 2), int32, those of its examples

Hosts hold consecutive parts of a global batch, of any even size. So that their number changes
nothing, such a function mixes example j with its neighbour j XOR 1 alone, and takes what the pair
has in common (as the box of CutMix) from the seed of the even one.
"""

import dataclasses
import json
from typing import Any

from tftpu.errors import UserError, did_you_mean
from tftpu.storage import files

NAME = "dataset.json"
FORMAT = "tftpu dataset 1"
INDEX_EVERY = 256  # records between two offsets that a shard's index keeps
ENCODINGS = ("list", "raw", "image")
DTYPES = ("uint8", "uint16", "int32", "int64", "float32", "string")
COMPRESSIONS = ("", "GZIP")


@dataclasses.dataclass(frozen=True)
class Feature:
    """One feature of an example: the tensor that it becomes, and how a record holds it.

    Args:
        dtype: of the tensor, one of `DTYPES`. On the way to a device int64 becomes int32 and
            uint16 becomes int32.
        shape: of one example's tensor; () is a scalar.
        encoding: "list": the elements in an int64, float or bytes list; "raw": one bytes value,
            the elements in C order, little-endian (fast: for tokens and arrays); "image": one
            bytes value, a JPEG or PNG, which the pipeline decodes (dtype "string", shape ()).
        classes: of a class id: it must lie in [0, classes). 0: not a class id.
    """

    dtype: str
    shape: tuple[int, ...] = ()
    encoding: str = "list"
    num_classes: int = 0

    def validate(self, name: str) -> None:
        """Raises `UserError` for what no record can hold."""
        for field, allowed in (("dtype", DTYPES), ("encoding", ENCODINGS)):
            value = getattr(self, field)
            if value not in allowed:
                raise UserError(
                    f"The feature {name!r} has the {field} {value!r}.{did_you_mean(value, allowed)}"
                )
        if any(not isinstance(size, int) or size < 0 for size in self.shape):
            raise UserError(f"The feature {name!r} has the shape {self.shape}: it must be static.")
        if self.encoding == "image" and (self.dtype, self.shape) != ("string", ()):
            raise UserError(f"The feature {name!r} is an image: its dtype is string, its shape ().")
        if self.encoding == "raw" and self.dtype == "string":
            raise UserError(f"The feature {name!r} is a string, which has no raw form: use 'list'.")


@dataclasses.dataclass(frozen=True)
class Shard:
    """One file of a split.

    Args:
        name: of the file, relative to the manifest's folder; or a whole path.
        examples: records that it holds.
        bytes: its size.
        crc32c: of the whole file, eight hexadecimal digits; "" where it is not known.
        offsets: where records 0, n, 2n, ... begin, n being `INDEX_EVERY`, so that a run goes on
            inside a shard without reading what lies before; empty for a compressed one.
    """

    name: str
    examples: int
    bytes: int
    crc32c: str = ""
    offsets: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Manifest:
    """A data set: `splits` by name, each its shards in order, and the features of an example.

    Args:
        folder: where it lies; not written.
        features: by name.
        splits: by name, the shards in their order.
        compression: "" or "GZIP", of every shard.
        about: what else a reader wants to know, as {"classes": [...], "tokenizer": ...}; JSON.
    """

    folder: str
    features: dict[str, Feature]
    splits: dict[str, tuple[Shard, ...]]
    compression: str = ""
    about: dict[str, Any] = dataclasses.field(default_factory=dict)

    def path(self, shard: Shard) -> str:
        """Where a shard lies."""
        return files.join(self.folder, shard.name)

    def shards(self, split: str) -> tuple[Shard, ...]:
        """The shards of a split.

        Raises:
            UserError: there is no such split, or it holds no example.
        """
        if split not in self.splits:
            raise UserError(
                f"The data set in {self.folder} has no split {split!r}."
                f"{did_you_mean(split, self.splits)}"
            )
        if not self.examples(split):
            raise UserError(f"The split {split!r} of the data set in {self.folder} is empty.")
        return self.splits[split]

    def examples(self, split: str) -> int:
        """Examples of a split."""
        return sum(shard.examples for shard in self.splits[split])


def write(manifest: Manifest) -> None:
    """Writes `dataset.json` into the manifest's folder, whole or not at all: do it last."""
    files.write_whole(files.join(manifest.folder, NAME), to_json(manifest).encode())


def read(folder: str) -> Manifest:
    """The manifest of a folder.

    Raises:
        UserError: there is none, or it cannot be understood.
    """
    path = files.join(folder, NAME)
    try:
        text = files.read(path).decode()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise UserError(
            f"There is no data set in {folder}: {path} is missing. It is written last, when every "
            "shard is there. For TFRecord files without one give their pattern and features."
        ) from error
    return from_json(text, folder)


def to_json(manifest: Manifest) -> str:
    """The text of `dataset.json`: a shard a line, equal for equal data sets."""
    head = {
        "format": FORMAT,
        "compression": manifest.compression,
        "features": {
            name: dataclasses.asdict(feature) for name, feature in manifest.features.items()
        },
        "about": manifest.about,
    }
    splits = ",\n".join(
        f'"{name}": [\n' + ",\n".join(json.dumps(dataclasses.asdict(s)) for s in shards) + "]"
        for name, shards in manifest.splits.items()
    )
    return json.dumps(head, indent=1)[:-2] + ',\n "splits": {\n' + splits + "}\n}\n"


def from_json(text: str, folder: str) -> Manifest:
    """The manifest that `to_json` wrote.

    Raises:
        UserError: not a manifest, one of another version, or one that contradicts itself.
    """
    path = files.join(folder, NAME)
    try:
        value = json.loads(text)
        if value["format"] != FORMAT:
            raise UserError(f"{path} is of the format {value['format']!r}: this is {FORMAT!r}.")
        features = {
            name: Feature(**{**feature, "shape": tuple(feature["shape"])})
            for name, feature in value["features"].items()
        }
        splits = {
            name: tuple(Shard(**{**shard, "offsets": tuple(shard["offsets"])}) for shard in shards)
            for name, shards in value["splits"].items()
        }
        manifest = Manifest(folder, features, splits, value["compression"], value["about"])
    except (ValueError, TypeError, KeyError) as error:
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
            f"{path}: the compression {manifest.compression!r} is not known."
            f"{did_you_mean(manifest.compression, COMPRESSIONS)}"
        )
    for shard in (shard for shards in manifest.splits.values() for shard in shards):
        expected = -(-shard.examples // INDEX_EVERY)
        if shard.offsets and len(shard.offsets) != expected:
            raise UserError(
                f"{path}: {shard.name} has {shard.examples} examples and {len(shard.offsets)} "
                f"offsets: it should have {expected}, one for every {INDEX_EVERY} records."
            )
