"""Compiled functions that write texts, for a limited number of sizes."""

import functools
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import numpy as np

from tftpu.engines.functions import Compile
from tftpu.inference.decoding import ROOM, Decoding
from tftpu.inference.loop import EVERY, Loop
from tftpu.inference.sampling import Sampling, choose, gather_rules
from tftpu.tensors import Nest, Tensor, ops

_USUAL = 512  # programs for prompts and texts of up to this many tokens are compiled ahead
_PROMPT = 64  # the length that the shortest prompts are padded to
_WASTE = 2  # how many times larger than the wanted size a compiled one may be


class Size(NamedTuple):
    """The size of a batch of texts.

    Attributes:
        rows: the number of texts.
        slots: the most tokens of a text, including its prompt.
        tokens: the size of the vocabulary, as for `Sampling`.
    """

    rows: int
    slots: int
    tokens: int

    def describe(self) -> str:
        """Returns the size in words."""
        texts = "1 text" if self.rows == 1 else f"up to {self.rows} texts at once"
        return f"{texts}, of up to {self.slots} tokens with their prompts"


class PromptSize(NamedTuple):
    """A size of prompts that are read, one at a time.

    Attributes:
        time: the number of tokens to which a chunk is padded.
        slots: the most tokens of a prompt.
        tokens: the size of the vocabulary, as for `Sampling`.
    """

    time: int
    slots: int
    tokens: int

    def describe(self) -> str:
        """Returns the size in words."""
        return f"prompts of up to {self.slots} tokens"


class SizedPrograms:
    """The functions of a generation loop, compiled once for each size.

    Args:
        decoding: the forward passes of the model.
        compiled: a function that takes a function and returns its compiled form.
        stops: tokens after which a text ends.
    """

    def __init__(self, decoding: Any, compiled: Compile, stops: Sequence[int]):
        self.decoding, self.stops = decoding, stops
        self._compiled = compiled
        # Separate functions for each size: while one is traced, another thread can call others.
        self._functions: dict[Size | PromptSize, tuple[Any, Any]] = {}
        self._adding = threading.Lock()
        self._known: set[Size | PromptSize] = set()  # sizes that are compiled

    def has_compiled(self, size: Size | PromptSize) -> bool:
        """Returns whether the programs of a size are compiled."""
        return size in self._known

    def _find_functions(self, size: Size | PromptSize) -> tuple[Any, Any]:
        """Returns the functions of a size; their first calls compile them."""
        with self._adding:
            if size not in self._functions:
                self._functions[size] = self._build_functions(size)
            return self._functions[size]

    def _build_functions(self, size: Any) -> tuple[Any, Any]:
        raise NotImplementedError


