"""The data of a config that a TFX pipeline trains."""

import dataclasses
from typing import TYPE_CHECKING

from tftpu.config import DataConfig, DataContext
from tftpu.config.validation import at_least
from tftpu.errors import UserError

if TYPE_CHECKING:
    import tensorflow as tf

    from tftpu.input_pipelines.tensors import Spec


@dataclasses.dataclass
class Examples(DataConfig):
    """Examples of a TFX pipeline: TFRecords of tf.Example, described by a schema.

    A batch is a dictionary of features by name, and labels. Integer labels of shape (batch, 1), as
    Transform writes class ids, become (batch,).

    Attributes:
        label: the feature to predict, by its name after Transform.
        features: the features that the model takes, by their names after Transform; (): all except
            the label.
        transformed: whether the examples are read as they are; False: they are raw, and the
            pipeline's transform graph is applied while they are read.
        shuffle: the number of examples that are shuffled at a time.
        train_files, eval_files: patterns of files. `run_fn` sets these and the fields below.
        eval_steps: the number of batches to evaluate; None: all.
        schema: the file with the schema of the examples, which is read if there is no transform
            graph.
        transform_graph: the folder that Transform wrote; "": there is none.
    """

    name: str = "tfx"
    label: str = ""
    features: tuple[str, ...] = ()
    transformed: bool = True
    shuffle: int = 10_000
    train_files: tuple[str, ...] = ()
    eval_files: tuple[str, ...] = ()
    eval_steps: int | None = None
    schema: str = ""
    transform_graph: str = ""

    def validate(self) -> None:
        super().validate()
        if not self.label:
            raise UserError(
                "data.label is empty: name the feature to predict, such as "
                'tftpu.launch.tfx.Examples(label="species").'
            )
        if self.label in self.features:
            raise UserError(
                f"data.features contains the label {self.label!r}, which the model predicts: "
                "remove it from data.features."
            )
        at_least("data.shuffle", self.shuffle, 1)

    def training(self, context: DataContext) -> "tf.data.Dataset":
        from tftpu.launch.tfx import reading

        return reading.build_training(self, context)

    def evaluation(self, context: DataContext) -> "tf.data.Dataset":
        from tftpu.launch.tfx import reading

        return reading.build_evaluation(self, context)

    def batch_spec(self, examples: int) -> "Spec":
        from tftpu.launch.tfx import reading

        return reading.batch_spec(self, examples)
