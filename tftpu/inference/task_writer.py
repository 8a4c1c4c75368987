"""Writes text with a causal language model of KerasHub, using the forward pass of its `generate`.

A task gives its sampler a function, `next`, that reads one more token of every row, and the cache
that `next` needs. Rows have no gap between prompt and continuation, so the longer prompts of a
batch are read, token by token, while the shorter ones are already continued.

`next` takes one slot for all rows, from which the model also derives their positions and
attention masks. A text therefore cannot join a running batch: waiting texts begin together, and
later ones wait until these have ended.

Tried with KerasHub 0.32.
"""

import functools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from tftpu.engines.functions import Compile
from tftpu.errors import UserError
from tftpu.inference.batch import Batch, Part, Writing
from tftpu.inference.decoding import ROOM, check_context
from tftpu.inference.loop import EVERY, Choose, is_one_of, move_end
from tftpu.inference.programs import Size, SizedPrograms, round_up_length
from tftpu.inference.rows import Row
from tftpu.inference.sampling import Sampling, choose, gather_rules
from tftpu.inference.writer import Writer
from tftpu.tensors import Nest, Tensor, ops

_CONTEXT = 1024  # the default of most preprocessors of KerasHub


class TaskDecoding:
    """The forward passes of a KerasHub task.

    Args:
        task: a causal language model of KerasHub.
        context: the most tokens that a row may have; None: the model's maximum, or 1,024 if
            it has none.

    Raises:
        UserError: the task does not continue texts, or has fewer positions than `context`, or
            `context` is less than 2.
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
        check_context(self.context)
        self.vocabulary = task.output_shape[-1]

    def run(self, tokens: Tensor, lengths: Tensor, use: Callable[[Any, Nest], Nest]) -> Nest:
        """Reads prompts, and returns the result of `use` for the pass that reads one more token.

        Args:
            tokens: (batch, slots), int32, the prompts, padded at their end.
            lengths: (batch,), int32, the length of each prompt.
            use: a function of the pass and its cache, called by the task's sampler, because some
                passes read variables that `generate_step` changes later. The pass maps
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
        end = ops.full(tokens.shape[:1], tokens.shape[1], "int32")  # no end so far (`move_end`)
        return {**state, "slot": ops.min(lengths), "end": end}

    def write(self, state: Nest, lengths: Tensor, uniform: Tensor, count: int) -> Nest:
        """Writes up to `count` tokens of all rows, and returns the state; see `Loop.write`."""
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
                "end": move_end(state["end"], slot, logits),
            }

        def is_unfinished(index: Tensor, state: Nest) -> Tensor:
            left = ops.logical_and(index < count, state["slot"] < slots)
            return ops.logical_and(left, ops.logical_not(ops.all(state["ended"])))

        return ops.while_loop(is_unfinished, body, (ops.cast(0, "int32"), state))[1]


class TaskPrograms(SizedPrograms):
    """The functions of `_TaskLoop`, compiled once for each size; see `SizedPrograms`."""

    decoding: TaskDecoding

    def list_usual_sizes(self, most: int, tokens: int = 0) -> list[Size]:
        """Returns only the smallest size, because two threads cannot trace a task at once."""
        return [Size(1, min(ROOM, self.decoding.context), tokens)]

    def compile(self, size: Size) -> None:
        """Compiles the programs of a size; no other thread may compile programs meanwhile."""
        if size in self._known:
            return
        lengths = np.ones(size.rows, np.int32)
        rules, ended = gather_rules([Sampling(0)] * size.rows), np.ones(size.rows, bool)
        tokens = np.zeros((size.rows, size.slots), np.int32)
        state = self.read(size, tokens, lengths, rules, ended)
        state = self.write(size, state, lengths, np.zeros((size.rows, EVERY), np.float32))
        np.array(state["slot"])  # waits for the device

    def read(self, size: Size, *args: Any) -> Nest:
        """Runs `_TaskLoop.read`."""
        return self._find_functions(size)[0](*args)

    def write(self, size: Size, state: Nest, lengths: np.ndarray, uniform: np.ndarray) -> Nest:
        """Runs `_TaskLoop.write`."""
        state = self._find_functions(size)[1](state, lengths, uniform, EVERY)
        self._known.add(size)
        return state

    def _build_functions(self, size: Size) -> tuple[Any, Any]:
        loop = _TaskLoop(self.decoding, functools.partial(choose, tokens=size.tokens), self.stops)
        return self._compiled(loop.read), self._compiled(loop.write)


