"""A text that meets a token whose embedding is not finite, beside texts that do not."""

import itertools
from typing import Any

import numpy as np
import pytest

from tftpu.errors import NotFiniteError
from tftpu.inference.generate import generate, open_writer
from tftpu.inference.rows import build_rows
from tftpu.inference.sampling import Sampling

_PROMPTS, _LENGTH, _CONTEXT = [[1, 2, 3], [5] * 11, [9, 8]], 20, 64


def check_that_others_are_written(model: Any, table: Any) -> None:
    """Checks that texts with values that are not finite end alone, after what is finite.

    Args:
        model: a language model whose head does not share its embedding.
        table: the variable of its embedding.
    """

    def write(prompts: list[list[int]]) -> tuple[list[list[int]], list[int]]:
        found: list[list[int]] = [[] for _ in prompts]
        try:
            rows = build_rows(prompts, _LENGTH, Sampling(0), 0)
            for parts in open_writer(model, None, _CONTEXT).write(rows):
                for text, part in zip(found, parts):
                    text += part
        except NotFiniteError as error:
            return found, sorted(error.rows)
        return found, []

    whole, failed = write(_PROMPTS)
    assert not failed
    others = set(itertools.chain(*_PROMPTS, *whole[1:]))
    place = next(n for n, token in enumerate(whole[0]) if n > 2 and token not in others)
    token = whole[0][place]
    values = np.array(table)
    values[token] = np.nan
    table.assign(values)
    begin = whole[0][: whole[0].index(token) + 1]
    assert write([*_PROMPTS, [token, 4]]) == ([begin, whole[1], whole[2], []], [0, 3])
    with pytest.raises(NotFiniteError) as refused:
        generate(
            model, [*_PROMPTS, [token, 4]], length=_LENGTH, sampling=Sampling(0), context=_CONTEXT
        )
    assert refused.value.texts == [begin, whole[1], whole[2], []]
    with pytest.raises(NotFiniteError, match="not finite"):
        list(open_writer(model, None, _CONTEXT).write(build_rows([[token]], 1, Sampling(0), 0)))
