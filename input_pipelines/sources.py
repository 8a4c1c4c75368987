"""The data sets that a config can name, and their fields. No TensorFlow here."""

import dataclasses
import re

from tftpu.config import Data
from tftpu.errors import UserError, did_you_mean
from tftpu.input_pipelines.formats.manifest import COMPRESSIONS, Feature


@dataclasses.dataclass
class Augment:
    """What is done to training images, and how evaluation cuts them; see `augment.py`."""

    crop: bool = True  # a random part, resized; False: the same part as in evaluation
    min_area: float = 0.08  # of a random crop, as a share of the image's area
    max_aspect: float = 4 / 3  # of a random crop, its longer side over its shorter one
    flip: bool = True  # left and right, for half of the images
    randaugment: int = 0  # operations in a row; 2 is usual
    magnitude: float = 9.0  # of RandAugment, from 0 to 30
    jitter: float = 0.0  # brightness, contrast and saturation times 1 - jitter to 1 + jitter
    hue: float = 0.0  # turned by up to so much of the circle, to 0.5
    erasing: float = 0.0  # probability that a rectangle is filled with noise
    mixup: float = 0.0  # alpha of its Beta distribution; 0: no MixUp
    cutmix: float = 0.0  # the same; with both, each image draws one of them
    eval_crop: float = 0.875  # side of the central square over the image's shorter side

    def validate(self) -> None:
        """Raises `UserError` for a value that makes no sense."""
        for field, low, high in (
            ("min_area", 1e-4, 1.0),
            ("max_aspect", 1.0, 100.0),
            ("randaugment", 0, 14),
            ("magnitude", 0.0, 30.0),
            ("jitter", 0.0, 10.0),
            ("hue", 0.0, 0.5),
            ("erasing", 0.0, 1.0),
            ("mixup", 0.0, 100.0),
            ("cutmix", 0.0, 100.0),
            ("eval_crop", 0.01, 1.0),
        ):
            value = getattr(self, field)
            if not low <= value <= high:
                raise UserError(
                    f"data.augment.{field} is {value}: it must lie between {low} and {high}."
                )


@dataclasses.dataclass
class Images(Data):
    """A TFDS data set of images with a class each."""

    image_size: int = 224
    channels: int = 3
    train_split: str = "train"
    eval_split: str = "test"
    shift: int = 0  # augmentation: moves the image by up to so many pixels, zeros come in

    def validate(self) -> None:
        super().validate()
        for field in ("image_size", "channels"):
            if getattr(self, field) < 1:
                raise UserError(f"data.{field} is {getattr(self, field)}: it must be 1 or more.")
        if self.shift < 0:
            raise UserError(f"data.shift is {self.shift}: it must be 0 or more.")


@dataclasses.dataclass
class Text(Data):
    """A TFDS data set of documents, read as bytes and cut into windows."""

    context: int = 128  # bytes of a window
    train_split: str = "train"
    eval_split: str = "test"

    def validate(self) -> None:
        super().validate()
        if self.context < 1:
            raise UserError(f"data.context is {self.context}: it must be 1 or more.")


FORMATS = ("tfds", "tfrecord", "folder", "index")
IMAGE_DTYPES = ("float32", "bfloat16", "uint8")
ON_BAD_RECORD = ("raise", "skip")


@dataclasses.dataclass
class Streamed(Data):
    """What every data set that is read while it trains has in common; see `pipeline.py`."""

    shuffle: int = 16_384  # examples that are in memory to be shuffled; files shuffle whole
    on_bad_record: str = "raise"  # skip: a record that cannot be used gets the weight 0
    max_bad_records: int = 100  # a run that skips more of them stops
    service: str = ""  # grpc://HOST:PORT,...: machines that prepare the data; see `service.py`
    cache_dir: str = ""  # local: shards of a bucket are kept there once they were read
    cache_gb: float = 100.0  # GiB that may lie there

    def validate(self) -> None:
        super().validate()
        for field in ("shuffle", "max_bad_records"):
            if getattr(self, field) < 1:
                raise UserError(f"data.{field} is {getattr(self, field)}: it must be 1 or more.")
        _one_of("data.on_bad_record", self.on_bad_record, ON_BAD_RECORD)
        if self.cache_gb <= 0:
            raise UserError(f"data.cache_gb is {self.cache_gb}: it must be above 0.")
        if self.cache_dir and self.service:
            raise UserError(
                "data.cache_dir is of the machine that trains, and data.service reads the data on "
                "others: use one of the two."
            )
        if self.service and not all(
            re.fullmatch(r"grpc://[^/,\s]+:\d+", address) for address in self.service.split(",")
        ):
            raise UserError(
                f"data.service is {self.service!r}: give addresses as grpc://HOST:PORT, with "
                "commas between them."
            )
        if self.service and self.on_bad_record == "skip":
            raise UserError(
                "data.on_bad_record=skip counts in the process that trains, and data.service "
                "prepares the data in others: use one of the two."
            )