class Programs(SizedPrograms):
    """The functions of `Loop`, compiled once for each size; see `SizedPrograms`."""

    decoding: Decoding

    def find_prompt_size(self, length: int, tokens: int) -> PromptSize:
        """Returns the size for reading a prompt of `length` tokens."""
        chunk = self.decoding.chunk
        if length <= chunk:
            time = min(round_up_length(length), chunk)
            return PromptSize(time, time, tokens)
        return PromptSize(chunk, chunk << (-(-length // chunk) - 1).bit_length(), tokens)

    def choose_size(self, rows: int, slots: int, tokens: int) -> Size:
        """Returns a size with room for `rows` and `slots`, preferably one that is compiled."""
        wanted = Size(1 << (rows - 1).bit_length(), self._round_up_slots(slots), tokens)
        most = _WASTE * wanted.rows * wanted.slots
        found = [
            size
            for size in tuple(self._known)  # a copy, as another thread may add sizes
            if isinstance(size, Size)
            and size.tokens == tokens
            and size.rows >= wanted.rows
            and size.slots >= wanted.slots
            and size.rows * size.slots <= most
        ]
        return min(found, key=lambda size: size.rows * size.slots, default=wanted)

    def _round_up_slots(self, slots: int) -> int:
        whole = ROOM << (-(-slots // ROOM) - 1).bit_length()
        return min(max(whole, self.decoding.least_slots), self.decoding.context)

    def list_usual_sizes(self, most: int, tokens: int = 0) -> list[Size | PromptSize]:
        """Returns the sizes that most requests need, those of one short text first.

        Args:
            most: the most texts that are written at once.
            tokens: the size of the vocabulary, as for `Sampling`.
        """
        usual = min(_USUAL, self.decoding.context)
        prompts = [self.find_prompt_size(length, tokens) for length in range(1, usual + 1)]
        shapes = [(1, 1), *((rows, 1) for rows in (8, 4, 2) if rows <= most)]
        shapes += [(1, slots) for slots in (2 * ROOM, 4 * ROOM) if slots < 2 * usual]
        sizes = [Size(rows, self._round_up_slots(slots), tokens) for rows, slots in shapes]
        return list(dict.fromkeys([prompts[0], *sizes, *prompts]))

    def build_state(self, size: Size, like: Nest) -> Nest:
        """Returns an empty state of a size, given a state of any size."""
        return keras.tree.map_structure(
            lambda x: ops.zeros((size.rows, size.slots, *x.shape[2:]), x.dtype), like
        )

    def read(
        self,
        size: PromptSize,
        state: Nest,
        tokens: np.ndarray,
        start: int,
        lengths: np.ndarray,
        uniform: np.ndarray,
        rules: Nest,
    ) -> tuple[Nest, Tensor, Tensor]:
        """Runs `Loop.read` for the first chunk of a prompt, `Loop.read_more` for the later ones."""
        read, read_more = self._find_functions(size)
        if start == 0:
            found = read(tokens, lengths, uniform, rules, size.slots)
        else:
            found = read_more(state, tokens, np.int32(start), lengths, uniform, rules)
        if start > 0 or size.time == size.slots:
            self._known.add(size)
        return found

    def insert(self, size: Size, state: Nest, row: Nest, index: int, first: int) -> Nest:
        """Runs `Loop.insert`; `state` is replaced, and must not be used again."""
        insert, _ = self._find_functions(size)
        return insert(state, row, np.int32(index), np.int32(first))[0]

    def write(
        self, size: Size, state: Nest, rows: Nest, slot: int, uniform: np.ndarray, count: int
    ) -> tuple[Nest, Tensor, Tensor]:
        """Runs `Loop.write`; `state` is replaced, and must not be used again."""
        _, write = self._find_functions(size)
        state, (written, end) = write(state, rows, np.int32(slot), uniform, np.int32(count))
        self._known.add(size)
        return state, written, end

    def compile(self, size: Size | PromptSize) -> None:
        """Compiles the programs of a size; another thread may use other sizes meanwhile."""
        if size in self._known:
            return
        if isinstance(size, PromptSize):
            self._read_nothing(size)
            return
        prompt = self.find_prompt_size(1, size.tokens)
        row = self._read_nothing(prompt)
        state, one = (self.build_state(s, row) for s in (size, size._replace(rows=1)))
        state = self.insert(size, state, one, 0, 0)
        rows = {name: np.zeros(size.rows, np.int32) for name in ("token", "position")}
        rules = gather_rules([Sampling(0)] * size.rows)
        uniform = np.zeros((size.rows, EVERY), np.float32)
        _, written, _ = self.write(size, state, {**rows, "rules": rules}, 0, uniform, 1)
        np.array(written)  # waits for the device

    def _read_nothing(self, size: PromptSize) -> Nest:
        """Reads chunks of zeros, which compiles the functions; returns the state."""
        tokens, lengths = np.zeros((1, size.time), np.int32), np.ones(1, np.int32)
        uniform, rules = np.zeros(1, np.float32), gather_rules([Sampling(0)])
        state: Nest = None
        for start in range(0, min(size.slots, 2 * size.time), size.time):
            state, token, _ = self.read(size, state, tokens, start, lengths, uniform, rules)
            np.array(token)  # waits for the device
        return state

    def _build_functions(self, size: Size | PromptSize) -> tuple[Any, Any]:
        loop = Loop(self.decoding, functools.partial(choose, tokens=size.tokens))
        if isinstance(size, PromptSize):
            return self._compiled(loop.read), self._compiled(loop.read_more)
        return (
            self._compiled(loop.insert, replaces_state=True),
            self._compiled(loop.write, replaces_state=True),
        )


def round_up_length(length: int) -> int:
    """Rounds up to 64, 96, 128, 192, 256, and so on, so that few lengths are compiled."""
    whole = _PROMPT << (-(-length // _PROMPT) - 1).bit_length()
    three_quarters = 3 * whole // 4
    return three_quarters if whole > _PROMPT and length <= three_quarters else whole
