"""Text files and tables of others: every format is read alike, or named."""

import csv
import gzip
import io
import json

import pytest

from tftpu.config import DataConfig
from tftpu.errors import UserError
from tftpu.input_pipelines.convert import packed_text
from tftpu.input_pipelines.convert.readers import text
from tftpu.input_pipelines.convert.readers.reader import ReadOptions
from tftpu.input_pipelines.formats import text_files
from tftpu.input_pipelines.reading import listing
from tftpu.launch.commands.finished import generate

TEXTS = ["a", 'quoted "b", and\nmore', "line\u2028separator\x85\x0b\x1c", "ä, ß", " c "]
ROWS = [{"id": n, "text": text} for n, text in enumerate(TEXTS)]


def table(delimiter: str, end: str) -> str:
    """Returns the rows as Python's own writer writes them."""
    file = io.StringIO(newline="")
    writer = csv.DictWriter(file, ["id", "text"], delimiter=delimiter, lineterminator=end)
    writer.writeheader()
    writer.writerows(ROWS)
    return file.getvalue()


def json_lines(end: str) -> str:
    return end.join(json.dumps(row, ensure_ascii=False) for row in ROWS) + end


CONTENTS = {
    "a.csv": table(",", "\n"),
    "a.CSV": table(",", "\r\n") + "\r\n\r\n,\r\n",  # as Excel ends a table
    "mac.csv": table(",", "\r"),
    "a.tsv": "\n" + table("\t", "\n"),
    "a.jsonl": json_lines("\n"),
    "a.JSONL": json_lines("\r\n") + "\r\n",
    "a.ndjson": json_lines("\n\n"),
    "lines.json": json_lines("\n"),
    "array.JSON": json.dumps(ROWS, indent=1),
    "lines.txt": json_lines("\n"),
    "array.txt": json.dumps(ROWS),
}


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"], ids=["plain", "with a byte order mark"])
@pytest.mark.parametrize("packed", ["", ".gz", "without .gz"])
@pytest.mark.parametrize("name", CONTENTS)
def test_each_format_gives_the_same_texts(tmp_path, name, packed, mark):
    data = mark + CONTENTS[name].encode()
    path = tmp_path / (name + packed.replace("without .gz", ""))
    path.write_bytes(gzip.compress(data) if packed else data)
    found = list(text_files.read_documents(str(path), "text"))
    assert [document for _, document in found] == TEXTS
    assert all(str(path) in place for place, _ in found)


@pytest.mark.parametrize(
    "content", ["[Music]\nla\n", "{a}\n", "1\n", '"a"', "x\u2028y", "[12] x", '{"a": 1}\nis it.']
)
@pytest.mark.parametrize("name", ["a.txt", "README", "a.py", "a.txt.gz"])
def test_text_is_one_document(tmp_path, name, content):
    data = ("\ufeff" + content.replace("\n", "\r\n")).encode()
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    assert [t for _, t in text_files.read_documents(str(tmp_path / name), "text")] == [content]


@pytest.mark.parametrize(
    ("name", "content"), [("a.txt", "[]"), ("a.csv", "id,text\n"), ("a.jsonl", "\n")]
)
def test_a_file_without_texts_is_named(tmp_path, caplog, name, content):
    (tmp_path / name).write_text(content)
    assert list(text_files.read_documents(str(tmp_path / name), "text")) == []
    assert f"{name} holds no texts" in caplog.text


@pytest.mark.parametrize("mark", ["", "\ufeff"], ids=["plain", "with a byte order mark"])
@pytest.mark.parametrize("name", ["text, cleaned", "text; cleaned", "text | cleaned"])
def test_the_name_of_the_only_column_may_hold_separators_in_quotes(tmp_path, name, mark):
    (tmp_path / "a.csv").write_text(f'{mark}"{name}"\n"a, b"\nc\n')
    found = text_files.read_rows(str(tmp_path / "a.csv"))
    assert [row.values for row in found] == [{name: "a, b"}, {name: "c"}]


