"""The data sets that a config can name, and their options.

Each class derives from `tftpu.DataConfig`, as a user's own data sets do: it describes a data set
and calls the functions that read it. Their modules are imported on the first call, so a config
loads without TensorFlow.
"""

import dataclasses
from typing import TYPE_CHECKING, ClassVar

from tftpu.config import OPERATIONAL, DataConfig, DataContext
from tftpu.config.data import ExportInputs
from tftpu.errors import UserError, did_you_mean
from tftpu.input_pipelines.augment.settings import Augment
from tftpu.input_pipelines.formats import text_files
from tftpu.input_pipelines.formats.manifest import COMPRESSIONS, parse_features
from tftpu.input_pipelines.reading.streamed import Streamed, check_one_of
from tftpu.input_pipelines.tables import BigQuery
from tftpu.input_pipelines.texts import Texts

if TYPE_CHECKING:
    import tensorflow as tf

    from tftpu.input_pipelines.pipeline import Pipeline
    from tftpu.input_pipelines.reading.epochs import ArrayPipeline
    from tftpu.input_pipelines.tensors import Spec
    from tftpu.input_pipelines.unlabelled import UnlabelledRecords

__all__ = [
    "Augment",
    "BigQuery",
    "Images",
    "Records",
    "Streamed",
    "StreamedImages",
    "Synthetic",
    "Text",
    "Texts",
    "Tokens",
]

FORMATS = ("tfds", "tfrecord", "folder", "index")
IMAGE_DTYPES = ("float32", "bfloat16", "uint8")


@dataclasses.dataclass
class Images(DataConfig):
    """A TFDS data set of images with one class each, held in memory."""

    image_size: int = 224
    channels: int = 3
    train_split: str = "train"
    eval_split: str = "test"
    # Augmentation: largest random shift of an image, in pixels; the gap is filled with zeros.
    shift: int = 0
    address_kinds: ClassVar = ("images",)

    def validate(self) -> None:
        super().validate()
        for field in ("image_size", "channels"):
            if getattr(self, field) < 1:
                raise UserError(f"data.{field} is {getattr(self, field)}: it must be 1 or more.")
        if self.shift < 0:
            raise UserError(f"data.shift is {self.shift}: it must be 0 or more.")

    def training(self, context: DataContext) -> "ArrayPipeline":
        from tftpu.input_pipelines.datasets import images

        return images.build_training(self, context)

    def evaluation(self, context: DataContext) -> "tf.data.Dataset":
        from tftpu.input_pipelines.datasets import images

        return images.build_evaluation(self, context)

    def prediction(self, address: str, context: DataContext) -> "UnlabelledRecords":
        from tftpu.input_pipelines.datasets import images

        return images.build_prediction(self, address, context)

    def batch_spec(self, examples: int) -> "Spec":
        from tftpu.input_pipelines.datasets import images

        return images.batch_spec(self, examples)

    def export_inputs(self) -> ExportInputs:
        from tftpu.input_pipelines.datasets import images

        return images.export_inputs(self)

    def class_names(self) -> list[str] | None:
        from tftpu.input_pipelines.datasets import images

        return images.read_class_names(self)


@dataclasses.dataclass
class Text(DataConfig):
    """A TFDS data set of documents, read as bytes, cut into windows and held in memory."""

    context: int = 128  # bytes in a window
    train_split: str = "train"
    eval_split: str = "test"
    per_token: ClassVar[bool] = True

    @property
    def weighted(self) -> bool:
        return True

    def validate(self) -> None:
        super().validate()
        if self.context < 1:
            raise UserError(f"data.context is {self.context}: it must be 1 or more.")

    def training(self, context: DataContext) -> "ArrayPipeline":
        from tftpu.input_pipelines.datasets import text

        return text.build_training(self, context)

    def evaluation(self, context: DataContext) -> "tf.data.Dataset":
        from tftpu.input_pipelines.datasets import text

        return text.build_evaluation(self, context)

    def batch_spec(self, examples: int) -> "Spec":
        from tftpu.input_pipelines.datasets import text

        return text.batch_spec(self, examples)


