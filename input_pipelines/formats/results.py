"""Encodes rows of named values as a file: JSON lines, CSV, TFRecord or Parquet.

Values are columns by name: arrays (rows, ...) of numbers, or lists of texts. A row without values
keeps the columns `KEYS` and has the reason in a column "error".
"""

import csv as csv_files
import functools
import io
import json
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from tftpu import installation
from tftpu.errors import UserError
from tftpu.input_pipelines.formats import tfrecord as records

KEYS = ("file", "record")
ERROR = "error"
_DIGITS = 9  # decimal digits that distinguish any two float32 values
_MASK = (1 << 64) - 1  # a negative number is encoded as an unsigned one of 64 bits

Columns = Mapping[str, Any]
Errors = Mapping[int, str]


def jsonl(columns: Columns, errors: Errors) -> bytes:
    """Returns JSON lines, an object for each row. Numbers that are not finite become null.

    Args:
        columns: the values by name.
        errors: the reasons why rows have no values, by row number.
    """
    encode = json.JSONEncoder(ensure_ascii=False).encode
    rows = iterate_rows(columns, errors)
    return "".join([f"{encode(row)}\n" for row in rows]).encode(errors="surrogateescape")


def csv(columns: Columns, errors: Errors, with_errors: bool = False) -> bytes:
    """Returns a CSV table with a header, quoted as in RFC 4180.

    A list is one cell, as JSON. Values that `jsonl` writes as null are empty cells.

    Args:
        columns, errors, with_errors: as for `parquet`.
    """
    encode = json.JSONEncoder(ensure_ascii=False).encode
    names = [*columns, ERROR] if errors or with_errors else [*columns]
    written = io.StringIO(newline="")
    lines = csv_files.DictWriter(written, names)
    lines.writeheader()
    for row in iterate_rows(columns, errors):
        as_is = (str, type(None))
        lines.writerow({n: v if isinstance(v, as_is) else encode(v) for n, v in row.items()})
    return written.getvalue().encode(errors="surrogateescape")


def tfrecord(columns: Columns, errors: Errors) -> bytes:
    """Returns a TFRecord file: a `tf.train.Example` for each row, with arrays as flat lists.

    The bytes are built directly, because protobuf messages may take longer than the predictions.
    Values of the same size share the first bytes of a column's entries, which are cached.
    """
    if errors:
        columns = {**columns, ERROR: [errors.get(n, "") for n in range(_count_rows(columns))]}
    entries = {name: _encode_entries(name, columns[name]) for name in sorted(columns)}
    rows = zip(*entries.values())
    if errors:
        rows = (_drop_values(entries, n, row, errors) for n, row in enumerate(rows))
    return records.frame_records(lambda size: b"\x0a" + _encode_varint(size), map(b"".join, rows))


def _drop_values(
    entries: Mapping[str, Any], number: int, row: tuple[bytes, ...], errors: Errors
) -> tuple[bytes, ...]:
    """Returns a row's encoded columns; a row with an error keeps only `KEYS` and the reason."""
    kept = [*KEYS, ERROR] if number in errors else [name for name in entries if name != ERROR]
    return tuple(part for name, part in zip(entries, row) if name in kept)