NOT_TEXT = {
    "a.txt": ("a\n".encode("utf-16"), "a.txt is not UTF-8"),
    "b.txt": ("a\n".encode("utf-16-le"), "b.txt contains a zero byte"),
    "latin.txt": ("é".encode("latin-1"), "latin.txt is not UTF-8"),
    "a.jsonl": ('{"text": "a"}\n'.encode("utf-16"), "line 1 of .*a.jsonl is not UTF-8"),
    "a.csv": ("text\na\n".encode("utf-16"), "line 1 of .*a.csv is not UTF-8: byte 0xff"),
    "nul.csv": (b"text\na\0\n", "line 2 of .*nul.csv contains a zero byte"),
    "latin.csv": (b"text\nb\n\xe9\n", "line 3 of .*latin.csv is not UTF-8: .* WINDOWS-1252"),
    "cp.txt": (b"a\nb \x80\nc\n", "line 2 of .*cp.txt is not UTF-8: byte 0x80.* WINDOWS-1252"),
    "mark.txt": (b"\xef\xbb\xbfabc\xe9\n", "mark.txt is not UTF-8: byte 0xe9"),
    "lines.txt": (b"\xef\xbb\xbfa\n\xe9b\n", "line 2 of .*lines.txt is not UTF-8: byte 0xe9"),
    "excel.csv": (b"id;text\n1;a\n", "first line of .*excel.csv is separated by ';', not by ','"),
    "r.csv": (b'"text";"label"\n"a";1\n', r"r.csv is separated by ';', .*: save .* with ','\.$"),
    "rows.csv": (b'\xef\xbb\xbf"";"text"\n"1";"a"\n', "rows.csv is separated by ';'"),
    "r.tsv": (b'"a ""b",  "text"\n"a","b"\n', "r.tsv is separated by ',', not by "),
    "mixed.csv": (b'"text","id";"b"\n', "If a value contains quotes, double them"),
    "short.csv.gz": (gzip.compress(b"text\n" + b"a\n" * 99)[:-9], "cannot be decompressed"),
    "flip.txt.gz": (gzip.compress(b"a" * 99)[:-8] + b"\0" * 8, "cannot be decompressed"),
    "quote.csv": (b'text\n"a\nb\n', "quote.csv is not a valid table after line 3"),
    "wide.csv": (b"text,id\nSmith, John,1\n", "line 2 of .*wide.csv has 3 values, .* 2 columns"),
    "twice.csv": (b"text,text\na,b\n", "twice.csv has several columns named 'text'"),
    "narrow.csv": (b"id,text\n1\n", "line 2 of .*narrow.csv: the record has no field 'text'"),
    "field.csv": (
        b"id,body\n1,a\n",
        r"line 2 of .*the record has no field .*only \['body', 'id'\]",
    ),
    "a.ndjson": (b'{"text": "a"}\n[1]\n', "line 2 of .*a.ndjson is not a JSON object"),
    "b.ndjson": (b'{"text": "a"}\n{"text": 1}\n', "line 2 of .*the field .* is 1, not a text: put"),
    "d.ndjson": (b'{"text": "a"}\n{"text": }\n', r"line 2 of .*: Expecting value \(column 10\)"),
    "n.ndjson": (b'{"body": "a"}\n', "Rename the field that holds .*: --field=content for"),
    "d.json": (b'[{"text": "a"},\n{"text": }]\n', r"not JSON: .* \(line 2, column 10\)"),
    "a.ipynb": (b'{\n "cells": []\n}\n', r"element 0 of .*a.ipynb: .*only \['cells'\]"),
    "a.json": (b'{"text": "a",', "a.json is not JSON"),
    "b.json": (b'"a"', "b.json holds neither JSON objects nor an array"),
    "c.json": (b'["a"]', "element 0 of .*c.json is not a JSON object"),
    "tail.txt": (b'{"text": "a"}\n{"te', "line 2 of .*tail.txt is not JSON"),
}


@pytest.mark.parametrize("name", NOT_TEXT)
def test_what_is_not_understood_is_named_and_never_text(tmp_path, name):
    data, message = NOT_TEXT[name]
    (tmp_path / name).write_bytes(data)
    with pytest.raises(UserError, match=message) as error:
        list(text_files.read_documents(str(tmp_path / name), "text"))
    assert name in str(error.value)


