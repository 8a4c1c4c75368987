"""Writes text with a causal language model of KerasHub, by the pass that its `generate` runs.

A task hands its sampler a function, `next`, that reads one more token of every row, and the cache
that it needs. Rows have no gap between their prompt and what is written, so the longer prompts of a
batch are read, token by token, while the shorter ones are already continued.

Tried with KerasHub 0.32.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from tftpu.errors import UserError
from tftpu.inference.loop import Choose, is_finite, is_one_of
from tftpu.inference.sampling import Sampling, gather_rules
from tftpu.inference.writer import (
    ROOM,
    Row,
    Size,
    Tokens,
    Writer,
    find_tokens,
    pad_texts,
    round_up_length,
)
from tftpu.tensors import Nest, Tensor, ops

_CONTEXT = 1024  # as the preprocessors of KerasHub, which know what a model was trained with


class TaskDecoding:
    """The passes of a task.

    Args:
        task: a causal language model of KerasHub.
        context: the most tokens that a row may have; None: as many as the model has positions for,
            or 1,024.

    Raises:
        UserError: the task does not continue texts, or has fewer positions.
    """

    def __init__(self, task: Any, context: int | None):
        inputs = task.input if isinstance(task.input, dict) else {}
        if "token_ids" not in inputs:
            raise UserError(
                f"{type(task).__name__} does not continue texts: its inputs are "
                f"{', '.join(inputs)}. Use its own generate."
            )
        most = getattr(task.backbone, "max_sequence_length", None)
        if context is not None and most is not None and context > most:
            raise UserError(
                f"context={context} is too large: the model {task.name!r} takes at most {most} "
                "tokens."
            )
        self._task = task
        self.context = context or most or _CONTEXT
        self.vocabulary = task.output_shape[-1]

    def run(self, tokens: Tensor, lengths: Tensor, use: Callable[[Any, Nest], Nest]) -> Nest:
        """Reads prompts, and returns what a function makes of the task's next pass.

        Args:
            tokens: (batch, slots), int32, the prompts, padded at their end.
            lengths: (batch,), int32, the length of each prompt.
            use: called with the pass and its cache, while the task waits for its sampler: some
                passes read variables that their `generate_step` changes later. The pass maps
                tokens, a cache and the slot to write to logits, hidden states and the next cache.
        """
        found: list[Nest] = []

        def sampler(next: Any, prompt: Tensor, cache: Nest, **_: Any) -> Tensor:
            found.append(use(next, cache))
            return prompt

        known = ops.arange(tokens.shape[1], dtype="int32")[None] < lengths[:, None]
        before, self._task.sampler = self._task.sampler, sampler
        try:
            self._task.generate_step({"token_ids": tokens, "padding_mask": known}, None)
        finally:
            self._task.sampler = before
        return found[0]


class _TaskLoop:
    """The loop that writes tokens, in functions that can be compiled; see `loop.Loop`."""

    def __init__(self, decoding: TaskDecoding, choose: Choose, stops: Sequence[int]):
        self._decoding, self._choose, self._stops = decoding, choose, stops

    def read(self, tokens: Tensor, lengths: Tensor, rules: Nest, ended: Tensor) -> Nest:
        """Reads prompts, (batch, slots), and returns the state of the loop."""
        cache = self._decoding.run(tokens, lengths, lambda _, cache: cache)
        state = {"tokens": tokens, "cache": cache, "rules": rules, "ended": ended}
        return {**state, "slot": ops.min(lengths), "finite": ops.convert_to_tensor(True)}

    def write(self, state: Nest, lengths: Tensor, uniform: Tensor, count: int) -> Nest:
        """Writes a number of slots of all rows, and returns the state; see `Loop.write`."""
        # XLA leaves out the pass over the prompt, whose cache is not used.
        return self._decoding.run(
            state["tokens"],
            lengths,
            lambda read_next, _: self._loop(read_next, state, lengths, uniform, count),
        )

    def _loop(
        self, read_next: Any, state: Nest, lengths: Tensor, uniform: Tensor, count: int
    ) -> Nest:
        slots = state["tokens"].shape[1]

        def body(index: Tensor, state: Nest) -> tuple[Tensor, Nest]:
            tokens, slot = state["tokens"], state["slot"]
            logits, _, cache = read_next(tokens, state["cache"], slot)
            logits = ops.cast(logits, "float32")
            chances = ops.slice(uniform, (0, index), (uniform.shape[0], 1))[:, 0]
            chosen = self._choose(logits, chances, state["rules"])
            here = ops.slice(tokens, (0, slot), (tokens.shape[0], 1))[:, 0]
            is_prompt = slot < lengths
            chosen = ops.where(is_prompt, here, chosen)
            stopped = ops.logical_and(~is_prompt, is_one_of(chosen, self._stops))
            return index + 1, {
                **state,
                "tokens": ops.slice_update(tokens, (0, slot), chosen[:, None]),
                "cache": cache,
                "slot": slot + 1,
                "ended": ops.logical_or(state["ended"], stopped),
                "finite": ops.logical_and(state["finite"], is_finite(logits)),
            }

        def is_unfinished(index: Tensor, state: Nest) -> Tensor:
            left = ops.logical_and(index < count, state["slot"] < slots)
            return ops.logical_and(left, ops.logical_not(ops.all(state["ended"])))

        return ops.while_loop(is_unfinished, body, (ops.cast(0, "int32"), state))[1]


class TaskWriter(Writer):
    """Continues prompts by a task of KerasHub; arguments and errors are those of `Writer`."""

    def _build_decoding(self, model: Any, context: int | None) -> TaskDecoding:
        return TaskDecoding(model, context)

    def _build_loop(self, choose: Choose) -> _TaskLoop:
        return _TaskLoop(self._decoding, choose, self._stops)

    def compile(self, size: Size) -> None:
        """Compiles the program of a size, which no other thread may do meanwhile."""
        if size in self._known:
            return
        read, write = self._compile_loop(size)
        lengths = np.ones(size.rows, np.int32)
        rules, ended = gather_rules([Sampling(0)] * size.rows), np.ones(size.rows, bool)
        state = read(np.zeros((size.rows, size.slots), np.int32), lengths, rules, ended)
        state = write(state, lengths, np.zeros((size.rows, size.every), np.float32), size.every)
        np.array(state["slot"])  # waits for the device
        self._known.add(size)

    def list_usual_sizes(self, most: int, every: int = 16, tokens: int = 0) -> list[Size]:
        """Returns the smallest size alone: a task cannot be traced by two threads at once."""
        return [Size(1, min(ROOM, self._decoding.context), 0, every, tokens)]

    def _generate_round(
        self,
        rows: Sequence[Row],
        texts: list[Tokens],
        length: int,
        uniform: np.ndarray,
        every: int,
        ended: np.ndarray,
        before_compiling: Callable[[Size], None],
    ) -> Iterator[list[Tokens]]:
        """Yields the next tokens of texts; both must fit into the context together."""
        lengths = np.array([len(text) for text in texts], np.int32)
        longest = int(lengths.max())
        room = max(longest + length, ROOM)  # so that short texts share a program
        slots = min(round_up_length(room), self._decoding.context)
        tokens = pad_texts(texts, slots)
        size = Size(len(texts), slots, 0, every, find_tokens(rows))
        if size not in self._known:
            before_compiling(size)
        read, write = self._compile_loop(size)
        rules = gather_rules([row.sampling for row in rows])
        state = read(tokens, lengths, rules, ended.copy())
        done = 0
        for slot in range(int(lengths.min()), longest + length, every):
            # Each row has its own numbers, from its first written token on.
            places = np.arange(slot, slot + every)[None] - lengths[:, None]
            chances = np.take_along_axis(uniform, places.clip(0, uniform.shape[1] - 1), 1)
            state = write(state, lengths, chances, every)
            self._check_finite(state)
            self._known.add(size)
            here = min(slot + every - longest, length)
            if here > done:
                found = np.array(state["tokens"])
                yield [
                    found[n, start + done : start + here].tolist()
                    for n, start in enumerate(lengths)
                ]
                done = here
