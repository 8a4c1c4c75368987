"""BigQuery tables and queries through the Storage Read API: Arrow streams, read in parallel.

A stream that breaks resumes at the row where it broke (Google's client does that by offset).

The rows are exact as of one point in time: a table is read as it was at `snapshot`, or when it was
last changed. BigQuery returns rows in no fixed order, and distributes them over streams
arbitrarily. So both ways of using a table sort the rows by a hash of each row:

- `training` holds the rows in memory and resumes as exactly as any data set in memory, for as long
  as BigQuery keeps the table's state of that time (seven days).
- `tftpu data convert` makes the same shards from the same rows; a killed conversion reads the table
  again. Use it for tables that do not fit into memory.

A query runs again in every process; the query itself decides whether it returns the same rows.
"""

import concurrent.futures
import datetime
import hashlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from tftpu.config import DataContext
from tftpu.errors import UserError, did_you_mean
from tftpu.input_pipelines import addresses, unlabelled
from tftpu.input_pipelines.datasets import arrays, batches
from tftpu.input_pipelines.datasets import bigquery_clients as clients
from tftpu.input_pipelines.formats.manifest import Feature
from tftpu.input_pipelines.reading.epochs import ArrayPipeline
from tftpu.input_pipelines.tensors import Spec
from tftpu.input_pipelines.unlabelled import UnlabelledRecords

if TYPE_CHECKING:
    from tftpu.input_pipelines.tables import BigQuery

STREAMS = 8  # streams read at a time

Batch = dict[str, np.ndarray]  # (rows, ...) by column


class Table:
    """A table, or the result of a query.

    Args:
        what: `project.dataset.table`, or a query, `SELECT ...` or `WITH ...`.
        features: names of the columns to read; (): all.
        snapshot: the time to read a table at, as 2026-11-20T12:00:00Z; None: its last change.

    Raises:
        UserError: there is no such table or column, records cannot hold a column, or permission is
            missing.
    """

    def __init__(self, what: str, features: tuple[str, ...] = (), snapshot: str | None = None):
        is_query = what.lstrip()[:6].upper().startswith(("SELECT", "WITH"))
        if is_query and snapshot:
            raise UserError(
                "A snapshot works only with a table. In a query, write FOR SYSTEM_TIME AS OF "
                "instead."
            )
        with clients.explained(what):
            table = _run_query(what) if is_query else clients.connect().tables.get_table(what)
        known = [field.name for field in table.schema]
        for name in features:
            if name not in known:
                raise UserError(f"{what} has no column {name!r}.{did_you_mean(name, known)}")
        self._columns = list(features) or known
        time = None if is_query else _parse_time(snapshot) if snapshot else table.modified
        self._path = f"projects/{table.project}/datasets/{table.dataset_id}/tables/{table.table_id}"
        with clients.explained(what):
            session = _create_session(table.project, self._path, self._columns, time)
        self._what = what
        self._session_name = session.name
        self._schema = session.arrow_schema.serialized_schema
        self.parts: list[str] = [stream.name for stream in session.streams]
        self.state = [what if is_query else self._path, self._columns, str(time)]
        self.features = self._describe_rows()

    def read_batches(self, part: str) -> Iterator[Batch]:
        """Yields the rows of a stream in batches."""
        import pyarrow

        schema = pyarrow.ipc.read_schema(pyarrow.py_buffer(self._schema))
        row = 0
        with clients.explained(self._what):
            for message in clients.connect().rows.read_rows(part):
                found = message.arrow_record_batch.serialized_record_batch
                batch = pyarrow.ipc.read_record_batch(pyarrow.py_buffer(found), schema)
                yield {
                    name: _convert_column(
                        batch.column(name), f"the column {name!r} of {self._what}", row
                    )
                    for name in self._columns
                }
                row += batch.num_rows

    def read_examples(self, part: str) -> Iterator[dict[str, Any]]:
        """Yields the rows of a stream, one at a time."""
        for batch in self.read_batches(part):
            for values in zip(*batch.values()):
                yield dict(zip(batch, values))

    def read(self) -> Batch:
        """Returns all rows, sorted by their hashes; raises `UserError` if there are none."""
        with concurrent.futures.ThreadPoolExecutor(STREAMS) as pool:
            streams = list(pool.map(lambda part: list(self.read_batches(part)), self.parts))
        batches = [batch for stream in streams for batch in stream]
        if not batches:
            raise UserError(f"{self._what} is empty.")
        for name in self._columns:  # the rows of a batch have one length, but batches may differ
            lengths = {size for batch in batches for size in batch[name].shape[1:]}
            if len(lengths) > 1:
                raise _explain_lengths(f"the column {name!r} of {self._what}", lengths)
        columns = {n: np.concatenate([batch[n] for batch in batches]) for n in self._columns}
        hashes = [
            hashlib.blake2b(
                b"".join(_encode_value(value) for value in row), digest_size=16
            ).digest()
            for row in zip(*columns.values())
        ]
        order = sorted(range(len(hashes)), key=hashes.__getitem__)
        return {name: column[order] for name, column in columns.items()}

    def _describe_rows(self) -> dict[str, Feature]:
        """Infers features from the first rows, because the schema lacks the lengths of arrays."""
        for part in self.parts:
            for batch in self.read_batches(part):
                return {name: _infer_feature(values) for name, values in batch.items()}
        self.parts = []
        return {}


def build_training(data: "BigQuery", context: DataContext) -> ArrayPipeline:
    """Returns shuffled rows, in memory; see `reading.order` for the order."""
    batch = _arrange_rows(data, data.train_table)
    return ArrayPipeline(
        batch,
        context.global_batch_size,
        context.seed,
        lambda examples, seeds: examples,
        from_files=True,
    )