@dataclasses.dataclass
class StreamedImages(Streamed):
    """Images with a class each, too many for memory: read, decoded and augmented while training.

    By format, `data_dir` is: of "tfds", where TFDS prepared the data set `name`; of "tfrecord", a
    folder with a `dataset.json`; of "folder", one with a folder for each split, and in it one for
    each class; of "index", one with a file SPLIT.csv or SPLIT.jsonl for each split, with the
    columns image (a path from there) and label.
    """

    format: str = "tfds"
    image_size: int = 224
    channels: int = 3
    num_classes: int = 1000
    train_split: str = "train"
    eval_split: str = "validation"
    augment: Augment = dataclasses.field(default_factory=Augment)
    space_to_depth: bool = False
    image_dtype: str = "float32"  # of what the model is given; uint8: pixels from 0 to 255
    download: bool = False  # of "tfds": whether TFDS may fetch and prepare what is not there

    def validate(self) -> None:
        super().validate()
        _one_of("data.format", self.format, FORMATS)
        _one_of("data.image_dtype", self.image_dtype, IMAGE_DTYPES)
        self.augment.validate()
        for field in ("image_size", "classes"):
            if getattr(self, field) < 1:
                raise UserError(f"data.{field} is {getattr(self, field)}: it must be 1 or more.")
        if self.channels not in (1, 3):
            raise UserError(f"data.channels is {self.channels}: it must be 1 or 3.")
        if self.space_to_depth and self.image_size % 2:
            raise UserError(
                f"data.image_size is {self.image_size}: space_to_depth needs an even number."
            )
        if self.format == "tfds" and not self.name:
            raise UserError("data.name is empty: give the name of a TFDS data set, as imagenet2012")
        if self.format != "tfds" and not self.data_dir:
            raise UserError(f"data.data_dir is empty: data.format={self.format} needs a folder.")
        if self.format != "tfrecord" and self.cache_dir:
            raise UserError("data.cache_dir is for data.format=tfrecord only.")
        if self.format != "tfds" and self.download:
            raise UserError("data.download is for data.format=tfds only.")


@dataclasses.dataclass
class Tokens(Streamed):
    """Text for a language model: documents as tokens, packed into rows of a fixed length.

    Either `data_dir` is a folder of packed shards, as `tftpu data convert --source=text:...` makes
    it; or `train_text` and `eval_text` are patterns of text files, or of JSON lines (.jsonl), which
    are tokenised and packed once, into the cache folder. Attention and loss do not cross documents:
    the features are {"tokens", "segments", "positions"}.
    """

    context: int = 1024  # tokens that the model reads at once
    train_split: str = "train"
    eval_split: str = "test"
    train_text: str = ""
    eval_text: str = ""
    tokenizer: str | None = None  # a tokenizer.json of Hugging Face; None: the bytes of the text
    end_of_text: str | None = None  # a token of it, put after every document
    field: str = "text"  # of JSON lines, what holds the text

    def validate(self) -> None:
        super().validate()
        if self.context < 1:
            raise UserError(f"data.context is {self.context}: it must be 1 or more.")
        if bool(self.data_dir) == bool(self.train_text):
            raise UserError(
                "Give data.data_dir, a folder of packed shards, or data.train_text, a pattern of "
                "text files: one of the two."
            )
        if self.train_text and not self.eval_text:
            raise UserError("data.eval_text is empty: give a pattern of text files to evaluate on.")


