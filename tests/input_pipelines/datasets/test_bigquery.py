"""BigQuery: the real clients against services on loopback; broken streams; exact order."""

import datetime
import json

import grpc
import numpy as np
import pyarrow as pa
import pytest
import tensorflow as tf

from tests.support.fakes import fake_bigquery
from tftpu import input_pipelines
from tftpu.config import DataContext
from tftpu.errors import UserError
from tftpu.input_pipelines.convert import beam, converter, verify
from tftpu.input_pipelines.convert.conversion import Conversion
from tftpu.input_pipelines.convert.readers.reader import ReadOptions
from tftpu.input_pipelines.datasets import bigquery, bigquery_clients, bigquery_load
from tftpu.input_pipelines.formats import manifest
from tftpu.input_pipelines.sources import BigQuery

ROWS = 100
TABLE = pa.table(
    {
        "id": pa.array(range(ROWS), pa.int64()),
        "x": pa.array(np.arange(ROWS * 4.0).reshape(ROWS, 4).tolist(), pa.list_(pa.float64())),
        "name": [f"row {n}" for n in range(ROWS)],
        "even": [n % 2 == 0 for n in range(ROWS)],
        "part": pa.array([None if n == 40 else n for n in range(ROWS)], pa.int64()),
        "ragged": pa.array([[1] * (1 + n % 2) for n in range(ROWS)], pa.list_(pa.int64())),
        "day": pa.array([datetime.date(2026, 1, 1)] * ROWS),
    }
)


@pytest.fixture
def service(monkeypatch):
    tables = {"d.t": TABLE, "d.empty": TABLE.slice(0, 0), "results.query": TABLE.slice(0, 10)}
    fake = fake_bigquery.BigQuery(tables)
    with fake_bigquery.serving(fake) as clients:
        made = bigquery_clients.Clients(*clients)
        monkeypatch.setattr(bigquery_clients, "connect", lambda: made)
        yield fake


def test_a_table_is_read_completely_in_several_streams(service):
    columns = bigquery.Table("p.d.t", ("id", "x", "name", "even")).read()
    order = np.argsort(columns["id"])
    assert columns["id"][order].tolist() == list(range(ROWS))
    assert columns["x"].dtype == np.float32
    assert np.array_equal(columns["x"][order], np.arange(ROWS * 4).reshape(ROWS, 4))
    assert columns["name"][order][7] == b"row 7"
    assert columns["even"][order].tolist() == [1, 0] * (ROWS // 2)
    request, _ = service.sessions[0]
    assert len({name for name, _ in service.reads}) == 3
    assert list(request.read_session.read_options.selected_fields) == ["id", "x", "name", "even"]


@pytest.mark.parametrize("code", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNKNOWN])
def test_a_broken_stream_resumes_where_it_broke(service, code):
    whole = bigquery.Table("p.d.t", ("id",)).read()["id"]
    service.breaks, service.code = 4, code
    service.reads.clear()
    assert bigquery.Table("p.d.t", ("id",)).read()["id"].tolist() == whole.tolist()
    assert service.breaks == 0
    # Each time the stream broke after two batches of 7 rows.
    assert {offset for _, offset in service.reads} - {0} <= {14, 28}


def test_a_table_is_read_as_of_its_last_change_or_the_time_given(service):
    bigquery.Table("p.d.t", ("id",))
    bigquery.Table("p.d.t", ("id",), "2026-11-20T12:00:00Z")
    times = [r.read_session.table_modifiers.snapshot_time for r, _ in service.sessions]
    assert times[0].timestamp() * 1000 == service.modified
    assert times[1] == datetime.datetime(2026, 11, 20, 12, tzinfo=datetime.UTC)


def test_a_query_is_run_and_its_result_read(service):
    query = "SELECT id FROM d.t LIMIT 10"
    assert sorted(bigquery.Table(query, ("id",)).read()["id"]) == list(range(10))
    assert service.query == query