def parquet(columns: Columns, errors: Errors, with_errors: bool = False) -> bytes:
    """Returns a Parquet file; the values of a row with an error are null.

    Args:
        columns, errors: as for `jsonl`.
        with_errors: whether to write the column "error" even without errors, so that all files have
            the same columns.

    Raises:
        UserError: pyarrow is not installed.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise UserError(
            f"--format=parquet needs pyarrow: run `{installation.command('bigquery')}`."
        ) from error
    missing = np.isin(np.arange(_count_rows(columns)), list(errors))
    table = {}
    for name, values in columns.items():
        mask = missing if errors and name not in KEYS else None
        table[name] = _to_arrow(pyarrow, values, mask)
    if errors or with_errors:
        reasons = [errors.get(n) for n in range(_count_rows(columns))]
        table[ERROR] = pyarrow.array(reasons, pyarrow.string())
    written = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table(table), written)
    return written.getvalue()


def _to_arrow(pyarrow: Any, values: Any, mask: np.ndarray | None) -> Any:
    """Returns a column for Arrow: numbers, texts, or lists of them, nested like the array."""
    array = np.asarray(values)
    if array.ndim == 1:
        return pyarrow.array(array if array.dtype.kind != "U" else list(values), mask=mask)
    found = pyarrow.array(
        array.reshape(-1).tolist() if array.dtype.kind in "OU" else array.reshape(-1)
    )
    for depth in reversed(range(1, array.ndim)):
        size, count = array.shape[depth], int(np.prod(array.shape[:depth]))
        offsets = np.arange(count + 1, dtype=np.int32) * size
        nulls = pyarrow.array(mask) if mask is not None and depth == 1 else None
        found = pyarrow.ListArray.from_arrays(pyarrow.array(offsets), found, mask=nulls)
    return found


def iterate_rows(columns: Columns, errors: Errors) -> Iterator[dict[str, Any]]:
    """Yields the JSON object of each row as a dict; see `jsonl`."""
    names, plain = list(columns), [_to_plain(values) for values in columns.values()]
    for number, values in enumerate(zip(*plain)):
        row = dict(zip(names, values))
        if number in errors:
            row = {**{name: row[name] for name in KEYS if name in row}, ERROR: errors[number]}
        yield row


def _to_plain(values: Any) -> list[Any]:
    """Converts a column to JSON values: floats with their dtype's digits, None if not finite."""
    array = np.asarray(values)
    if array.dtype.kind != "f":
        return array.tolist()
    wide = array.astype(np.float64)
    fine = np.isfinite(wide)
    if array.dtype.itemsize < wide.dtype.itemsize:
        size = np.abs(np.where(fine & (wide != 0), wide, 1.0))
        scale = 10.0 ** (_DIGITS - 1 - np.floor(np.log10(size)))
        wide = np.where(fine, np.rint(np.where(fine, wide, 0.0) * scale) / scale, 0.0)
    if fine.all():
        return wide.tolist()
    known = wide.astype(object)
    known[~fine] = None
    return known.tolist()


def _encode_entries(name: str, values: Any) -> list[bytes]:
    """Encodes a column: for each row, its entry in `tf.train.Features`, as protobuf bytes."""
    key = _encode_message(1, name.encode())
    if isinstance(values, list) and all(isinstance(value, str) for value in values):
        return [_encode_texts(key, (value,)) for value in values]
    array = np.asarray(values)
    flat = array.reshape(len(array), -1)
    if array.dtype.kind == "f":
        data, size = flat.astype("<f4").tobytes(), 4 * flat.shape[1]
        begin = _encode_begin(size, 2, key)
        return [begin + data[n * size : (n + 1) * size] for n in range(len(array))]
    if array.dtype.kind not in "iub":
        return [_encode_texts(key, tuple(row)) for row in flat.tolist()]
    if flat.shape[1] == 1:
        packed = [_encode_varint(item & _MASK) for item in flat[:, 0].tolist()]
    else:
        packed = [b"".join([_encode_varint(item & _MASK) for item in row]) for row in flat.tolist()]
    return [_encode_begin(len(items), 3, key) + items for items in packed]


@functools.lru_cache(maxsize=1024)  # many rows have the same file or class
def _encode_texts(key: bytes, texts: tuple[str, ...]) -> bytes:
    listed = b"".join([_encode_message(1, text.encode()) for text in texts])
    return _encode_message(1, key + _encode_message(2, _encode_message(1, listed)))


@functools.lru_cache(maxsize=1024)  # the rows of a column have few different sizes
def _encode_begin(size: int, kind: int, key: bytes) -> bytes:
    """Returns the start of an entry before its numbers: key, kind of list, and lengths."""
    packed = b"\x0a" + _encode_varint(size)
    listed = _encode_tag(kind) + _encode_varint(len(packed) + size) + packed
    feature = _encode_tag(2) + _encode_varint(len(listed) + size) + listed
    return _encode_tag(1) + _encode_varint(len(key) + len(feature) + size) + key + feature


def _encode_message(field: int, content: bytes) -> bytes:
    return _encode_tag(field) + _encode_varint(len(content)) + content


def _encode_tag(field: int) -> bytes:
    return bytes([field << 3 | 2])  # wire type 2: the length of the value follows


@functools.lru_cache(maxsize=1 << 16)
def _encode_varint(number: int) -> bytes:
    found = bytearray()
    while number > 127:
        found.append(number & 127 | 128)
        number >>= 7
    return bytes([*found, number])


def _count_rows(columns: Columns) -> int:
    return len(next(iter(columns.values())))
