"""The data set of BigQuery rows, and its options; see `sources`."""

import dataclasses
from typing import TYPE_CHECKING, ClassVar

from tftpu.config import DataConfig, DataContext
from tftpu.errors import UserError

if TYPE_CHECKING:
    import tensorflow as tf

    from tftpu.input_pipelines.reading.epochs import ArrayPipeline
    from tftpu.input_pipelines.tensors import Spec
    from tftpu.input_pipelines.unlabelled import UnlabelledRecords


@dataclasses.dataclass
class BigQuery(DataConfig):
    """Rows of BigQuery, held in memory; see `datasets.bigquery` on reproducibility.

    Args:
        train_table, eval_table: `project.dataset.table`, or a query, `SELECT ...`.
        features: the columns of the model's inputs; several inputs become a dict.
        label: the column of the label; "": none.
        snapshot: the time as of which tables are read, such as 2026-11-20T12:00:00Z; None: the time
            of a table's last change.
    """

    train_table: str = ""
    eval_table: str = ""
    features: tuple[str, ...] = ("x",)
    label: str = "y"
    snapshot: str | None = None
    address_kinds: ClassVar = ("bigquery",)

    def validate(self) -> None:
        super().validate()
        for field in ("train_table", "eval_table", "features"):
            if not getattr(self, field):
                raise UserError(f"data.{field} is empty: name a table or columns of BigQuery.")

    def training(self, context: DataContext) -> "ArrayPipeline":
        from tftpu.input_pipelines.datasets import bigquery

        return bigquery.build_training(self, context)

    def evaluation(self, context: DataContext) -> "tf.data.Dataset":
        from tftpu.input_pipelines.datasets import bigquery

        return bigquery.build_evaluation(self, context)

    def prediction(self, address: str, context: DataContext) -> "UnlabelledRecords":
        from tftpu.input_pipelines.datasets import bigquery

        return bigquery.build_prediction(self, address, context)

    def batch_spec(self, examples: int) -> "Spec":
        from tftpu.input_pipelines.datasets import bigquery

        return bigquery.batch_spec(self, examples)
