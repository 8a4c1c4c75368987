"""Reads text files and tables of any origin, with their formats, encodings and line ends.

The suffix (in upper or lower case, before .gz) names the format:

    .jsonl .ndjson    a JSON object on each line
    .json             an array of objects, one object, or an object on each line
    .csv .tsv         a table, whose first line names the columns

A file with another suffix is text, unless it holds JSON: one object or array, or an object on each
of its first two lines. The content shows whether a file is compressed (gzip). All files are UTF-8,
with or without a byte order mark. Lines end as on Linux or Windows, and not at other characters
such as U+2028. Blank lines of tables are skipped. Any other content is an error that names the
file.
"""

import contextlib
import csv
import gzip
import io
import json
import logging
import os
import re
import zlib
from collections.abc import Iterator
from typing import Any, BinaryIO, NamedTuple

from tftpu.errors import UserError
from tftpu.input_pipelines.formats import tfrecord

_log = logging.getLogger(__name__)

JSON_LINES = (".jsonl", ".ndjson")
_JSON = ".json"
_DELIMITERS = {".csv": ",", ".tsv": "\t"}
TABLES = (*_DELIMITERS, *JSON_LINES, _JSON)
_TEXT = ""  # the format of files that are not tables
_LONGEST_FIELD = (1 << 31) - 1  # characters; Python's limit of 131,072 is too low for texts
_MARK = b"\xef\xbb\xbf"  # the byte order mark of UTF-8
_GZIP = b"\x1f\x8b"
_NOT_UTF8 = re.compile("[\udc80-\udcff]")  # how "surrogateescape" decodes bytes that are not UTF-8
_CONVERT = "Text is UTF-8, plain or compressed with gzip: convert the file, or leave it out."
_WINDOWS = (
    f"{_CONVERT} If it is from Windows in Western Europe, use "
    "`iconv -f WINDOWS-1252 -t UTF-8 FILE > NEW`."
)
_UTF16 = "It is UTF-16: convert it with `iconv -f UTF-16 -t UTF-8 FILE > NEW`."
_UTF32 = "It is UTF-32: convert it with `iconv -f UTF-32 -t UTF-8 FILE > NEW`."
_ARCHIVE = "It is an archive, such as a workbook of Excel: save its table or text as UTF-8."
_BEGINNINGS = {
    b"\xff\xfe\0\0": _UTF32,  # comes before UTF-16, whose mark is the first half of this one
    b"\0\0\xfe\xff": _UTF32,
    b"\xff\xfe": _UTF16,
    b"\xfe\xff": _UTF16,
    b"PK\x03\x04": _ARCHIVE,
}
_OTHER_DELIMITERS = (";", "\t", "|", ",")  # signs that a table has the wrong suffix
_RENAME = (
    "Rename the field that holds the text, or name it: --field=content for `tftpu data convert`, "
    "--config.data.field=content for a config with Tokens."
)
# A quoted column name, followed by the delimiter.
_QUOTED_COLUMN = re.compile(rb'"(?:[^"]|"")*" *([;\t|,])')


class Row(NamedTuple):
    """A record of a table.

    Attributes:
        place: the line (or the element of an array) and the file, for error messages.
        values: the values by column.
    """

    place: str
    values: dict[str, Any]


def join_patterns(given: Any) -> Any:
    """Returns a list of file patterns as a text with commas between them; else what was given."""
    return ",".join(map(str, given)) if isinstance(given, list | tuple) else given


def check_not_folders(patterns: str, prefix: str) -> None:
    """Raises `UserError` if one of several file patterns is the path of a local folder.

    Args:
        patterns: patterns with commas between them.
        prefix: the text before the patterns in the user's command, such as "data.train_text=".
    """
    for pattern in patterns.split(","):
        if os.path.isdir(pattern):
            raise UserError(
                f"{prefix}{pattern} is a folder: name the files in it, as "
                f"{prefix}{pattern.rstrip('/')}/*."
            )


def find_suffix(path: str) -> str:
    """Returns the suffix that names a file's format, in lower case and without .gz."""
    return os.path.splitext(path.lower().removesuffix(".gz"))[1]


