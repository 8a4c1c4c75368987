"""Input pipelines: from a description of the data to batches of static shape.

    data = StreamedImages(format="folder", data_dir="photos", num_classes=5, global_batch_size=256)
    training(data, seed=0).starting_at(step=0)     # `Trainer.fit` takes `training(...)` itself
    from_arrays(x, y, global_batch_size=256)       # arrays in memory

For the classes in `sources`, `training(data, seed)` returns an object with `global_batch_size`;
`count`, the number of examples; and `starting_at(step, host, hosts)`, an endless dataset of global
batches or of one host's shard of each. The examples of a step depend only on the data, the seed,
the batch size and the step; `reading.order` explains how, `pipeline` how later stages preserve it.
`evaluation` yields every example of the evaluation split once. `batch_spec` returns shapes and
dtypes without reading an example. A user's own `tftpu.DataConfig` may return a plain
`tf.data.Dataset`.

Imports no TensorFlow until one of the functions is called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from tftpu.config import DataConfig, DataContext

if TYPE_CHECKING:
    import tensorflow as tf

    from tftpu.input_pipelines.pipeline import Pipeline
    from tftpu.input_pipelines.reading.epochs import ArrayPipeline
    from tftpu.input_pipelines.tensors import Spec
    from tftpu.input_pipelines.unlabelled import UnlabelledRecords


def training(data: DataConfig, seed: int = 0) -> ArrayPipeline | Pipeline | tf.data.Dataset:
    """Returns the training split, reshuffled each epoch by `seed`.

    Raises:
        UserError: `data.training` returns no data set, or one with another batch size.
    """
    from tftpu.input_pipelines import own

    return own.check_training(data, data.training(_build_context(data, seed)))


def evaluation(data: DataConfig, seed: int = 0) -> tf.data.Dataset | None:
    """Returns the evaluation split, once, in batches of `global_batch_size`; None if there is none.

    The last batch may be smaller.

    Raises:
        UserError: `data.evaluation` returns neither a data set nor None.
    """
    from tftpu.input_pipelines import own

    return own.check_evaluation(data, data.evaluation(_build_context(data, seed)))


def prediction(
    data: DataConfig, address: str, skip_bad: bool = False, keep: tuple[str, ...] = ()
) -> UnlabelledRecords:
    """Returns the records at an address, for predictions.

    Args:
        data: the data of the run.
        address: the address of the records, such as "images:FOLDER" or "evaluation".
        skip_bad: whether records that cannot be read are left out and reported; otherwise they
            raise an error.
        keep: names of record fields to write beside the predictions.

    Raises:
        UserError: data of this class cannot be read from the address.
    """
    from tftpu.input_pipelines import own

    return own.open_records(data, address, DataContext(0, data.global_batch_size, skip_bad, keep))


def batch_spec(data: DataConfig, examples: int) -> Spec:
    """Returns the shapes and dtypes of a batch of `examples`, as nested `tf.TensorSpec`s.

    If a user's data set has no `batch_spec`, its training split is opened to infer them.
    """
    from tftpu.input_pipelines import own

    spec = data.batch_spec(examples)
    return own.infer_batch_spec(training(data), examples) if spec is None else spec


def class_names(data: DataConfig) -> list[str] | None:
    """Returns the names of a data set's classes by class id, or None if it has none."""
    return data.class_names()


def steps_per_epoch(data: DataConfig, pipeline: Any) -> int:
    """Returns the number of batches in an epoch, including a smaller last one.

    Args:
        data: the data set.
        pipeline: its training split.

    Raises:
        UserError: the number of examples is unknown.
    """
    from tftpu.input_pipelines import own

    return own.count_steps(data, pipeline)


def describe_state(pipeline: Any) -> dict[str, Any]:
    """Returns the number of examples of a training split, and a hash of its files or content.

    Args:
        pipeline: the pipeline that `training` returns. For a `tf.data.Dataset`, the result is its
            number of batches, or {} if that is unknown.
    """
    from tftpu.input_pipelines import own

    return own.describe_state(pipeline)


def starting_at(pipeline: Any, step: int, host: int = 0, hosts: int = 1) -> tf.data.Dataset:
    """Returns the endless global batches of a training split from a step on.

    Args:
        pipeline: the pipeline that `training` returns.
        step: the index of the first batch in the run.
        host, hosts: index of this host, and number of hosts, to read only this host's shard of
            each batch; ignored for a `tf.data.Dataset`.
    """
    from tftpu.input_pipelines import own

    return own.starting_at(pipeline, step, host, hosts)


def from_arrays(
    features: Any, labels: Any = None, weights: Any = None, *, global_batch_size: int, seed: int = 0
) -> ArrayPipeline:
    """Returns a pipeline over arrays in memory; see `arrays.from_arrays`."""
    from tftpu.input_pipelines.datasets import arrays

    return arrays.from_arrays(
        features, labels, weights, global_batch_size=global_batch_size, seed=seed
    )


def from_generator(
    make: Callable[[], Iterable[Any]], spec: Spec, *, global_batch_size: int
) -> tf.data.Dataset:
    """Returns batches of the examples of a Python generator; see `arrays.from_generator`."""
    from tftpu.input_pipelines.datasets import arrays

    return arrays.from_generator(make, spec, global_batch_size=global_batch_size)


def _build_context(data: DataConfig, seed: int) -> DataContext:
    return DataContext(seed, data.global_batch_size)
