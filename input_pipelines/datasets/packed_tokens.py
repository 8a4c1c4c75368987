"""Documents packed into rows of tokens, for a language model that attends within documents."""

import dataclasses
from typing import TYPE_CHECKING

import tensorflow as tf

from tftpu.config import DataContext
from tftpu.errors import UserError
from tftpu.input_pipelines.formats import example_proto, manifest
from tftpu.input_pipelines.formats.manifest import Manifest
from tftpu.input_pipelines.pipeline import Pipeline
from tftpu.input_pipelines.reading import cache, shards
from tftpu.input_pipelines.reading.shards import Piece, Shards
from tftpu.input_pipelines.tensors import Spec, Tensor

if TYPE_CHECKING:
    from tftpu.input_pipelines.sources import Tokens


_HELD_OUT = 20  # without `eval_text`, one in this many rows is held out
_MOST = 1000  # maximum number of rows that are held out


def build_training(data: "Tokens", folder: str, context: DataContext) -> Pipeline:
    """Returns shuffled rows of packed shards; see `reading.order` for the order."""
    found, source = _open_rows(data, folder, data.train_split)
    if data.holds_out:
        source, _ = _hold_out(source)
    return _build_pipeline(data, found, source, context)


def build_evaluation(
    data: "Tokens", folder: str, split: str, context: DataContext
) -> tf.data.Dataset:
    """Returns the rows of a split, or those held out of the training text, once, in batches."""
    found, source = _open_rows(data, folder, split)
    if data.holds_out:
        rows = source.count
        _, source = _hold_out(source)
        print(
            f"data.eval_text is empty: {source.count:,} of {rows:,} rows of the training text are "
            "held out to evaluate on",
            flush=True,
        )
    return _build_pipeline(data, found, source, context).iterate_once()


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


def _open_rows(data: "Tokens", folder: str, split: str) -> tuple[Manifest, Shards]:
    """Returns the manifest of packed text in a folder, and the rows of a split.

    Raises:
        UserError: the data set is not packed text, or its rows do not have `data.context` tokens.
    """
    found = manifest.read(folder)
    for name in ("tokens", "segments"):
        if name not in found.features:
            raise UserError(
                f"The data set in {folder} has no feature {name!r}: packed text has 'tokens' and "
                "'segments', as `tftpu data convert --source=text:...` makes them."
            )
    length = found.features["tokens"].shape
    if length != (data.context + 1,):
        packed = length[0] - 1
        raise UserError(
            f"The rows in {folder} are packed for a context of {packed} tokens, but data.context "
            f"is {data.context}: give --config.data.context={packed}, and the same "
            "--config.model.context if the model has one; or convert the text again with "
            f"--context={data.context}."
        )
    return found, shards.from_manifest(found, split, cache.from_data(data), data.shuffle)


def _hold_out(rows: Shards) -> tuple[Shards, Shards]:
    """Returns the rows to train on, and the last rows, to evaluate on.

    Rows were shuffled when they were packed, so the last rows come from all texts. They depend
    only on the text and the packing, so no run with the same text ever trains on them.

    Raises:
        UserError: there is only one row.
    """
    held = min(-(-rows.count // _HELD_OUT), _MOST)
    if rows.count == held:
        raise UserError(
            "The text of data.train_text is a single row, so none can be held out: add texts, or "
            "give others to evaluate on with --config.data.eval_text=PATTERN."
        )
    training, evaluation = [], []
    left = rows.count - held
    for piece in rows.pieces:
        here = min(left, piece.examples)
        left -= here
        training.append(dataclasses.replace(piece, examples=here))
        evaluation.append(
            dataclasses.replace(piece, examples=piece.examples - here, first=piece.first + here)
        )

    def cut(pieces: list[Piece]) -> Shards:
        return Shards(pieces, rows.compression, rows.shuffle, rows.at_most, rows.local)

    return cut(training), cut(evaluation)


def _build_pipeline(
    data: "Tokens", found: Manifest, source: Shards, context: DataContext
) -> Pipeline:
    features = {name: found.features[name] for name in ("tokens", "segments")}
    parse = example_proto.build_parser(features)
    return Pipeline(
        source,
        data,
        context,
        lambda serialized: parse(serialized, tf.fill(tf.shape(serialized), "")),
        lambda rows, seeds: split_rows(rows),
    )