@dataclasses.dataclass
class StreamedImages(Streamed):
    """Images with one class each, which are read, decoded and augmented during training.

    `data_dir` depends on the format:

    - "tfds": the folder where TFDS prepared the data set `name`.
    - "tfrecord": a folder with a `dataset.json`; or TFRecord files of any program, named SPLIT* or
      in a folder SPLIT, whose records hold an image file and its label.
    - "folder": a folder with a subfolder for each split, which has a subfolder for each class. If
      the subfolders are classes, one image in five is held out of each and evaluated.
    - "index": a folder with a table for each split, SPLIT.csv (or .tsv, .jsonl, .ndjson, .json),
      with the columns image (a path relative to the folder) and label.
    """

    format: str = "tfds"
    image_size: int = 224
    channels: int = 3
    num_classes: int = 1000
    train_split: str = "train"
    eval_split: str = "validation"
    # Names of the classes by id, for formats other than tfds; tfrecord with text labels needs them.
    classes: tuple[str, ...] = ()
    # Formats tfds and tfrecord: the image feature's name, for example image/encoded.
    image_feature: str = "image"
    # Formats tfds and tfrecord: the label feature's name, for example image/class/label.
    label_feature: str = "label"
    # Format tfrecord: the lowest class id in the files, for example 1; training maps it to 0.
    first_class: int = 0
    augment: Augment = dataclasses.field(default_factory=Augment)
    space_to_depth: bool = False
    image_dtype: str = "float32"  # dtype of the model's input; uint8 keeps pixels from 0 to 255
    # Format tfds: whether TFDS may download and prepare missing data.
    download: bool = dataclasses.field(default=False, metadata=OPERATIONAL)
    address_kinds: ClassVar = ("images", "tfrecord")

    def validate(self) -> None:
        super().validate()
        check_one_of("data.format", self.format, FORMATS)
        check_one_of("data.image_dtype", self.image_dtype, IMAGE_DTYPES)
        self.augment.validate()
        for field in ("image_size", "num_classes"):
            if getattr(self, field) < 1:
                raise UserError(f"data.{field} is {getattr(self, field)}: it must be 1 or more.")
        if self.channels not in (1, 3):
            raise UserError(f"data.channels is {self.channels}: it must be 1 or 3.")
        if self.first_class < 0:
            raise UserError(f"data.first_class is {self.first_class}: it must be 0 or more.")
        if self.classes and not len({*self.classes}) == len(self.classes) == self.num_classes:
            raise UserError(
                f"data.classes has {len(self.classes)} names, {len(set(self.classes))} of them "
                f"different, but data.num_classes is {self.num_classes}: list a name for each "
                "class."
            )
        if self.space_to_depth and self.image_size % 2:
            raise UserError(
                f"data.image_size is {self.image_size}: space_to_depth needs an even number."
            )
        if self.format == "tfds" and not self.name:
            raise UserError(
                "data.name is empty: give the name of a TFDS data set, such as imagenet2012."
            )
        if self.format != "tfds" and not self.data_dir:
            raise UserError(f"data.data_dir is empty: data.format={self.format} needs a folder.")
        if self.format != "tfrecord" and self.cache_dir:
            raise UserError("data.cache_dir works only with data.format=tfrecord.")
        if self.format != "tfrecord" and self.first_class:
            raise UserError("data.first_class works only with data.format=tfrecord.")
        if self.format == "tfds" and self.classes:
            raise UserError(
                "data.classes does not work with data.format=tfds, which knows its classes: "
                "leave it out."
            )
        if self.format != "tfds" and self.download:
            raise UserError("data.download works only with data.format=tfds.")

    def training(self, context: DataContext) -> "Pipeline":
        from tftpu.input_pipelines.datasets import streamed_images

        return streamed_images.build_training(self, context)

    def evaluation(self, context: DataContext) -> "tf.data.Dataset":
        from tftpu.input_pipelines.datasets import streamed_images

        return streamed_images.build_evaluation(self, context)

    def prediction(self, address: str, context: DataContext) -> "UnlabelledRecords":
        from tftpu.input_pipelines.datasets import streamed_images

        return streamed_images.build_prediction(self, address, context)

    def batch_spec(self, examples: int) -> "Spec":
        from tftpu.input_pipelines.datasets import streamed_images

        return streamed_images.batch_spec(self, examples)

    def export_inputs(self) -> ExportInputs:
        from tftpu.input_pipelines.datasets import streamed_images

        return streamed_images.export_inputs(self)

    def class_names(self) -> list[str] | None:
        from tftpu.input_pipelines.datasets import streamed_images

        return streamed_images.read_class_names(self)