@pytest.mark.parametrize(
    ("data", "advice"),
    [
        (b"\xff\xfe" + "id\tä\n".encode("utf-16-le"), "UTF-16: .*`iconv -f UTF-16 -t UTF-8 "),
        (b"\xfe\xff" + "id\tä\n".encode("utf-16-be"), "UTF-16: .*`iconv -f UTF-16 -t UTF-8 "),
        ("id\tä\n".encode("utf-32"), "UTF-32: .*`iconv -f UTF-32 -t UTF-8 "),
        (b"\0\0\xfe\xff" + "id\tä\n".encode("utf-32-be"), "UTF-32: .*`iconv -f UTF-32 -t UTF-8 "),
        (b"PK\x03\x04\x14\x00\x08\x00\xe9\x8c\n", "It is an archive, such as a workbook of Excel"),
        (b"ELF\0\0\xe9\n", "Text is UTF-8, plain or compressed with gzip: convert the file"),
    ],
)
@pytest.mark.parametrize("name", ["a.csv", "a.tsv", "a.txt", "a.jsonl", "a.json"])
def test_data_that_are_no_text_of_windows_are_not_converted_from_it(tmp_path, name, data, advice):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(UserError, match=advice) as error:
        list(text_files.read_documents(str(tmp_path / name), "text"))
    assert "WINDOWS" not in str(error.value)


@pytest.mark.parametrize("packed", [False, True])
def test_the_parts_of_a_file_hold_each_text_once(tmp_path, monkeypatch, packed):
    """A large file is cut by its bytes, which those of a compressed one are not."""
    monkeypatch.setattr(text, "PART_BYTES", 20)
    data = "".join(f'{{"text": "{n:05}"}}\r\n\r\n' for n in range(50)).encode()
    (tmp_path / "a.JSONL").write_bytes(gzip.compress(data) if packed else data)
    reader = text.TextReader(str(tmp_path / "*"), ReadOptions(context=4))
    assert len(reader.parts) > 5
    found = [t for part in reader.parts for piece in part for t in reader._read(*piece)]
    assert found == [f"{n:05}" for n in range(50)]


def test_long_texts_of_a_table_are_read(tmp_path):
    (tmp_path / "a.csv").write_text("text\n" + "x" * 200_000)
    [(_, document)] = text_files.read_documents(str(tmp_path / "a.csv"), "text")
    assert len(document) == 200_000


def test_texts_that_were_edited_without_changing_their_size_are_packed_again(tmp_path, monkeypatch):
    monkeypatch.setenv("TFTPU_CACHE", str(tmp_path / "cache"))
    folders = []
    for content in ("cats", "dogs", "dogs"):
        (tmp_path / "a.txt").write_text(content)
        folders.append(packed_text.prepare_folder(f"{tmp_path}/*.txt", ReadOptions(context=4)))
    assert folders[0] != folders[1] == folders[2]


def test_hidden_files_match_only_a_pattern_that_names_them(tmp_path, monkeypatch):
    for name in ("a.txt", ".DS_Store", "b/.hidden.txt", ".git/c.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    monkeypatch.chdir(tmp_path)
    assert list(listing.find_matches(f"{tmp_path}/*")) == [f"{tmp_path}/a.txt"]
    assert list(listing.find_matches("*")) == ["./a.txt"]
    assert list(listing.find_matches(".git/*")) == [".git/c.txt"]
    assert list(listing.find_matches(".DS*")) == ["./.DS_Store"]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("p.txt", "\ufeffa\u2028b\r\nc\r\n"),
        ("p.JSONL", '{"prompt": "a\u2028b"}\r\n\r\n{"prompt": "c"}'),
        ("p.csv", "id,prompt\n1,a\u2028b\n2,c\n"),
    ],
)
def test_prompts_are_read_as_other_texts_are(tmp_path, name, content):
    (tmp_path / name).write_text(content, newline="")
    options = generate.Options(workdir="w", input=str(tmp_path / name))
    content = generate._read_input(options)
    assert generate._list_prompts(options, content, DataConfig()) == ["a\u2028b", "c"]
