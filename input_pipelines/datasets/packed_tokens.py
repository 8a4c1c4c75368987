"""Documents packed into rows of tokens, for a language model that does not look across them."""

import hashlib
from typing import Any

import tensorflow as tf

from tftpu.errors import UserError
from tftpu.input_pipelines.datasets import tfds
from tftpu.input_pipelines.formats import example_proto, manifest
from tftpu.input_pipelines.pipeline import Pipeline, options_of
from tftpu.input_pipelines.reading import cache, shards
from tftpu.input_pipelines.sources import Tokens
from tftpu.storage import files


def training(data: Tokens, seed: int) -> Pipeline:
    """Shuffled rows; see `pipeline` for what is kept exact."""
    return _pipeline(data, data.train_split, seed=seed, **options_of(data))


def evaluation(data: Tokens) -> tf.data.Dataset:
    """Every row once: every token but the first of each document is predicted once."""
    return _pipeline(data, data.eval_split, **options_of(data)).once()


def batch_spec(data: Tokens, examples: int) -> Any:
    """({"tokens", "segments", "positions"}, next tokens, weights) of a batch."""
    shape = (examples, data.context)
    names = ("tokens", "segments", "positions")
    features = {name: tf.TensorSpec(shape, tf.int32) for name in names}
    return features, tf.TensorSpec(shape, tf.int32), tf.TensorSpec(shape, tf.float32)


def packed(rows: dict[str, tf.Tensor]) -> tuple:
    """Features, labels and weights of packed rows.

    Args:
        rows: "tokens" and "segments", (batch, context + 1); segments count a row's documents from
            1, in order, and 0 is padding, at the end.

    Returns:
        Tokens, segments and positions in the document by name, (batch, context), int32; the tokens
        that follow; and 1.0 where these are of the same document, else 0.0.
    """
    tokens, segments = (tf.cast(rows[name], tf.int32) for name in ("tokens", "segments"))
    here, after = segments[:, :-1], segments[:, 1:]
    # One run of numbers 0, 1, 2, ... after the other, a run for each document of each row.
    begins = tf.pad(here[:, 1:] != here[:, :-1], [[0, 0], [1, 0]], constant_values=True)
    borders = tf.concat([tf.where(tf.reshape(begins, [-1]))[:, 0], [tf.size(here, tf.int64)]], 0)
    runs = tf.ragged.range(tf.cast(borders[1:] - borders[:-1], tf.int32)).flat_values
    positions = tf.where(here == 0, 0, tf.reshape(runs, tf.shape(here)))
    features = {"tokens": tokens[:, :-1], "segments": here, "positions": positions}
    return features, tokens[:, 1:], tf.cast((here == after) & (after > 0), tf.float32)


def _pipeline(data: Tokens, split: str, **options) -> Pipeline:
    folder = _converted(data, split) if data.train_text else data.data_dir
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
            f"The rows in {folder} are packed for a context of {length[0] - 1} tokens, and "
            f"data.context is {data.context}: use that, or convert the text again."
        )
    features = {name: found.features[name] for name in ("tokens", "segments")}
    parse = example_proto.parser(features)
    return Pipeline(
        shards.of_manifest(found, split, cache.of(data), shuffle=data.shuffle),
        data.global_batch_size,
        lambda serialized: parse(serialized, tf.fill(tf.shape(serialized), "")),
        lambda rows, seeds: packed(rows),
        **options,
    )


def _converted(data: Tokens, split: str) -> str:
    """The folder in the cache with a split's text, packed; made on first use."""
    from tftpu.input_pipelines.convert import converter, parts

    options = parts.Options(
        split=split,
        tokenizer=data.tokenizer,
        end_of_text=data.end_of_text,
        context=data.context,
        field=data.field,
    )
    pattern = data.train_text if split == data.train_split else data.eval_text
    conversion = converter.Conversion(f"text:{pattern}", "", options)
    source = parts.source(conversion.source, options)
    # Text that has changed has another name, and is packed anew.
    name = hashlib.sha256(conversion.fingerprint(source).encode()).hexdigest()[:16]
    folder = files.join(tfds.cache_folder(), "packed", name)
    converter.run(converter.Conversion(conversion.source, folder, options))
    return folder
