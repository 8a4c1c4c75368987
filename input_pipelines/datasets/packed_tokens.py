"""Documents packed into rows of tokens, for a language model that does not look across them."""

from typing import TYPE_CHECKING

import tensorflow as tf

from tftpu.config import DataContext
from tftpu.errors import UserError
from tftpu.input_pipelines.formats import example_proto, manifest
from tftpu.input_pipelines.pipeline import Pipeline
from tftpu.input_pipelines.reading import cache, shards
from tftpu.input_pipelines.tensors import Spec, Tensor

if TYPE_CHECKING:
    from tftpu.input_pipelines.sources import Tokens


def build_training(data: "Tokens", folder: str, context: DataContext) -> Pipeline:
    """Returns shuffled rows of packed shards; see `pipeline` for the exact guarantees."""
    return _build_pipeline(data, folder, data.train_split, context)


def build_evaluation(data: "Tokens", folder: str, context: DataContext) -> tf.data.Dataset:
    """Returns every row once. Each token except the first of a document is predicted once."""
    return _build_pipeline(data, folder, data.eval_split, context).iterate_once()


def batch_spec(data: "Tokens", examples: int) -> Spec:
    """Returns the spec of a batch.

    Returns:
        ({"tokens", "segments", "positions"}, next tokens, weights).
    """
    shape = (examples, data.context)
    names = ("tokens", "segments", "positions")
    features = {name: tf.TensorSpec(shape, tf.int32) for name in names}
    return features, tf.TensorSpec(shape, tf.int32), tf.TensorSpec(shape, tf.float32)


def split_rows(rows: dict[str, Tensor]) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Returns features, labels and weights of packed rows.

    Args:
        rows: "tokens" and "segments", (batch, context + 1). Segments count a row's documents from
            1, in order; 0 is padding, at the end.

    Returns:
        The features "tokens", "segments" and "positions" (in the document), (batch, context),
        int32; the next tokens; and weights, 1.0 if the next token is in the same document, else
        0.0.
    """
    tokens: Tensor = tf.cast(rows["tokens"], tf.int32)
    segments: Tensor = tf.cast(rows["segments"], tf.int32)
    here, after = segments[:, :-1], segments[:, 1:]
    # Positions count 0, 1, 2, ... from the start of each document of a row.
    begins = tf.pad(here[:, 1:] != here[:, :-1], [[0, 0], [1, 0]], constant_values=True)
    borders: Tensor = tf.where(tf.reshape(begins, [-1]))
    borders = tf.concat([borders[:, 0], [tf.size(here, tf.int64)]], 0)
    counts = tf.ragged.range(tf.cast(borders[1:] - borders[:-1], tf.int32)).flat_values
    positions = tf.where(here == 0, 0, tf.reshape(counts, tf.shape(here)))
    features = {"tokens": tokens[:, :-1], "segments": here, "positions": positions}
    return features, tokens[:, 1:], tf.cast((here == after) & (after > 0), tf.float32)


def _build_pipeline(data: "Tokens", folder: str, split: str, context: DataContext) -> Pipeline:
    found = manifest.read(folder)
    for name in ("tokens", "segments"):
        if name not in found.features:
            raise UserError(
                f"The data set in {folder} has no feature {name!r}: packed text has 'tokens' and "
                "'segments', as `tftpu data convert --source=text:...` makes them."
            )
    length = found.features["tokens"].shape
    if length != (data.context + 1,):
        raise UserError(
            f"The rows in {folder} are packed for a context of {length[0] - 1} tokens, but "
            f"data.context is {data.context}: set data.context to {length[0] - 1}, or convert the "
            "text again."
        )
    features = {name: found.features[name] for name in ("tokens", "segments")}
    parse = example_proto.build_parser(features)
    return Pipeline(
        shards.from_manifest(found, split, cache.from_data(data), data.shuffle),
        data,
        context,
        lambda serialized: parse(serialized, tf.fill(tf.shape(serialized), "")),
        lambda rows, seeds: split_rows(rows),
    )
