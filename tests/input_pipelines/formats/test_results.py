"""Rows of values as files: JSON lines, CSV, TFRecord, Parquet."""

import csv
import io
import json

import numpy as np
import pyarrow.parquet
import pytest
import tensorflow as tf

from tftpu.input_pipelines.formats import results

COLUMNS = {
    "file": ["ä", "b", "c"],
    "record": [0, 1, 300],
    "logits": np.array([[1 / 3, -1e-30], [3e38, 0.0], [np.nan, np.inf]], np.float32),
    "names": np.array([["x", "y"], ["z", ""], ["ü", "w"]], object),
    "grid": np.arange(12, dtype=np.int32).reshape(3, 2, 2) - 6,
    "fine": np.array([True, False, True]),
}


def test_json_lines_tell_float32_apart_and_have_no_nan():
    found = [json.loads(line) for line in results.jsonl(COLUMNS, {}).splitlines()]
    assert found[2]["logits"] == [None, None]
    exact = np.array([row["logits"] for row in found[:2]]).astype(np.float32)
    np.testing.assert_array_equal(exact, COLUMNS["logits"][:2])
    assert found[0]["grid"] == [[-6, -5], [-4, -3]]
    assert found[1] | {"logits": 0, "grid": 0} == {
        **{"file": "b", "record": 1, "names": ["z", ""], "fine": False},
        **{"logits": 0, "grid": 0},
    }


def test_any_float32_survives_json():
    drawn = np.random.default_rng(0).integers(0, 1 << 32, 20_000, np.uint64)
    values = drawn.astype(np.uint32).view(np.float32)
    values = values[np.isfinite(values)]
    found = results.jsonl({"v": values}, {}).splitlines()
    again = np.array([json.loads(line)["v"] for line in found]).astype(np.float32)
    np.testing.assert_array_equal(again, values)


@pytest.mark.parametrize("dtype", ["<f8", ">f8"])
def test_float64_keeps_all_digits_also_beside_values_that_are_not_finite(dtype):
    values = [1 / 3, 1e-305, 5e-324, -1.7976931348623157e308, 0.1 + 0.2]
    columns = {"v": np.array([*values, np.nan, np.inf], dtype)}
    found = [json.loads(line)["v"] for line in results.jsonl(columns, {}).splitlines()]
    assert found == [*values, None, None]


def test_a_table_of_csv_is_quoted_and_has_the_same_values():
    texts = ['say "hi", you', "two\r\nlines", "ü;\t"]
    scores = np.array([1 / 3, np.nan, -np.inf], np.float32)
    columns = {**COLUMNS, "text": texts, "score": scores}
    data = results.csv(columns, {})
    lines = data.split(b"\r\n")
    assert lines[0] == b"file,record,logits,names,grid,fine,text,score"
    assert lines[1].endswith(b'"[[-6, -5], [-4, -3]]",true,"say ""hi"", you",0.333333343')
    found = list(csv.DictReader(io.StringIO(data.decode(), newline="")))
    assert [row["text"] for row in found] == texts
    assert [row["score"] for row in found[1:]] == ["", ""]
    for row, line in zip(found, results.jsonl(columns, {}).splitlines(), strict=True):
        expected = json.loads(line)
        for name in ("record", "logits", "names", "grid", "fine"):
            assert json.loads(row[name]) == expected[name]
        assert row["file"] == expected["file"]


def test_all_tables_of_csv_have_the_same_header():
    good, bad = (results.csv(COLUMNS, errors, True) for errors in ({}, {1: "no image"}))
    assert good.split(b"\r\n")[0] == bad.split(b"\r\n")[0]
    assert good.split(b"\r\n")[0].endswith(b",fine,error")


def test_examples_have_the_bytes_of_protobuf(tmp_path):
    (tmp_path / "f").write_bytes(results.tfrecord(COLUMNS, {}))
    found = [r.numpy() for r in tf.data.TFRecordDataset(str(tmp_path / "f"))]

    def feature(value):
        flat = np.asarray(value).reshape(-1)
        if flat.dtype.kind == "f":
            return tf.train.Feature(float_list=tf.train.FloatList(value=flat))
        if flat.dtype.kind in "iub":
            return tf.train.Feature(int64_list=tf.train.Int64List(value=flat.astype(int)))
        texts = [str(text).encode() for text in flat]
        return tf.train.Feature(bytes_list=tf.train.BytesList(value=texts))

    for n, record in enumerate(found):
        row = {name: feature(values[n]) for name, values in COLUMNS.items()}
        example = tf.train.Example(features=tf.train.Features(feature=row))
        assert record == example.SerializeToString(deterministic=True)
    assert len(found) == 3


def test_a_table_of_parquet_has_the_same_values():
    table = pyarrow.parquet.read_table(io.BytesIO(results.parquet(COLUMNS, {})))
    found = table.to_pydict()
    np.testing.assert_array_equal(np.array(found["logits"], np.float32), COLUMNS["logits"])
    for name in ("names", "grid", "fine"):
        assert found[name] == COLUMNS[name].tolist()
    assert found["file"] == COLUMNS["file"] and found["record"] == [0, 1, 300]


@pytest.mark.parametrize("numbered", [True, False])
@pytest.mark.parametrize("form", ["jsonl", "csv", "tfrecord", "parquet"])
def test_a_bad_record_has_its_key_and_the_reason(tmp_path, form, numbered):
    columns = {name: held for name, held in COLUMNS.items() if numbered or name != "record"}
    data = getattr(results, form)(columns, {1: "no image"})
    if form == "parquet":
        row = pyarrow.parquet.read_table(io.BytesIO(data)).to_pylist()[1]
        row = {name: value for name, value in row.items() if value is not None}
    elif form == "csv":
        row = list(csv.DictReader(io.StringIO(data.decode(), newline="")))[1]
        row = {name: int(v) if name == "record" else v for name, v in row.items() if v}
    elif form == "jsonl":
        row = json.loads(data.splitlines()[1])
    else:
        (tmp_path / "f").write_bytes(data)
        example = tf.train.Example.FromString(
            [r.numpy() for r in tf.data.TFRecordDataset(str(tmp_path / "f"))][1]
        )
        kinds = {"file": "bytes_list", "record": "int64_list", "error": "bytes_list"}
        kinds = {name: kind for name, kind in kinds.items() if numbered or name != "record"}
        assert set(example.features.feature) == set(kinds)
        row = {
            name: getattr(example.features.feature[name], kind).value[0]
            for name, kind in kinds.items()
        }
        row = {k: v.decode() if isinstance(v, bytes) else v for k, v in row.items()}
    assert row == {"file": "b", **({"record": 1} if numbered else {}), "error": "no image"}
