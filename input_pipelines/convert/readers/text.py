"""Text files and tables of texts, tokenised and packed."""

import functools
import os
from collections.abc import Iterator

from tftpu.amounts import format_size
from tftpu.errors import UserError, counted
from tftpu.input_pipelines.convert import packing
from tftpu.input_pipelines.convert.readers.reader import (
    Example,
    OrderedReader,
    Part,
    ReadOptions,
)
from tftpu.input_pipelines.formats import text_files
from tftpu.input_pipelines.formats.manifest import Feature
from tftpu.input_pipelines.reading import listing
from tftpu.storage import buckets, files

PART_BYTES = 64 << 20


class TextReader(OrderedReader):
    """Reader of text files (one document each) and of JSON and tables (one in each record), packed.

    Args:
        patterns: the patterns of the files, separated by commas; a file that matches several of
            them is read once.
        options: `tokenizer`, `end_of_text`, `context` and `field` are used.
        prefix: the text before the patterns in the user's command, for error messages.

    Raises:
        UserError: an option is not allowed, the tokenizer cannot be used, or a pattern matches no
            text.
    """

    def __init__(self, patterns: str, options: ReadOptions, prefix: str = "text:"):
        if options.context < 1:
            raise UserError(f"context is {options.context}: it must be 1 or more.")
        text_files.check_not_folders(patterns, prefix)
        self._options = options
        self._patterns = [pattern for pattern in patterns.split(",") if pattern]
        sizes: dict[str, int] = {}
        known: set[str] = set()
        for pattern in self._patterns:
            found = listing.find_matches(pattern)
            if not any(found.values()):
                advice = _advise(pattern, prefix, is_there=bool(found))
                flag = f" In a config: --config.{prefix}PATTERN." if "data." in prefix else ""
                raise UserError(f"There is nothing in {prefix}{pattern}.{advice}{flag}")
            sizes |= listing.select_new(found, known)
        flag = "--config.data.tokenizer" if "data." in prefix else "--tokenizer"
        _, vocabulary = packing.build_tokenizer(options.tokenizer, options.end_of_text, flag)
        dtype = "uint16" if vocabulary <= 1 << 16 else "int32"
        length = (options.context + 1,)
        features = {
            "tokens": Feature("uint8" if vocabulary <= 256 else dtype, length, "raw"),
            "segments": Feature("uint16" if options.context < 1 << 16 else "int32", length, "raw"),
        }
        about = {
            "context": options.context,
            "vocabulary": vocabulary,
            "tokenizer": os.path.basename(options.tokenizer) if options.tokenizer else "bytes",
            "tokenizer_crc32c": options.tokenizer
            and buckets.describe_file(options.tokenizer).crc32c,
            "end_of_text": options.end_of_text,
        }
        super().__init__(features, _cut_parts(sizes), about)
        size, parts = format_size(sum(sizes.values())), counted(len(self.parts), "part")
        found = f"{counted(len(sizes), 'file')} of text, {size}"
        self.notes.append(f"{found}, to tokenize and pack in {parts}")
        self.notes += _describe_columns(next(iter(sizes)), options.field)

    @property
    def state(self) -> list[Part]:
        # Older versions of tftpu applied truncation and padding, so their output is another data
        # set.
        return [*self.parts, *packing.list_switched_off(self._options.tokenizer), self._checksums]

    @functools.cached_property
    def _checksums(self) -> dict[str, str]:
        """The checksums of the files, because an edit may leave their sizes unchanged."""
        found: dict[str, str] = {}
        for pattern in self._patterns:
            found |= listing.list_checksums(pattern)
        return found

    def read_examples(self, part: Part) -> Iterator[Example]:
        tokens, _ = packing.build_tokenizer(self._options.tokenizer, self._options.end_of_text)
        documents = (tokens(text) for piece in part for text in self._read(*piece))
        for sequence, segments in packing.pack(documents, self._options.context):
            yield {"tokens": sequence, "segments": segments}

    def _read(self, path: str, begin: int, end: int) -> Iterator[str]:
        """Yields the documents that begin in a range of bytes of a file."""
        for _, text in text_files.read_documents(path, self._options.field, begin, end):
            yield text


def _describe_columns(path: str, field: str) -> list[str]:
    """Returns a line about the columns of a table that are not read, such as labels."""
    columns = text_files.list_columns(path)
    others = [name for name in columns if name != field]
    if field not in columns or not others:
        return []
    return [
        f"{path}: only {field!r} is read, as tokens for a language model, not "
        f"{', '.join(map(repr, others))}. To train on labels of texts, see "
        "docs/gallery/labelled-texts.md."
    ]


def _advise(pattern: str, prefix: str, is_there: bool) -> str:
    """Returns advice about a pattern that matches no text.

    Args:
        pattern, prefix: as for `TextReader`.
        is_there: whether the pattern matches files, which are then all empty.
    """
    if set("*?[").intersection(pattern):
        return " The files are empty: name others." if is_there else ""
    if is_there:
        return " The file is empty: name another one."
    if os.path.splitext(pattern)[1] and "://" not in pattern:
        return f" There is no such file.{files.suggest_existing(pattern)}"
    return f" Name the files in a folder, as {prefix}{pattern.rstrip('/')}/*."


def _cut_parts(sizes: dict[str, int]) -> list[Part]:
    """Divides files into parts [[path, begin, end], ...]: small files, or ranges of large ones.

    Only files of JSON lines are divided.
    """
    parts: list[Part] = []
    room = 0
    for path, size in sizes.items():
        in_parts = path.lower().endswith(text_files.JSON_LINES)
        step = PART_BYTES if in_parts else max(size, 1)
        for begin in range(0, size, step):
            piece = [path, begin, min(begin + step, size)]
            if room < piece[2] - begin:
                parts.append([])
                room = PART_BYTES
            parts[-1].append(piece)
            room -= piece[2] - begin
    return parts
