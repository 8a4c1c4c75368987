"""Rows of named values as the content of a file: JSON lines, TFRecord, Parquet.

Values are columns by name: arrays (rows, ...) of numbers, or lists of texts. A row that has no
values, only the reason why, keeps the columns `KEYS` and a column "error".
"""

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
_DIGITS = 9  # that tell any two float32 apart

Columns = Mapping[str, Any]
Errors = Mapping[int, str]


def jsonl(columns: Columns, errors: Errors) -> bytes:
    """Returns a JSON object on a line for each row; numbers that JSON does not have are null.

    Args:
        columns: values by name.
        errors: why rows have no values, by their place.
    """
    lines = (json.dumps(row, ensure_ascii=False) for row in _rows(columns, errors, _plain))
    return "".join(f"{line}\n" for line in lines).encode()


def tfrecord(columns: Columns, errors: Errors) -> bytes:
    """Returns a `tf.train.Example` for each row; arrays are flat lists; see `jsonl`."""
    return b"".join(records.frame(_example(row)) for row in _rows(columns, errors, _listed))


def parquet(columns: Columns, errors: Errors) -> bytes:
    """Returns a table, in which the values of a row with an error are null; see `jsonl`.

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
    missing = np.isin(np.arange(_count(columns)), list(errors))
    table = {}
    for name, values in columns.items():
        mask = missing if errors and name not in KEYS else None
        table[name] = _arrow(pyarrow, values, mask)
    if errors:
        table[ERROR] = pyarrow.array([errors.get(n) for n in range(_count(columns))])
    written = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table(table), written)
    return written.getvalue()


def _arrow(pyarrow: Any, values: Any, mask: np.ndarray | None) -> Any:
    """Returns a column of Arrow: numbers, texts, or lists of them, as deep as the array."""
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


def _rows(columns: Columns, errors: Errors, form: Any) -> Iterator[dict[str, Any]]:
    names, formed = list(columns), [form(values) for values in columns.values()]
    for number, values in enumerate(zip(*formed)):
        row = dict(zip(names, values))
        if number in errors:
            row = {**{name: row[name] for name in KEYS}, ERROR: errors[number]}
        yield row


def _plain(values: Any) -> list[Any]:
    """Returns a column as JSON has it: numbers with as many digits as their dtype."""
    array = np.asarray(values)
    if array.dtype.kind != "f":
        return array.tolist()
    wide = array.astype(np.float64)
    fine = np.isfinite(wide)
    size = np.abs(np.where(fine & (wide != 0), wide, 1.0))
    scale = 10.0 ** (_DIGITS - 1 - np.floor(np.log10(size)))
    rounded = np.where(fine, np.rint(np.where(fine, wide, 0.0) * scale) / scale, 0.0)
    if fine.all():
        return rounded.tolist()
    return np.where(fine, rounded.astype(object), None).tolist()


def _listed(values: Any) -> Any:
    array = np.asarray(values)
    return array.reshape(len(array), -1)


def _example(row: Mapping[str, Any]) -> bytes:
    import tensorflow as tf

    features = {name: _feature(tf, value) for name, value in row.items()}
    return tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString(
        deterministic=True
    )


def _feature(tf: Any, value: Any) -> Any:
    if isinstance(value, str):
        return tf.train.Feature(bytes_list=tf.train.BytesList(value=[value.encode()]))
    if value.dtype.kind == "f":
        return tf.train.Feature(float_list=tf.train.FloatList(value=value))
    if value.dtype.kind in "iub":
        return tf.train.Feature(int64_list=tf.train.Int64List(value=value))
    texts = [str(item).encode() for item in value]
    return tf.train.Feature(bytes_list=tf.train.BytesList(value=texts))


def _count(columns: Columns) -> int:
    return len(next(iter(columns.values())))