class TaskBatch:
    """A batch of texts that begin together; see `Batch`. Texts added meanwhile begin afterwards.

    Args:
        programs, tokens, before_compiling: as for `RunningBatch`.
    """

    def __init__(
        self, programs: TaskPrograms, tokens: int, before_compiling: Callable[[str], None]
    ):
        self._programs, self._tokens = programs, tokens
        self._before_compiling = before_compiling
        self._waiting: deque[tuple[Any, Row]] = deque()
        self._running: list[tuple[Any, Writing]] = []
        self._rounds: Iterator[list[Part]] = iter(())  # holds the cache of the texts

    def __len__(self) -> int:
        return len(self._waiting) + sum(not text.ended for _, text in self._running)

    def add(self, key: Any, row: Row) -> None:
        """Adds a text."""
        self._waiting.append((key, row))

    def remove(self, key: Any) -> None:
        """Ends a text."""
        self._waiting = deque(item for item in self._waiting if item[0] != key)
        for known, text in self._running:
            text.ended = text.ended or known == key
        self._free_if_ended()

    def advance(self) -> Iterator[list[Part]]:
        """Yields some tokens of the running texts; if all have ended, starts the waiting ones."""
        if all(text.ended for _, text in self._running):
            stops = self._programs.stops
            self._running = [(key, Writing(row, stops)) for key, row in self._waiting]
            self._waiting.clear()
            self._rounds = self._iterate_rounds()
        yield next(self._rounds, [])
        self._free_if_ended()

    def _free_if_ended(self) -> None:
        if all(text.ended for _, text in self._running):
            self._running, self._rounds = [], iter(())

    def _iterate_rounds(self) -> Iterator[list[Part]]:
        """Yields the next tokens of all texts that have not ended."""
        context = self._programs.decoding.context
        while not all(text.ended for _, text in self._running):
            # A row that fills the context keeps its second half, a row that has ended one token.
            texts = [text for _, text in self._running]
            for text in texts:
                if text.ended:
                    text.window = text.window[:1]
                elif len(text.window) >= context:
                    text.window = text.window[-(context // 2) :]
            left = max(t.row.length - t.done for t in texts if not t.ended)
            count = min(context - max(len(text.window) for text in texts), left)
            for tokens, ends in self._write_tokens(texts, count):
                yield [
                    text.build_part(key, found, end)
                    for (key, text), found, end in zip(self._running, tokens, ends)
                    if not text.ended
                ]
                if all(text.ended for text in texts):
                    return

    def _write_tokens(
        self, texts: Sequence[Writing], count: int
    ) -> Iterator[tuple[list[list[int]], list[int]]]:
        """Yields the next tokens of texts, and the `end` of each for `Writing.build_part`.

        The texts and the tokens must fit into the context together.
        """
        # The number of rows is rounded up, so that few sizes are compiled.
        rows = 1 << (len(texts) - 1).bit_length()
        lengths = np.ones(rows, np.int32)
        lengths[: len(texts)] = [len(text.window) for text in texts]
        longest = int(lengths.max())
        room = max(longest + count, ROOM)  # short texts share a program
        slots = min(round_up_length(room), self._programs.decoding.context)
        tokens, ended = np.zeros((rows, slots), np.int32), np.ones(rows, bool)
        uniform = np.zeros((rows, count), np.float32)
        samplings = [Sampling(0)] * rows
        for n, text in enumerate(texts):
            tokens[n, : len(text.window)], ended[n] = text.window, text.ended
            following = text.uniform[text.done : text.done + count]
            uniform[n, : len(following)] = following
            samplings[n] = text.row.sampling
        size = Size(rows, slots, self._tokens)
        if not self._programs.has_compiled(size):
            self._before_compiling(size.describe())
        state = self._programs.read(size, tokens, lengths, gather_rules(samplings), ended)
        done = 0
        for slot in range(int(lengths.min()), longest + count, EVERY):
            # Each row has its own random numbers, from its first written token on.
            places = np.arange(slot, slot + EVERY)[None] - lengths[:, None]
            chances = np.take_along_axis(uniform, places.clip(0, count - 1), 1)
            state = self._programs.write(size, state, lengths, chances)
            here = min(slot + EVERY - longest, count)
            if here > done:
                found, starts = np.array(state["tokens"]), lengths[: len(texts)] + done
                # Logits may have stopped being finite in the prompt, before the first new token.
                ends = np.maximum(np.array(state["end"])[: len(texts)] - starts, 0).tolist()
                yield (
                    [found[n, at : at + here - done].tolist() for n, at in enumerate(starts)],
                    ends,
                )
                done = here


class TaskWriter(Writer):
    """Continues prompts with a task of KerasHub; arguments and errors are those of `Writer`."""

    def _build_programs(
        self, model: Any, context: int | None, compiled: Compile, stops: Sequence[int]
    ) -> TaskPrograms:
        return TaskPrograms(TaskDecoding(model, context), compiled, stops)

    def open_batch(
        self, tokens: int, before_compiling: Callable[[str], None] = lambda texts: None
    ) -> Batch:
        """Returns an empty batch of texts; see `Writer.open_batch`."""
        return TaskBatch(self.programs, tokens, before_compiling)