@dataclasses.dataclass
class Tokens(Streamed):
    """Text for a language model: documents as tokens, packed into rows of a fixed length.

    Either `data_dir` is a folder of packed shards, written by `tftpu data convert
    --source=text:...`; or `train_text` and `eval_text` are patterns of text files or tables, which
    are tokenized and packed once, into the cache folder (see `formats.text_files`). Without
    `eval_text`, 5 % of the rows, at most 1,000, are held out of `train_text` and evaluated.
    Attention and loss do not cross documents: the features are {"tokens", "segments", "positions"}.
    """

    context: int = 1024  # tokens in a row
    train_split: str = "train"
    eval_split: str = "test"
    # Patterns of files, such as texts/*.txt, with commas between them; in Python also a list.
    train_text: str = ""
    eval_text: str = ""  # patterns to evaluate on; empty: some rows of `train_text` are held out
    # A Hugging Face tokenizer.json; None: the tokens are the bytes of the text.
    tokenizer: str | None = None
    end_of_text: str | None = None  # a token of the tokenizer, put after every document
    field: str = "text"  # the field or column of a table that holds the text
    per_token: ClassVar[bool] = True

    def __post_init__(self):
        for name in ("train_text", "eval_text"):
            setattr(self, name, text_files.join_patterns(getattr(self, name)))

    @property
    def weighted(self) -> bool:
        return True

    @property
    def holds_out(self) -> bool:
        """True if some rows of the training text are held out for evaluation."""
        return bool(self.train_text) and not self.eval_text

    def validate(self) -> None:
        super().validate()
        if self.context < 1:
            raise UserError(f"data.context is {self.context}: it must be 1 or more.")
        if bool(self.data_dir) == bool(self.train_text):
            raise UserError(
                "Set either data.data_dir (a folder of packed shards) or data.train_text "
                "(patterns of text files, such as texts/*.txt)."
            )
        for name in ("train_text", "eval_text"):
            text_files.check_not_folders(getattr(self, name), f"data.{name}=")
        if self.eval_text and not self.train_text:
            raise UserError(
                "data.eval_text works only with data.train_text: for packed shards, name the split "
                "to evaluate on as data.eval_split."
            )

    def training(self, context: DataContext) -> "Pipeline":
        from tftpu.input_pipelines.datasets import packed_tokens

        folder = self._prepare_folder(self.train_split, "train_text")
        return packed_tokens.build_training(self, folder, context)

    def evaluation(self, context: DataContext) -> "tf.data.Dataset":
        from tftpu.input_pipelines.datasets import packed_tokens

        named = (self.eval_split, "eval_text")
        split, name = (self.train_split, "train_text") if self.holds_out else named
        folder = self._prepare_folder(split, name)
        return packed_tokens.build_evaluation(self, folder, split, context)

    def batch_spec(self, examples: int) -> "Spec":
        from tftpu.input_pipelines.datasets import packed_tokens

        return packed_tokens.batch_spec(self, examples)

    def _prepare_folder(self, split: str, name: str) -> str:
        """Returns the folder of packed shards; packs a split's text if the cache lacks it.

        Args:
            split: the name of the split.
            name: the config field with the split's file patterns: "train_text" or "eval_text".
        """
        if not self.train_text:
            return self.data_dir or ""
        from tftpu.input_pipelines.convert import packed_text
        from tftpu.input_pipelines.convert.readers.reader import ReadOptions

        options = ReadOptions(
            split=split,
            tokenizer=self.tokenizer,
            end_of_text=self.end_of_text,
            context=self.context,
            field=self.field,
        )
        return packed_text.prepare_folder(getattr(self, name), options, f"data.{name}=")


