"""Checks the evaluation split, and whether its examples are also in the training split."""

import contextlib
import io
from typing import Any

from tftpu.errors import UserError, find_first_line
from tftpu.input_pipelines.sources import Images, StreamedImages, Synthetic, Text, Tokens
from tftpu.launch.data_checks import Pipeline
from tftpu.launch.data_checks.finding import Finding
from tftpu.launch.failures import explain
from tftpu.launch.settings import own_code
from tftpu.runtime.slow import reporting_if_slow


def inspect_evaluation(data: Any) -> list[Finding]:
    """Checks that the evaluation split can be read and is not the same as the training split."""
    import tensorflow as tf

    from tftpu import input_pipelines
    from tftpu.launch.run import summary

    with reporting_if_slow("Reading the evaluation split"):
        try:
            with own_code.failures_of_class(data, "evaluation"):
                batches = input_pipelines.evaluation(data)
            is_empty = batches is not None and next(iter(batches), None) is None
        except UserError as error:
            return [Finding("error", f"evaluation: {error}")]
        except tf.errors.OpError as error:
            return [Finding("error", f"evaluation: {explain(error) or find_first_line(error)}")]
        if batches is None:
            return [Finding("ok", "the data have no evaluation split")]
    if is_empty:
        return [Finding("error", "the evaluation split is empty.")]
    same = summary.describe_same_split(data)
    readable = Finding("ok", "the evaluation split can be read")
    return [readable, *([Finding("warning", same)] if same else [])]


def inspect_overlap(data: Any, pipeline: Pipeline | None, seed: int) -> list[Finding]:
    """Looks for evaluation examples in the training split.

    `Images`, `StreamedImages`, `Text`, `Tokens` and `Synthetic` are left out: images are augmented,
    each split cuts text into rows at other places, and synthetic examples are equal in both splits.

    Args:
        data: the data, before a model's preprocessor.
        pipeline: the training split; None if it is not open yet.
        seed: the seed of the training split.
    """
    import tensorflow as tf

    from tftpu import input_pipelines
    from tftpu.input_pipelines import overlap
    from tftpu.launch.run import summary

    left_out = Images | StreamedImages | Synthetic | Text | Tokens
    if isinstance(data, left_out) or summary.describe_same_split(data):
        return []
    # Opening the splits prints lines that were printed before.
    hidden = contextlib.redirect_stdout(io.StringIO())
    try:
        with own_code.failures_of_class(data, "evaluation"), hidden:
            opened = pipeline or input_pipelines.training(data, seed)
            evaluation = input_pipelines.evaluation(data, seed)
            if evaluation is None:
                return []
            training: Any = opened
            if hasattr(opened, "starting_at"):
                steps = -(-opened.count // opened.global_batch_size)
                training = input_pipelines.starting_at(opened, 0).take(steps)
            splits = (split.as_numpy_iterator() for split in (training, evaluation))
            found = overlap.describe_inputs(*splits)
    except (UserError, tf.errors.OpError) as error:
        return [Finding("error", f"reading both splits: {find_first_line(error)}")]
    return [Finding("warning", found)] if found else []