def read_rows(path: str, skip_spaces: bool = False) -> Iterator[Row]:
    """Yields the records of a table in order.

    Args:
        path: the path of the file, local or in a bucket.
        skip_spaces: whether spaces after a separator, for example before quotes, are left out.

    Raises:
        UserError: the file is not a table, or a record cannot be read; the message names the file
            and the line.
    """
    with _open_file(path) as file:
        found = _detect_format(path, file)
        if found == _TEXT:
            raise UserError(
                f"{path} is not a table: give JSON, or a file that ends in {', '.join(TABLES)}."
            )
        yield from _read_rows(path, file, found, 0, None, skip_spaces)


def is_table(path: str) -> bool:
    """Returns whether a file is a table, by its name or its content.

    Args:
        path: the path of the file, local or in a bucket.
    """
    with _open_file(path) as file:
        return _detect_format(path, file) != _TEXT


def list_columns(path: str) -> list[str]:
    """Returns the columns of a table's first record; [] for text, and JSON that is read whole.

    Args:
        path: the path of the file, local or in a bucket.
    """
    with _open_file(path) as file:
        found = _detect_format(path, file)
        if found in (_TEXT, _JSON):  # a JSON array can only be read as a whole
            return []
        row = next(_read_rows(path, file, found, 0, None), None)
        return list(row.values) if row else []


def read_documents(
    path: str, field: str, begin: int = 0, end: int | None = None
) -> Iterator[tuple[str, str]]:
    """Yields (place, text) for each text in a file. A text file is a single text.

    Args:
        path: the path of the file, local or in a bucket.
        field: the field that holds the text, in a table.
        begin, end: for JSON lines, only records that begin in this range of bytes are read; `end`
            None: up to the end of the file.

    Raises:
        UserError: a text cannot be read, or a record has none; the message names the file and the
            line.
    """
    with _open_file(path) as file:
        yield from _read_documents(path, file, field, begin, end)


def read_texts(
    path: str, data: bytes, field: str, advice: str = _RENAME, other_field: str = ""
) -> Iterator[tuple[str, str]]:
    """Yields (place, text) for each line of a text file, even if blank, or each text of a table.

    Args:
        path: the path of the file, whose suffix names the format.
        data: its content.
        field: the field that holds the text, in a table.
        advice: the end of the error message for a record without the field.
        other_field: the field that holds the text in records without `field`; "": none.

    Raises:
        UserError: as for `read_documents`.
    """
    with _decompress(path, io.BufferedReader(io.BytesIO(data))) as file:
        for place, text in _read_documents(path, file, field, 0, None, advice, other_field):
            if place != path:
                yield place, text
                continue
            for number, line in enumerate(text.rstrip("\n").split("\n"), 1):
                yield f"line {number} of {path}", line


@contextlib.contextmanager
def _open_file(path: str) -> Iterator[Any]:
    """Opens a file, through a decompressor if it is compressed.

    Raises:
        UserError: there is no such file, or its compressed data are damaged.
    """
    with tfrecord.open_file(path) as raw, _decompress(path, raw) as file:
        yield file


@contextlib.contextmanager
def _decompress(path: str, raw: Any) -> Iterator[Any]:
    if not _peek(raw).startswith(_GZIP):
        yield raw
        return
    try:
        yield gzip.GzipFile(fileobj=raw)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(f"{path} cannot be decompressed: {error}.") from error


def _peek(file: Any) -> bytes:
    """Returns some of the next bytes without moving the file's position."""
    return file.peek(1 << 12)


def _detect_format(path: str, file: Any) -> str:
    """Returns the format of a file opened at its beginning: one of `TABLES`, or `_TEXT`."""
    found = find_suffix(path)
    if found in (*_DELIMITERS, *JSON_LINES):
        return found
    start = _peek(file).removeprefix(_MARK).lstrip()[:1]
    if start == b"{":
        lines = (line for line in file if line.removeprefix(_MARK).strip())
        first, second = next(lines), next(lines, b"")
        file.seek(0)
        if _is_json(first) and (found == _JSON or not second or second.lstrip()[:1] == b"{"):
            return JSON_LINES[0]
    if found == _JSON:
        return found
    if start in (b"{", b"["):
        whole = file.read()
        file.seek(0)
        if _is_json(whole):
            return _JSON
    return _TEXT