@dataclasses.dataclass
class Records(Streamed):
    """TFRecord shards of `tf.train.Example`, with any features of static shape.

    Args:
        data_dir: a folder with a `dataset.json`; or, if `spec` describes the records, a folder
            with TFRecord files named SPLIT* or in a folder SPLIT.
        spec: a line for each feature, such as "image: image", "x: float32[28,28]", "y: int64
            num_classes=10", "tokens: uint16[1025] raw"; see `manifest.Feature`.
        features: the names of the model's inputs; several inputs become a dict.
        label, weight: the names of the label and of the example's weight; "": none.
        compression: "GZIP", for files without a `dataset.json`; "": detected from the files.
    """

    spec: tuple[str, ...] = ()
    features: tuple[str, ...] = ("x",)
    label: str = "y"
    weight: str = ""
    compression: str = ""
    train_split: str = "train"
    eval_split: str = "test"
    address_kinds: ClassVar = ("tfrecord",)

    @property
    def weighted(self) -> bool:
        return bool(self.weight) or super().weighted

    def validate(self) -> None:
        super().validate()
        if not self.data_dir:
            raise UserError("data.data_dir is empty: give the folder of the TFRecord shards.")
        if not self.features:
            raise UserError("data.features is empty: name the model's inputs.")
        if self.on_bad_record == "skip" and not self.label:
            raise UserError(
                "data.on_bad_record=skip gives bad examples weight 0, and weights need labels: set "
                "data.label."
            )
        check_one_of("data.compression", self.compression, COMPRESSIONS)
        spec = parse_features(self.spec)
        for name in (*self.features, self.label, self.weight) if spec else ():
            if name and name not in spec:
                raise UserError(f"data.spec has no feature {name!r}.{did_you_mean(name, spec)}")

    def training(self, context: DataContext) -> "Pipeline":
        from tftpu.input_pipelines.datasets import record_shards

        return record_shards.build_training(self, context)

    def evaluation(self, context: DataContext) -> "tf.data.Dataset":
        from tftpu.input_pipelines.datasets import record_shards

        return record_shards.build_evaluation(self, context)

    def prediction(self, address: str, context: DataContext) -> "UnlabelledRecords":
        from tftpu.input_pipelines.datasets import record_shards

        return record_shards.build_prediction(self, address, context)

    def batch_spec(self, examples: int) -> "Spec":
        from tftpu.input_pipelines.datasets import record_shards

        return record_shards.batch_spec(self, examples)


@dataclasses.dataclass
class Synthetic(DataConfig):
    """Random numbers of any shape, the same in every run and split, to time a step or try a model.

    Args:
        spec: a line per feature, as in `Records`; floats are normal, integers are uniform on
            [0, num_classes).
        features, label: as in `Records`.
        examples: the number of examples in an epoch.
    """

    spec: tuple[str, ...] = ("x: float32[224,224,3]", "y: int32 num_classes=1000")
    features: tuple[str, ...] = ("x",)
    label: str = "y"
    examples: int = 1024

    def validate(self) -> None:
        super().validate()
        if self.examples < 1:
            raise UserError(f"data.examples is {self.examples}: it must be 1 or more.")
        spec = parse_features(self.spec)
        for name in (*self.features, self.label):
            if name not in spec:
                raise UserError(f"data.spec has no feature {name!r}.{did_you_mean(name, spec)}")
        for name, feature in spec.items():
            if feature.dtype == "string":
                raise UserError(f"data.spec: {name!r} is a string, which no device supports.")
            if feature.dtype != "float32" and not feature.num_classes:
                raise UserError(
                    f"data.spec: {name!r} needs num_classes=N, which sets the range of its random "
                    "numbers."
                )

    def training(self, context: DataContext) -> "ArrayPipeline":
        from tftpu.input_pipelines.datasets import synthetic

        return synthetic.build_training(self, context)

    def evaluation(self, context: DataContext) -> "tf.data.Dataset":
        from tftpu.input_pipelines.datasets import synthetic

        return synthetic.build_evaluation(self, context)

    def batch_spec(self, examples: int) -> "Spec":
        from tftpu.input_pipelines.datasets import synthetic

        return synthetic.batch_spec(self, examples)