@dataclasses.dataclass
class Records(Streamed):
    """TFRecord shards of `tf.train.Example`, with any features of static shape.

    Args:
        data_dir: a folder with a `dataset.json`; or one with TFRecord files named SPLIT*, if
            `spec` says what is in them.
        spec: a feature each, as "image: image", "x: float32[28,28]", "y: int64 num_classes=10",
            "tokens: uint16[1025] raw"; see `manifest.Feature`.
        features: names of what the model takes: one, or several, which it is then given by name.
        label, weight: names of the label and of the weight of an example; "": none.
        compression: "" or "GZIP", of files without a `dataset.json`.
    """

    spec: tuple[str, ...] = ()
    features: tuple[str, ...] = ("x",)
    label: str = "y"
    weight: str = ""
    compression: str = ""
    train_split: str = "train"
    eval_split: str = "test"

    def validate(self) -> None:
        super().validate()
        if not self.data_dir:
            raise UserError("data.data_dir is empty: give the folder of the TFRecord shards.")
        if not self.features:
            raise UserError("data.features is empty: name what the model takes.")
        _one_of("data.compression", self.compression, COMPRESSIONS)
        spec = features_of(self.spec)
        for name in (*self.features, self.label, self.weight) if spec else ():
            if name and name not in spec:
                raise UserError(f"data.spec has no feature {name!r}.{did_you_mean(name, spec)}")


@dataclasses.dataclass
class Synthetic(Data):
    """Random numbers of any shape, the same for the same seed: to time a step, to try a model.

    Args:
        spec: a feature each, as of `Records`: floats are normal, integers are below `classes`.
        features, label: as of `Records`.
        examples: of an epoch.
    """

    spec: tuple[str, ...] = ("x: float32[224,224,3]", "y: int32 num_classes=1000")
    features: tuple[str, ...] = ("x",)
    label: str = "y"
    examples: int = 1024

    def validate(self) -> None:
        super().validate()
        if self.examples < 1:
            raise UserError(f"data.examples is {self.examples}: it must be 1 or more.")
        spec = features_of(self.spec)
        for name in (*self.features, self.label):
            if name not in spec:
                raise UserError(f"data.spec has no feature {name!r}.{did_you_mean(name, spec)}")
        for name, feature in spec.items():
            if feature.dtype == "string":
                raise UserError(f"data.spec: {name!r} is a string, which no device takes.")
            if feature.dtype != "float32" and not feature.num_classes:
                raise UserError(
                    f"data.spec: {name!r} needs num_classes=N, the numbers to draw from."
                )


@dataclasses.dataclass
class BigQuery(Data):
    """Rows of BigQuery that fit into memory; `bigquery.py` says what is exact.

    Args:
        train_table, eval_table: `project.dataset.table`, or a query, `SELECT ...`.
        features: columns that the model takes: one, or several, which it is then given by name.
        label: column of the label; "": none.
        snapshot: the time whose rows are read, as 2026-11-20T12:00:00Z; None: the last change.
    """

    train_table: str = ""
    eval_table: str = ""
    features: tuple[str, ...] = ("x",)
    label: str = "y"
    snapshot: str | None = None

    def validate(self) -> None:
        super().validate()
        for field in ("train_table", "eval_table", "features"):
            if not getattr(self, field):
                raise UserError(f"data.{field} is empty: name a table or columns of BigQuery.")


def features_of(spec: tuple[str, ...]) -> dict[str, Feature]:
    """The features that lines as "x: float32[28,28]" tell.

    Raises:
        UserError: a line that cannot be understood.
    """
    features = {}
    for line in spec:
        match = _FEATURE.fullmatch(line.strip())
        if not match:
            raise UserError(
                f"The feature {line!r} cannot be read: write NAME: DTYPE[SIZE,SIZE], and after it "
                "raw or num_classes=N where they apply, as 'y: int64 num_classes=10'."
            )
        name, dtype, shape, more, classes = match.groups()
        encoding = "image" if dtype == "image" else more or "list"
        features[name] = Feature(
            "string" if dtype == "image" else dtype,
            tuple(int(size) for size in shape.split(",") if size.strip()) if shape else (),
            encoding,
            int(classes or 0),
        )
        features[name].validate(name)
    return features


_FEATURE = re.compile(
    r"(\w+)\s*:\s*(\w+)\s*(?:\[([\d,\s]*)\])?\s*(raw|list)?\s*(?:num_classes=(\d+))?"
)


def _one_of(field: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise UserError(f"{field} is {value!r}, which is not known.{did_you_mean(value, allowed)}")