def _is_json(data: bytes) -> bool:
    try:
        json.loads(data.removeprefix(_MARK))
    except (ValueError, RecursionError):
        return False
    return True


def _read_documents(
    path: str,
    file: Any,
    first_field: str,
    begin: int,
    end: int | None,
    advice: str = _RENAME,
    other_field: str = "",
) -> Iterator[tuple[str, str]]:
    found = _detect_format(path, file)
    if found == _TEXT:
        # Normalises line ends, as Python's text mode does.
        yield path, _decode_text(file.read(), path).replace("\r\n", "\n").replace("\r", "\n")
        return
    empty = True
    for place, row in _read_rows(path, file, found, begin, end):
        field = other_field if other_field and first_field not in row else first_field
        empty, text = False, row.get(field)
        if field not in row:
            raise UserError(
                f"{place}: the record has no field {field!r}, only {sorted(row)}. {advice}"
            )
        yield place, check_text(text, field, place)
    if empty and not begin:
        _log.warning("%s holds no texts: it was read as %s and has no records.", path, found)


def check_text(value: Any, field: str, place: str) -> str:
    """Returns the value of a record's field; raises `UserError` unless it is a text."""
    if isinstance(value, str):
        return value
    advice = "put it in quotes, or leave the record out."
    if isinstance(value, list | dict):
        advice = (
            "write the texts in it to separate fields, such as a question and its answer, and set "
            "data.prompt and data.field to their names."
        )
    raise UserError(
        f"{place}: the field {field!r} is {json.dumps(value)[:80]}, not a text: {advice}"
    )


def _read_rows(
    path: str, file: Any, found: str, begin: int, end: int | None, skip_spaces: bool = False
) -> Iterator[Row]:
    if found in _DELIMITERS:
        return _read_table(path, file, _DELIMITERS[found], skip_spaces)
    if found == _JSON:
        return _read_json_rows(path, file)
    # A GZIP file cannot be read from the middle, so the reader of the first range reads all of it.
    if isinstance(file, gzip.GzipFile):
        return iter(()) if begin else _read_json_lines(path, file, 0, None)
    return _read_json_lines(path, file, begin, end)


def _read_table(path: str, file: BinaryIO, delimiter: str, skip_spaces: bool) -> Iterator[Row]:
    csv.field_size_limit(_LONGEST_FIELD)
    start = _peek(file).removeprefix(_MARK).lstrip()
    # A byte that is not UTF-8 becomes half of a surrogate pair, so that `_check_lines` can name its
    # line. The encoding utf-8-sig would read a truncated byte order mark as an empty file.
    text = io.TextIOWrapper(file, "utf-8", errors="surrogateescape", newline="")
    reader = csv.reader(
        _check_lines(text, path), delimiter=delimiter, strict=True, skipinitialspace=skip_spaces
    )
    header: list[str] = []
    try:
        for values in reader:
            # Excel may write lines of separators alone; they count as blank.
            if not any(value.strip() for value in values):
                continue
            place = f"line {reader.line_num} of {path}"
            if header:
                yield Row(place, _map_columns(place, values, header))
                continue
            header = [name.strip() for name in values]
            # A quoted name may contain any delimiter.
            others = () if start.startswith(b'"') else _OTHER_DELIMITERS
            found = [o for o in others if o != delimiter and o in header[0]]
            if len(header) == 1 and found:
                raise UserError(
                    f"{_describe_delimiters(path, found[0], delimiter)}, or put the name in "
                    "quotes if it is the only column."
                )
            twice = {name for name in header if name and header.count(name) > 1}
            if twice:
                raise UserError(f"{path} has several columns named {min(twice)!r}.")
    except csv.Error as error:
        # R and LibreOffice quote the first column's name; the character behind it is the delimiter.
        first = None if header else _QUOTED_COLUMN.match(start)
        if first and (other := first[1].decode()) != delimiter:
            raise UserError(f"{_describe_delimiters(path, other, delimiter)}.") from error
        raise UserError(
            f"{path} is not a valid table after line {reader.line_num}: {error}. If a value "
            "contains quotes, double them, and put the value in quotes."
        ) from error