def data(**changes) -> BigQuery:
    given = {"train_table": "p.d.t", "eval_table": "p.d.t", "features": ("x",), "label": "id"}
    return BigQuery(**{**given, "global_batch_size": 8, **changes})


def test_training_is_the_same_whatever_order_bigquery_gives_and_resumes_exactly(service):
    def batches(step, count):
        stream = input_pipelines.training(data(), seed=3).starting_at(step)
        return [(x.tolist(), y.tolist()) for x, y in stream.take(count).as_numpy_iterator()]

    whole = batches(0, 20)
    service.shuffle, service.streams = 1, 2
    assert batches(5, 15) == whole[5:]
    epoch = [label for _, labels in whole for label in labels][:ROWS]
    assert sorted(epoch) == list(range(ROWS))


def test_the_state_of_training_holds_the_content_of_the_rows(service):
    assert "content" in input_pipelines.describe_state(input_pipelines.training(data()))


def test_batches_match_the_spec(service):
    spec = input_pipelines.batch_spec(data(), 8)
    assert spec == (tf.TensorSpec((8, 4), tf.float32), tf.TensorSpec((8,), tf.int32))
    assert input_pipelines.training(data()).starting_at(0).element_spec == spec
    evaluated = [y for _, labels in input_pipelines.evaluation(data()) for y in labels.numpy()]
    assert sorted(evaluated) == list(range(ROWS))


def test_shards_of_a_table_are_the_same_whatever_order_bigquery_gives(service, tmp_path):
    def conversion(folder):
        options = ReadOptions(features=("id", "x", "name", "even"))
        return Conversion("bigquery:p.d.t", str(tmp_path / folder), options, min_shards=4)

    def content(folder):
        return {path.name: path.read_bytes() for path in (tmp_path / folder).iterdir()}

    made = converter.run(conversion("one"), workers=1, say=lambda *_: None)
    service.shuffle, service.streams, service.breaks = 1, 2, 1
    converter.run(conversion("two"), workers=1, say=lambda *_: None)
    assert content("one") == content("two")
    assert verify.run(str(tmp_path / "one"), workers=1)[1] == []
    assert made.count_examples("train") == ROWS
    assert made.features["x"] == manifest.Feature("float32", (4,), "raw")
    said = []
    converter.run(conversion("one"), workers=1, say=said.append)
    assert "already" in said[0]
    # The table changes, so its conversion is another data set.
    service.modified += 1
    with pytest.raises(UserError, match="from other data or with other options"):
        converter.run(conversion("one"), workers=1)
    with pytest.raises(UserError, match="convert without a runner"):
        beam.run(conversion("beam"), ["--runner=DirectRunner"])


def test_a_partial_conversion_of_another_session_is_read_again(service, tmp_path, monkeypatch):
    options = ReadOptions(features=("id",))
    whole = Conversion("bigquery:p.d.t", str(tmp_path / "whole"), options)
    half = Conversion("bigquery:p.d.t", str(tmp_path / "half"), options)
    converter.run(whole, workers=1, say=lambda *_: None)
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(Conversion, "plan_shards", lambda *_: 1 / 0)
        converter.run(half, workers=1, say=lambda *_: None)
    service.shuffle = 1
    converter.run(half, workers=1, say=lambda *_: None)
    assert [p.read_bytes() for p in (tmp_path / "whole").iterdir()] == [
        p.read_bytes() for p in (tmp_path / "half").iterdir()
    ]


@pytest.mark.parametrize(
    ("what", "features", "sentence"),
    [
        ("p.d.tt", (), "BigQuery has no p.d.tt"),
        ("p.d.t", ("idd",), "Did you mean 'id'"),
        ("p.d.t", ("part",), "There is a NULL in the column 'part'"),
        ("p.d.t", ("ragged",), r"different lengths \(\[1, 2\]\)"),
        ("p.d.t", ("day",), "has the type date32"),
        ("p.d.empty", ("id",), "p.d.empty is empty"),
    ],
)
def test_unreadable_data_fail_with_a_clear_error(service, what, features, sentence):
    with pytest.raises(UserError, match=sentence):
        bigquery.Table(what, features).read()


