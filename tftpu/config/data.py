"""The base class of the data sets in configs, both built-in sources and users' classes."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from tftpu.config.validation import at_least
from tftpu.errors import UserError

if TYPE_CHECKING:
    import tensorflow as tf


@dataclasses.dataclass(frozen=True)
class DataContext:
    """The settings of a run that its data set needs.

    Attributes:
        seed: the seed of the order and the augmentation.
        global_batch_size: examples per step, over all replicas and microbatches.
        skip_bad: whether records to predict may be left out if they cannot be read.
        keep: names of the records' fields that are written beside their predictions.
    """

    seed: int
    global_batch_size: int
    skip_bad: bool = False
    keep: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class ExportInputs:
    """The inputs of an exported model, and the function from them to the training features.

    Attributes:
        shapes: the shape of one example, without a batch dimension, by the name of the input.
        dtypes: the dtypes by the name of the input, such as "uint8".
        prepare: maps batches of the inputs, in their order, to features by TensorFlow operations.
        decode: for a single input that is an image: maps the content of its file, a scalar string,
            to the image, cropped and resized as for evaluation, by TensorFlow operations; None if
            exports take no files.
    """

    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, str]
    prepare: Callable[..., Any]
    decode: Callable[[Any], Any] | None = None


@dataclasses.dataclass
class DataConfig:
    """A data set, and how to read it.

    Derive a dataclass: its fields become `--config.data.FIELD` on the command line. The built-in
    sources are such classes.

    Attributes:
        name: name of the data set.
        global_batch_size: examples per step, over all replicas and microbatches.
        data_dir: folder of the prepared data; None is the cache folder.
        per_token: whether labels are tokens rather than one class for each example, which decides
            the metrics of an experiment that names no loss. A class variable.
        address_kinds: prefixes of the addresses, such as "images" of "images:FOLDER", that
            `prediction` accepts besides "evaluation" and "training"; () if they are not known. A
            class variable.

    Example:

    ```python
    @dataclasses.dataclass
    class Squares(tftpu.DataConfig):
        examples: int = 1000

        def training(self, context):
            x = tf.random.stateless_normal((self.examples, 4), (context.seed, 0))
            data = tf.data.Dataset.from_tensor_slices((x, x[:, :1] ** 2))
            data = data.shuffle(self.examples, seed=context.seed)
            return data.batch(context.global_batch_size)
    ```
    """

    name: str = ""
    global_batch_size: int = 128
    data_dir: str | None = None
    per_token: ClassVar[bool] = False
    address_kinds: ClassVar[tuple[str, ...]] = ()

    @property
    def weighted(self) -> bool:
        """True if batches have a weight for each example, which also weights the metrics."""
        return False

    def training(self, context: DataContext) -> "tf.data.Dataset | Any":
        """Returns the training split.

        Args:
            context: the context of the run.

        Returns:
            A `tf.data.Dataset` in batches of `context.global_batch_size`, `(x, y)` or `(x, y,
            sample_weight)`, which is repeated if it ends and should be in the same order at every
            call; or a pipeline that can start at any step, such as that of
            `tftpu.input_pipelines.from_arrays`.
        """
        raise UserError(
            f"{type(self).__name__} has no method training(self, context): add one that returns a "
            "tf.data.Dataset in batches of context.global_batch_size."
        )

    def evaluation(self, context: DataContext) -> "tf.data.Dataset | None":
        """Returns the evaluation split, finite and batched; None if there is none.

        Args:
            context: the context of the run.
        """
        return None

    def prediction(self, address: str, context: DataContext) -> Any:
        """Returns records to predict, without labels; None means those of `evaluation`.

        Args:
            address: the value of `tftpu predict --input`, such as "evaluation".
            context: the context of the run.

        Returns:
            The features of the records, as NumPy arrays nested like the model's inputs.
        """
        return None

    def batch_spec(self, examples: int) -> Any:
        """Returns the `tf.TensorSpec`s of a batch; None takes them from the training split.

        Args:
            examples: number of examples in the batch.
        """
        return None

    def export_inputs(self) -> ExportInputs | None:
        """Returns the inputs of an exported model, such as pixels; None if it takes features."""
        return None

    def class_names(self) -> list[str] | None:
        """Returns the names of the classes by class id, or None if there are none."""
        return None

    def validate(self) -> None:
        """Raises `UserError` for a value that the data set does not allow."""
        at_least("data.global_batch_size", self.global_batch_size, 1)