def _describe_delimiters(path: str, found: str, needed: str) -> str:
    """Returns the error message for a table with the wrong separator, without its final period."""
    return (
        f"The first line of {path} is separated by {found!r}, not by {needed!r}: save the table "
        f"with {needed!r}"
    )


def _check_lines(lines: Iterator[str], path: str) -> Iterator[str]:
    for number, line in enumerate(lines, 1):
        # Most lines are ASCII, and the check for it costs next to nothing.
        if not line.isascii() and (wrong := _NOT_UTF8.search(line)):
            byte = os.fsencode(wrong[0])[0]
            advice = _advise(line.encode(errors="surrogateescape"))
            raise UserError(f"line {number} of {path} is not UTF-8: byte {byte:#04x}. {advice}")
        _check_text(line, f"line {number} of {path}")
        yield line.removeprefix("\ufeff") if number == 1 else line


def _map_columns(place: str, values: list[str], header: list[str]) -> dict[str, str]:
    if any(values[len(header) :]):
        raise UserError(
            f"{place} has {len(values)} values, but the table has {len(header)} columns: put "
            "values that contain a separator in quotes."
        )
    return dict(zip(header, values))


def _read_json_rows(path: str, file: Any) -> Iterator[Row]:
    found = _parse_json(_decode_text(file.read(), path), path)
    if isinstance(found, dict):
        found = [found]
    elif not isinstance(found, list):
        raise UserError(f"{path} holds neither JSON objects nor an array of them.")
    for number, row in enumerate(found):
        place = f"element {number} of {path}"
        yield Row(place, _check_object(row, place))


def _read_json_lines(path: str, file: Any, begin: int, end: int | None) -> Iterator[Row]:
    """Yields the rows of the lines that begin in a range of bytes of a file."""
    if begin:
        file.seek(begin - 1)
        file.readline()
    number, position = 0, file.tell()
    while (end is None or position < end) and (line := file.readline()):
        number += 1
        place = f"the line at byte {position} of {path}" if begin else f"line {number} of {path}"
        position += len(line)
        text = _decode_text(line, place)
        if text.strip():
            yield Row(place, _check_object(_parse_json(text, place), place))


def _parse_json(text: str, place: str) -> Any:
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        line = "" if place.startswith(("line ", "the line ")) else f"line {error.lineno}, "
        where = f"{line}column {error.colno}"
        raise UserError(f"{place} is not JSON: {error.msg} ({where}).") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{place} is not JSON: {error}") from error
    if "\\u" in text:
        try:
            json.dumps(found, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise UserError(f"{place} contains an unpaired surrogate: {error}") from error
    return found


def _check_object(found: Any, place: str) -> dict[str, Any]:
    if not isinstance(found, dict):
        raise UserError(f"{place} is not a JSON object.")
    return found


def _decode_text(data: bytes, place: str) -> str:
    try:
        text = data.removeprefix(_MARK).decode()
    except UnicodeDecodeError as error:
        # `error.object` is the decoded data, without the byte order mark.
        line = error.object.count(b"\n", 0, error.start) + 1
        where = f"line {line} of {place}" if b"\n" in data.rstrip() else place
        byte = error.object[error.start]
        raise UserError(f"{where} is not UTF-8: byte {byte:#04x}. {_advise(data)}") from error
    _check_text(text, place)
    return text


def _advise(data: bytes) -> str:
    """Returns advice on how to convert a file or a line that is not UTF-8."""
    for beginning, advice in _BEGINNINGS.items():
        if data.startswith(beginning):
            return advice
    return _CONVERT if b"\0" in data else _WINDOWS


def _check_text(text: str, place: str) -> None:
    if "\0" in text:
        raise UserError(
            f"{place} contains a zero byte, so it is binary, UTF-16 or UTF-32. {_CONVERT}"
        )
