"""Any index of images and any tokenizer is read or refused with one clear error."""

import json
from pathlib import Path

import pytest
from hypothesis import strategies as st

from tests.support.hostile.fuzzing import ANY_JSON, damaged, fuzzed, only_user_errors, reshaped
from tests.support.hostile.texts import tokenizer
from tftpu.input_pipelines.convert import packing
from tftpu.input_pipelines.reading import image_index

ROWS = [{"image": "a.png", "label": 0}, {"image": "b.png", "label": "1"}]
CSV = "image,label\na.png,0\nb.png,1\n"


def read(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    for name in ("a.png", "b.png"):
        (path.parent / name).write_bytes(b"image")
    with only_user_errors():
        found = image_index.list_in_index(str(path))
        for image in found.images:
            assert Path(image.path).parent == path.parent
            assert 0 <= image.label < found.num_classes


@fuzzed(60, content=damaged(CSV.encode()) | st.text(max_size=64).map(str.encode))
def test_any_csv(tmp_path, content):
    read(tmp_path / "t.csv", content)


@fuzzed(50, rows=st.lists(reshaped(ROWS[0]) | ANY_JSON, max_size=3))
def test_any_rows_of_json(tmp_path, rows):
    read(tmp_path / "t.jsonl", "\n".join(map(json.dumps, rows)).encode())


@fuzzed(50, content=damaged("\n".join(map(json.dumps, ROWS)).encode()))
def test_damaged_rows_of_json(tmp_path, content):
    read(tmp_path / "t.jsonl", content)


def tokenize(path: Path) -> None:
    with only_user_errors():
        tokens, vocabulary = packing.build_tokenizer(str(path))
        assert all(0 <= token < vocabulary for token in tokens("ab a b ba <end>"))


def test_the_tokenizer_is_read(tmp_path):
    (tmp_path / "t.json").write_text(tokenizer())
    assert packing.build_tokenizer(str(tmp_path / "t.json"))[0]("ab a b ab").tolist() == [
        2,
        0,
        1,
        2,
    ]


@pytest.mark.filterwarnings("ignore")
@fuzzed(60, content=damaged(tokenizer().encode()) | st.binary(max_size=32))
def test_damaged_tokenizers(tmp_path, content):
    (tmp_path / "t.json").write_bytes(content)
    tokenize(tmp_path / "t.json")


@fuzzed(60, value=reshaped(json.loads(tokenizer())))
def test_any_tokenizer(tmp_path, value):
    (tmp_path / "t.json").write_text(json.dumps(value))
    tokenize(tmp_path / "t.json")
