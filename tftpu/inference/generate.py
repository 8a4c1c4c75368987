"""Writes text with a language model, token by token."""

from collections.abc import Sequence
from typing import Any

import keras

from tftpu.engines.functions import Compile
from tftpu.errors import NotFiniteError
from tftpu.inference.rows import Tokens, build_rows
from tftpu.inference.sampling import Sampling
from tftpu.inference.task_writer import TaskWriter
from tftpu.inference.writer import Writer
from tftpu.runtime import slow


def generate(
    model: keras.Model,
    prompts: Sequence[Sequence[int]],
    *,
    length: int,
    sampling: Sampling | None = None,
    seed: int = 0,
    stop: int | Sequence[int] | None = None,
    context: int | None = None,
) -> list[Tokens]:
    """Returns the tokens with which a language model continues prompts.

    A row depends on its prompt, its index and the seed, but not on the other prompts. If a row
    fills the model's context or is longer, it continues from its last half context. If compiling
    and writing take longer than two seconds, as in a first call, a line on standard error says so.

    Args:
        model: the zoo's GPT or Llama, or a causal language model of KerasHub, which cache keys and
            values of the tokens that they have read; or any causal Keras model from tokens, (batch,
            time), to logits, (batch, time, vocabulary), which reads the whole row again for each
            token.
        prompts: the token ids of each row. The lengths may differ, but must not be 0.
        length: the most tokens to write for each prompt.
        sampling: the rule by which tokens are drawn; None draws from all tokens by their
            probabilities.
        seed: the seed of the random numbers that choose tokens.
        stop: a token, or several, at which a row ends; the stop token is not returned.
        context: the most tokens to read at once; None: as many as the model takes.

    Raises:
        UserError: the model does not predict the next token, a prompt is empty or has an unknown
            token, or `length`, `seed` or `context` is out of range.
        NotFiniteError: logits of some rows are not finite. It is raised after the other rows have
            ended, and its `texts` are the tokens written for all rows.
    """
    writer = open_writer(model, stop, context)
    found: list[Tokens] = [[] for _ in prompts]
    rows = build_rows(prompts, length, sampling or Sampling(), seed)
    try:
        with slow.reporting_if_slow("Compiling and writing"):
            for parts in writer.write(rows):
                for row, part in zip(found, parts):
                    row += part
    except NotFiniteError as error:
        raise NotFiniteError(error.rows, found) from None
    return found


def open_writer(
    model: Any,
    stop: int | Sequence[int] | None = None,
    context: int | None = None,
    compiled: Compile | None = None,
) -> Writer:
    """Returns the writer of a model; arguments and errors are those of `Writer`."""
    kind = TaskWriter if hasattr(model, "generate_step") else Writer
    return kind(model, stop, context, compiled)
