"""Converts text to a model's tokens, and tokens to text."""

import codecs
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from tftpu.config import DataConfig, Experiment
from tftpu.errors import UserError
from tftpu.input_pipelines import sources
from tftpu.input_pipelines.convert import packing
from tftpu.input_pipelines.formats import manifest
from tftpu.launch.settings.options import flag
from tftpu.models.keras_hub.config import KerasHub

_BYTES = 256
_UNFINISHED = "\N{REPLACEMENT CHARACTER}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextOptions:
    """The options of commands that generate text with a trained language model."""

    tokenizer: str | None = flag(
        None,
        "tokenizer.json that made the data",
        metavar="FILE",
        shown="the tokenizer of the run's config, or bytes",
    )
    stop: str | None = flag(
        None,
        "token of the tokenizer that ends a text; where tokens are bytes, a character",
        metavar="TOKEN",
        shown="data.end_of_text of the run, or the end tokens of KerasHub's model",
    )


class Codec(Protocol):
    """A converter between text and the tokens of a vocabulary.

    Attributes:
        size: the number of tokens in the vocabulary.
    """

    size: int

    def encode(self, text: str) -> list[int]:
        """Returns the tokens of a text."""
        ...

    def build_decoder(self, prompt: Sequence[int]) -> Callable[[Sequence[int]], str]:
        """Returns a function that maps a text's next tokens to the characters that they complete.

        Args:
            prompt: the tokens before the text.
        """
        ...


class ByteCodec:
    """A vocabulary whose 256 tokens are the bytes of UTF-8."""

    size = _BYTES

    def encode(self, text: str) -> list[int]:
        """Returns the bytes of a text.

        Raises:
            UserError: the text contains half of a surrogate pair, which has no bytes.
        """
        try:
            # Arguments from a shell may contain bytes that are not UTF-8.
            found = text.encode(errors="surrogateescape")
        except UnicodeEncodeError as error:
            raise _build_encoding_error(text, error) from error
        return list(found)

    def build_decoder(self, prompt: Sequence[int]) -> Callable[[Sequence[int]], str]:
        """Returns a function that maps the next bytes to the characters that they complete."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        return lambda tokens: decoder.decode(bytes(tokens))


class TokenizerFile:
    """A vocabulary in a file of Hugging Face `tokenizers`.

    Args:
        path: the path of a tokenizer.json.

    Raises:
        UserError: the package `tokenizers` is missing, or the file cannot be read.
    """

    def __init__(self, path: str):
        self._path = path
        self._encode, self.size = packing.build_tokenizer(path)
        self._tokenizer = packing.load_tokenizer(path)

    def encode(self, text: str) -> list[int]:
        """Returns the tokens of a text.

        Raises:
            UserError: the text contains half of a surrogate pair, or a byte that is not UTF-8.
        """
        _check_encoding(text)
        return self._encode(text).tolist()

    def find_token(self, name: str) -> int:
        """Returns the id of a token.

        Raises:
            UserError: there is no such token.
        """
        found = self._tokenizer.token_to_id(name)
        if found is None:
            raise UserError(f"The tokenizer {self._path} has no token {name!r}.")
        return found

    def build_decoder(self, prompt: Sequence[int]) -> Callable[[Sequence[int]], str]:
        """Returns a function that maps the next tokens to the characters that they complete."""
        return _build_decoder(self._tokenizer.decode, prompt)


class TaskCodec:
    """The vocabulary of a language model of KerasHub.

    Args:
        config: the config of the model.

    Raises:
        UserError: the model writes no texts, or its preset cannot be loaded.
    """

    def __init__(self, config: KerasHub):
        from tftpu.models.keras_hub.texts import TaskTokenizer

        self._tokenizer = TaskTokenizer(config)
        self.size = self._tokenizer.size
        self.find_token, self.find_stops = self._tokenizer.find_token, self._tokenizer.find_stops

    def encode(self, text: str) -> list[int]:
        """Returns the tokens of a text; errors are those of `TokenizerFile.encode`."""
        _check_encoding(text)
        return self._tokenizer.encode(text)

    def build_decoder(self, prompt: Sequence[int]) -> Callable[[Sequence[int]], str]:
        """Returns a function that maps the next tokens to the characters that they complete."""
        return _build_decoder(self._tokenizer.decode, prompt)


def _build_decoder(
    decode_all: Callable[[Sequence[int]], str], prompt: Sequence[int]
) -> Callable[[Sequence[int]], str]:
    seen = list(prompt)
    said = len(decode_all(seen))

    def decode(tokens: Sequence[int]) -> str:
        nonlocal said
        seen.extend(tokens)
        whole = decode_all(seen)
        # A prompt may itself end in the replacement character.
        end = max(said, len(whole.rstrip(_UNFINISHED)))
        new, said = whole[said:end], end
        return new

    return decode


def _check_encoding(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise _build_encoding_error(text, error) from error


def _build_encoding_error(text: str, error: UnicodeEncodeError) -> UserError:
    return UserError(
        f"A text contains {text[error.start]!r}, which is not a valid character: give text that "
        "can be encoded as UTF-8."
    )


def choose_codec(experiment: Experiment, tokenizer: str | None = None) -> Codec:
    """Returns the vocabulary of a run.

    Args:
        experiment: the experiment of the run.
        tokenizer: the path of a tokenizer.json; None: the tokenizer of the model's preset or of the
            data, or bytes.

    Raises:
        UserError: the meaning of the data's tokens is unknown, or a tokenizer cannot be loaded.
    """
    data, model = experiment.data, experiment.model
    if isinstance(model, KerasHub) and not tokenizer:
        return TaskCodec(model)
    path = tokenizer or getattr(data, "tokenizer", None)
    if path:
        return TokenizerFile(path)
    if has_byte_tokens(data):
        return ByteCodec()
    raise UserError(
        f"The meaning of the tokens of {type(data).__name__} is unknown: give the tokenizer that "
        "made them with --tokenizer=FILE (a tokenizer.json). A classifier writes no text: use "
        "tftpu predict."
    )


def find_stop_tokens(data: DataConfig, codec: Codec, given: str | None, model: Any) -> list[int]:
    """Returns the tokens that end a text; [] if there are none.

    Args:
        data: the data of the run.
        codec: the vocabulary.
        given: the name of a token, or a character if tokens are bytes; None: `end_of_text` of the
            data, or the end tokens of KerasHub's model.
        model: the Keras model.

    Raises:
        UserError: the vocabulary has no such token, or the character has several bytes.
    """
    name = given or getattr(data, "end_of_text", None)
    if name is None:
        return codec.find_stops(model) if isinstance(codec, TaskCodec) else []
    if isinstance(codec, TokenizerFile | TaskCodec):
        return [codec.find_token(name)]
    found = codec.encode(name)
    if len(found) > 1:
        raise UserError(
            f"--stop={name} has {len(found)} bytes, and each token of this run is a byte: give a "
            "character of one byte, such as --stop=$'\\n' for the end of a line."
        )
    return found


def has_byte_tokens(data: DataConfig) -> bool:
    """Returns whether data without a tokenizer contain the bytes of UTF-8 text."""
    if isinstance(data, sources.Text) or getattr(data, "train_text", ""):
        return True
    folder = getattr(data, "data_dir", None)
    return bool(folder) and manifest.read(folder).about.get("tokenizer") == "bytes"
