"""Documents of text as sequences of fixed length: tokenised, packed without padding.

The tokens of all documents are concatenated and cut into sequences of `context` + 1 tokens that
overlap by one: a model reads the first `context` and predicts the last `context`. `segments` counts
the documents of a sequence from 1; 0 is padding, at the end of the last sequence. Attention stays
within a segment, and a token is predicted if its predecessor is in the same segment. So every token
except the first of each document is predicted exactly once.
"""

import contextlib
import functools
import logging
import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from tftpu.errors import UserError
from tftpu.storage import files

_log = logging.getLogger(__name__)

Tokenizer = Callable[[str], np.ndarray]


def build_tokenizer(
    path: str | None, end_of_text: str | None = None, flag: str = "--tokenizer"
) -> tuple[Tokenizer, int]:
    """Returns a function from a document to its tokens, int32; and the size of the vocabulary.

    Args:
        path: a file of Hugging Face `tokenizers` (tokenizer.json), whose truncation and padding
            are switched off; None: the bytes of the text in UTF-8.
        end_of_text: a token of that vocabulary that is put after every document; None: no token.
        flag: the command-line flag of the path, for error messages.

    Raises:
        UserError: the file or its package is missing or fails, or `end_of_text` is not a token.
    """
    if not path:
        if end_of_text:
            raise UserError("end_of_text needs a tokenizer: bytes have no token for it.")
        return lambda text: np.frombuffer(text.encode(), np.uint8).astype(np.int32), 256
    loaded = load_tokenizer(path, flag)
    with _errors_of_the_library(path):
        highest = max(loaded.get_vocab(with_added_tokens=True).values(), default=-1)
    if highest >= 1 << 31:
        raise UserError(f"The tokenizer {path} has the token id {highest}: it must be below 2**31.")
    end = loaded.token_to_id(end_of_text) if end_of_text else None
    if end_of_text and end is None:
        raise UserError(f"The tokenizer {path} has no token {end_of_text!r}.")
    tail = [] if end is None else [end]
    if asked := _find_padding_settings(loaded):
        loaded.no_truncation()
        loaded.no_padding()
        _warn_switched_off(path, " and ".join(asked))

    def tokenize(text: str) -> np.ndarray:
        with _errors_of_the_library(path):
            ids = loaded.encode(text, add_special_tokens=False).ids
        return np.array(ids + tail, np.int32)

    return tokenize, max(highest + 1, loaded.get_vocab_size(with_added_tokens=True))


def list_switched_off(path: str | None) -> list[str]:
    """Returns which of "truncation" and "padding" a tokenizer's file enables; packing ignores them.

    They are meant for batches of requests to a model. In training they would drop text, or train on
    padding.
    """
    return _find_padding_settings(load_tokenizer(path)) if path else []


def _find_padding_settings(loaded: Any) -> list[str]:
    return [name for name in ("truncation", "padding") if getattr(loaded, name)]


@functools.cache
def _warn_switched_off(path: str, asked: str) -> None:
    if multiprocessing.parent_process() is None:  # warns in the first process of a conversion only
        _log.warning(
            "The tokenizer %s enables %s, which is switched off here: whole documents are packed.",
            path,
            asked,
        )


def load_tokenizer(path: str, flag: str = "--tokenizer") -> Any:
    """Returns the `tokenizers.Tokenizer` of a file.

    Args:
        path: the path of a tokenizer.json.
        flag: as for `build_tokenizer`.

    Raises:
        UserError: the file does not exist or cannot be read, or the package is missing.
    """
    try:
        import tokenizers
    except ImportError as error:
        raise UserError("A tokenizer needs a package: run `pip install tokenizers`.") from error
    if not os.path.isfile(path):
        near = files.suggest_existing(path)
        raise UserError(
            f"The tokenizer {path} cannot be read: there is no such file.{near} Give the path of "
            f"that tokenizer.json: {flag}=FILE."
        )
    with _errors_of_the_library(path):
        return tokenizers.Tokenizer.from_file(path)


@contextlib.contextmanager
def _errors_of_the_library(path: str) -> Iterator[None]:
    """Converts errors of `tokenizers`, which have no specific class, to `UserError`."""
    try:
        yield
    except BaseException as error:
        # A panic in the tokenizer's Rust code derives from BaseException.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise UserError(f"The tokenizer {path} cannot be used: {error}") from error


def pack(documents: Iterable[np.ndarray], context: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Packs documents, in order, into sequences of fixed length.

    Args:
        documents: the tokens of each document, (any length,), int32.
        context: the number of tokens that a model reads at once.

    Yields:
        (tokens, segments), both (context + 1,), int32.
    """
    length = context + 1
    tokens, numbers = np.zeros(0, np.int32), np.zeros(0, np.int64)
    fresh = 0  # number of tokens that no sequence contains yet

    def pad_sequence(tokens: np.ndarray, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        segments = np.cumsum(np.diff(numbers, prepend=numbers[:1]) != 0) + 1
        pad = (0, length - len(tokens))
        return np.pad(tokens, pad), np.pad(segments.astype(np.int32), pad)

    for number, document in enumerate(documents):
        tokens = np.concatenate([tokens, document])
        numbers = np.concatenate([numbers, np.full(len(document), number)])
        fresh += len(document)
        start = 0
        while len(tokens) - start >= length:
            yield pad_sequence(tokens[start : start + length], numbers[start : start + length])
            start += context
            fresh = len(tokens) - start - 1
        tokens, numbers = tokens[start:], numbers[start:]
    if fresh > 0:
        yield pad_sequence(tokens, numbers)