def build_evaluation(data: "BigQuery", context: DataContext) -> tf.data.Dataset:
    """Returns a data set of every row, once, in batches."""
    batch = _arrange_rows(data, data.eval_table)
    return tf.data.Dataset.from_tensor_slices(batch).batch(context.global_batch_size)


def build_prediction(data: "BigQuery", address: str, context: DataContext) -> UnlabelledRecords:
    """Returns the rows of a table to predict, in memory; the table may be the run's or another."""
    kind, table = addresses.parse_address(address, "BigQuery", data.address_kinds)
    snapshot = None  # `data.snapshot` holds only for the run's own tables
    if kind != "bigquery":
        table = data.eval_table if kind == addresses.EVALUATION else data.train_table
        snapshot = data.snapshot
    wanted = tuple(dict.fromkeys((*data.features, *context.keep)))
    rows = Table(table, wanted, snapshot).read()
    found = {name: _infer_feature(values) for name, values in rows.items()}
    batches.build_spec(
        found, data.features, "", examples=1
    )  # raises `UserError` for missing features and for strings
    narrow = {name: arrays.to_device_array(rows[name]) for name in data.features}
    features = batches.arrange_batch(narrow, data.features, "")
    columns = {name: _decode_texts(rows[name]) for name in context.keep}
    return unlabelled.from_arrays(features, context, table, columns)


def batch_spec(data: "BigQuery", examples: int) -> Spec:
    """Returns the spec of a batch: (features, label)."""
    found = Table(data.train_table, _list_columns(data), data.snapshot).features
    return batches.build_spec(found, data.features, data.label, examples=examples)


def _arrange_rows(data: "BigQuery", table: str) -> Any:
    found = Table(table, _list_columns(data), data.snapshot)
    # Raises `UserError` for missing features and for strings.
    batches.build_spec(found.features, data.features, data.label, examples=1)
    values = {name: arrays.to_device_array(column) for name, column in found.read().items()}
    return batches.arrange_batch(values, data.features, data.label)


def _list_columns(data: "BigQuery") -> tuple[str, ...]:
    return (*data.features, data.label) if data.label else data.features


def _create_session(
    project: str, path: str, columns: list[str], time: datetime.datetime | None
) -> Any:
    from google.cloud.bigquery_storage_v1 import types

    wanted = types.ReadSession(
        table=path,
        data_format=types.DataFormat.ARROW,
        read_options=types.ReadSession.TableReadOptions(selected_fields=columns),
    )
    if time:
        wanted.table_modifiers = types.ReadSession.TableModifiers(snapshot_time=time)
    return clients.connect().rows.create_read_session(
        parent=f"projects/{project}", read_session=wanted, max_stream_count=STREAMS
    )


def _run_query(query: str) -> Any:
    """Runs a query and returns the temporary table of its rows."""
    job = clients.connect().tables.query(query)
    job.result(max_results=0)
    return clients.connect().tables.get_table(job.destination)


def _parse_time(text: str) -> datetime.datetime:
    try:
        time = datetime.datetime.fromisoformat(text)
    except ValueError as error:
        raise UserError(
            f"The snapshot {text} is not a time: write it as 2026-11-20T12:00:00Z."
        ) from error
    return time if time.tzinfo else time.replace(tzinfo=datetime.UTC)


def _convert_column(column: Any, what: str, first: int) -> np.ndarray:
    """Converts an Arrow column to an array (rows, ...) of a dtype that records support.

    Raises:
        UserError: the column has a NULL, arrays of different lengths, or an unsupported type.
    """
    import pyarrow

    if column.null_count:
        raise UserError(
            f"There is a NULL in {what}, in row {first + column.is_null().index(True).as_py()} of "
            "a stream: use a query that leaves out such rows, or fills them with IFNULL."
        )
    kind = column.type
    if pyarrow.types.is_list(kind):
        inner = _convert_column(column.flatten(), what, first)
        lengths = set(np.diff(column.offsets.to_numpy()).tolist())
        if len(lengths) != 1:
            raise _explain_lengths(what, lengths)
        return inner.reshape(len(column), -1)
    if pyarrow.types.is_integer(kind):
        return column.to_numpy(zero_copy_only=False).astype(np.int64)
    if pyarrow.types.is_floating(kind):
        return column.to_numpy(zero_copy_only=False).astype(np.float32)
    if pyarrow.types.is_boolean(kind):
        return column.to_numpy(zero_copy_only=False).astype(np.uint8)
    if pyarrow.types.is_string(kind) or pyarrow.types.is_binary(kind):
        values = [v.encode() if isinstance(v, str) else v for v in column.to_pylist()]
        return np.array(values, object)
    raise UserError(
        f"{what} has the type {kind}, which records cannot hold: leave it out of `features`, or "
        "CAST it in a query."
    )


def _explain_lengths(what: str, lengths: set[int]) -> UserError:
    return UserError(
        f"The arrays in {what} have different lengths ({sorted(lengths)[:5]}): records need the "
        "same length in every row."
    )


def _decode_texts(values: np.ndarray) -> Any:
    """Returns a column, with bytes decoded to texts."""
    return unlabelled.decode_texts(values) if values.dtype == object else values


def _infer_feature(values: np.ndarray) -> Feature:
    shape = values.shape[1:]
    if values.dtype == object:
        return Feature("string", shape)
    return Feature(values.dtype.name, shape, "raw" if shape else "list")


def _encode_value(value: Any) -> bytes:
    data = value if isinstance(value, bytes) else value.tobytes()
    return len(data).to_bytes(8, "little") + data