def test_arrays_whose_length_changes_between_batches_fail_with_a_clear_error(service):
    service.tables["d.two"] = pa.table({"x": pa.array([[1.0], [1, 2], [1, 2]])})  # three streams
    with pytest.raises(UserError, match=r"'x' of p\.d\.two have different lengths \(\[1, 2\]\)"):
        bigquery.Table("p.d.two").read()


def test_a_service_that_refuses_fails_with_a_clear_error(service):
    service.breaks, service.code = 100, grpc.StatusCode.PERMISSION_DENIED
    with pytest.raises(UserError, match=r"roles/bigquery.dataViewer"):
        bigquery.Table("p.d.t", ("id",)).read()
    with pytest.raises(UserError, match="The snapshot yesterday is not a time"):
        bigquery.Table("p.d.t", ("id",), "yesterday")
    with pytest.raises(UserError, match="works only with a table"):
        bigquery.Table("SELECT 1", (), "2026-11-20")


def test_a_missing_project_fails_with_a_clear_error(tmp_path, monkeypatch):
    key = {"type": "authorized_user", "client_id": "a", "client_secret": "b", "refresh_token": "c"}
    (tmp_path / "key.json").write_text(json.dumps(key))
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "key.json"))
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path))
    monkeypatch.delenv("GOOGLE_CLOUD_PROJECT", raising=False)
    with pytest.raises(UserError, match="set GOOGLE_CLOUD_PROJECT"):
        bigquery.Table("p.d.t")


def test_rows_are_predicted_in_one_order_with_the_columns_that_are_kept(service):
    data = BigQuery(
        train_table="p.d.t", eval_table="p.d.t", features=("x",), label="", global_batch_size=8
    )
    context = DataContext(0, 8, keep=("id", "name"))  # other columns need not fit into records
    found = data.prediction("bigquery:p.d.t", context)
    service.shuffle = 1
    again = data.prediction("evaluation", context)
    assert found.count == again.count == ROWS and found.identity == again.identity
    kept = found.read_fields(range(10, 20), ["id", "name"])
    assert kept["name"].tolist() == [f"row {n}" for n in kept["id"]]
    [batch, _] = found.features([range(10, 20)])
    np.testing.assert_array_equal(batch[:, 0], 4.0 * kept["id"][:8])


def test_files_are_loaded_into_a_table_once(service):
    uris = ["gs://b/0.parquet", "gs://b/1.parquet"]
    name = bigquery_load.load(uris, "p.d.new", "these")
    assert service.tables["d.new"]["uris"].to_pylist() == uris
    load = service.loads[name]["configuration"]["load"]
    assert (load["sourceFormat"], load["writeDisposition"]) == ("PARQUET", "WRITE_EMPTY")
    assert load["parquetOptions"] == {"enableListInference": True}
    assert service.loads[name]["jobReference"]["location"] == "europe-west4"
    assert bigquery_load.load(uris, "p.d.new", "these") == name and len(service.loads) == 1
    with pytest.raises(UserError, match=r"p\.d\.new has rows already"):
        bigquery_load.load(uris, "p.d.new", "others")


def test_a_load_that_failed_is_tried_again_by_another_job(service):
    service.refuses = [{"reason": "backendError", "message": "Error encountered"}]
    with pytest.raises(UserError, match=r"BigQuery fails to write p\.d\.new: .*Error encountered"):
        bigquery_load.load(["gs://b/0.parquet"], "p.d.new", "these")
    assert "d.new" not in service.tables
    assert bigquery_load.load(["gs://b/0.parquet"], "p.d.new", "these").endswith("-1")
    assert "d.new" in service.tables
