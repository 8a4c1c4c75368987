"""Text files and JSON lines, tokenised and packed."""

import os
from collections.abc import Iterator

from tftpu.errors import UserError
from tftpu.input_pipelines.convert import packing
from tftpu.input_pipelines.convert.readers.reader import (
    Example,
    OrderedReader,
    Part,
    ReadOptions,
)
from tftpu.input_pipelines.formats import lines, tfrecord
from tftpu.input_pipelines.formats.manifest import Feature
from tftpu.input_pipelines.reading import listing

PART_BYTES = 64 << 20


class TextReader(OrderedReader):
    """Text files, one document each, or JSON lines (.jsonl), as packed sequences.

    Args:
        pattern: of the files.
        options: tokenizer, context, field.
    """

    def __init__(self, pattern: str, options: ReadOptions):
        if options.context < 1:
            raise UserError(f"context is {options.context}: it must be 1 or more.")
        self._options = options
        _, vocabulary = packing.tokenizer(options.tokenizer, options.end_of_text)
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
        }
        super().__init__(features, _cut(listing.matching(pattern)), about)

    @property
    def state(self) -> list[Part]:
        # An older tftpu truncated and padded: what it converted is another data set.
        return [*self.parts, *packing.switched_off(self._options.tokenizer)]

    def examples(self, part: Part) -> Iterator[Example]:
        tokens, _ = packing.tokenizer(self._options.tokenizer, self._options.end_of_text)
        documents = (tokens(text) for piece in part for text in self._read(*piece))
        for sequence, segments in packing.pack(documents, self._options.context):
            yield {"tokens": sequence, "segments": segments}

    def _read(self, path: str, begin: int, end: int) -> Iterator[str]:
        """Yields the documents that begin in a range of bytes of a file."""
        with tfrecord.opened(path) as file:
            if not path.endswith(".jsonl"):
                yield lines.utf8(file.read(), path)
                return
            # A line belongs to the part in which it begins.
            if begin:
                file.seek(begin - 1)
                file.readline()
            while file.tell() < end:
                place = f"the line at byte {file.tell()} of {path}"
                line = file.readline()
                if line.strip():
                    yield self._document(lines.utf8(line, place), place)

    def _document(self, line: str, place: str) -> str:
        row = lines.json_object(line, place)
        document = row.get(self._options.field)
        if not isinstance(document, str):
            raise UserError(
                f"{place}: there is no text in the field {self._options.field!r}; it has "
                f"{sorted(row)}. Set `field` to the right one."
            )
        return document


def _cut(sizes: dict[str, int]) -> list[Part]:
    """Cuts files into parts [[path, begin, end], ...]: some small files, or a range of a large one.

    Only JSON lines are cut inside a file.
    """
    parts: list[Part] = []
    room = 0
    for path, size in sizes.items():
        step = PART_BYTES if path.endswith(".jsonl") else max(size, 1)
        for begin in range(0, size, step):
            piece = [path, begin, min(begin + step, size)]
            if room < piece[2] - begin:
                parts.append([])
                room = PART_BYTES
            parts[-1].append(piece)
            room -= piece[2] - begin
    return parts
