"""`Texts`: lines of files and records of tables, as they are."""

import json
import re

import numpy as np
import pytest

from tftpu import input_pipelines
from tftpu.errors import UserError
from tftpu.input_pipelines.convert.readers.reader import ReadOptions
from tftpu.input_pipelines.convert.readers.text import TextReader
from tftpu.input_pipelines.sources import Texts


@pytest.fixture
def table(tmp_path):
    path = tmp_path / "reviews.csv"
    rows = [f"text {n},{'good' if n % 3 else 'bad'},why {n}?" for n in range(40)]
    path.write_text("review,kind,question\n" + "\n".join(rows))
    return path


def read_epoch(data: Texts) -> list:
    pipeline = input_pipelines.training(data, seed=0)
    batches = pipeline.count // data.global_batch_size
    return list(pipeline.starting_at(0).take(batches).as_numpy_iterator())


def test_each_line_is_a_text_and_every_twentieth_is_held_out(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("\n\n".join(f"line {n}" for n in range(40)))
    data = Texts(train_text=str(path), global_batch_size=19)
    trained = {text.decode() for batch in read_epoch(data) for text in batch}
    (held_out,) = input_pipelines.evaluation(data).as_numpy_iterator()
    assert trained == {f"line {n}" for n in range(40) if n % 20}
    assert held_out.tolist() == [b"line 0", b"line 20"]


def test_a_file_that_several_patterns_match_is_read_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a", "ab", "b"):
        (tmp_path / f"{name}.txt").write_text(f"text {name}")
    data = Texts(train_text=["a*.txt", "a.txt", "*b.txt"], eval_text="a.txt", global_batch_size=1)
    pipeline = input_pipelines.training(data)
    assert pipeline.examples.tolist() == ["text a", "text ab", "text b"]
    reader = TextReader(data.train_text, ReadOptions(context=4))
    assert [[path for path, _, _ in part] for part in reader.parts] == [
        ["./a.txt", "./ab.txt", "./b.txt"]
    ]


def test_a_resumed_run_sees_the_same_batches(table):
    data = Texts(train_text=str(table), field="review", global_batch_size=4)
    pipeline = input_pipelines.training(data, seed=1)
    whole = list(pipeline.starting_at(0).take(12).as_numpy_iterator())
    resumed = list(pipeline.starting_at(7).take(5).as_numpy_iterator())
    assert all(np.array_equal(a, b) for a, b in zip(whole[7:], resumed, strict=True))


def test_other_texts_of_the_same_number_have_another_state(table):
    data = Texts(train_text=str(table), field="review", global_batch_size=4)
    state = input_pipelines.describe_state(input_pipelines.training(data))
    assert state == input_pipelines.describe_state(input_pipelines.training(data, seed=1))
    table.write_text(table.read_text().replace("text 7,", "text 8,"))
    other = input_pipelines.describe_state(input_pipelines.training(data))
    assert other["examples"] == state["examples"] == 38
    assert other["content"] != state["content"]


def test_classes_are_numbered_in_the_order_of_their_names(table):
    data = Texts(train_text=str(table), field="review", label="kind", global_batch_size=38)
    ((texts, labels),) = read_epoch(data)
    assert input_pipelines.class_names(data) == ["bad", "good"]
    expected = [int(int(text.split()[1]) % 3 > 0) for text in texts]
    assert labels.tolist() == expected
    spec = input_pipelines.batch_spec(data, 8)
    assert [part.shape.as_list() for part in spec] == [[8], [8]]


def test_a_blank_class_is_named_and_spaces_around_a_class_are_left_out(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("text,kind\none, good\ntwo,bad\nthree,good\n")
    data = Texts(train_text=str(path), eval_text=str(path), label="kind", global_batch_size=3)
    assert input_pipelines.class_names(data) == ["bad", "good"]
    assert input_pipelines.training(data).examples[1].tolist() == [1, 0, 1]
    path.write_text(path.read_text() + "four,\n")
    with pytest.raises(UserError, match=r"line 5 of .*a.csv has no 'kind': it is blank\. Give it"):
        input_pipelines.training(data)


def test_prompts_and_their_answers_are_two_features(table):
    data = Texts(train_text=str(table), field="review", prompt="question", global_batch_size=4)
    batch = read_epoch(data)[0]
    prompts, responses = (batch[name] for name in ("prompts", "responses"))
    assert [p.split()[1][:-1] for p in prompts] == [r.split()[1] for r in responses]


def test_texts_to_predict_need_no_class(table, tmp_path):
    data = Texts(train_text=str(table), field="review", label="kind", global_batch_size=4)
    new = tmp_path / "new.txt"
    new.write_text("one\ntwo\nthree")
    records = input_pipelines.prediction(data, f"text:{new}", keep=("text",))
    (batch,) = records.features([range(3)]).as_numpy_iterator()
    assert records.count == 3 and batch.tolist() == [b"one", b"two", b"three", b"three"]
    new.write_text("one\ntwo\nfour")
    with pytest.raises(UserError, match=r"it has \['text'\]\. Predictions are in the order of"):
        records.read_fields(range(0), ["review"])
    assert input_pipelines.prediction(data, f"text:{new}").identity != records.identity
    alone = input_pipelines.prediction(data, "sentence:A nice film, 8:10")
    assert next(alone.features([range(1)]).as_numpy_iterator())[0] == b"A nice film, 8:10"
    assert alone.places(range(1)) == (["A nice film, 8:10"], [0])


def test_texts_to_predict_are_named_by_their_files(table, tmp_path):
    data = Texts(train_text=str(table), field="review", global_batch_size=4)
    for name, text in {"a.txt": "one\n\ntwo", "b.txt": "three"}.items():
        (tmp_path / name).write_text(text)
    records = input_pipelines.prediction(data, f"text:{tmp_path}/*.txt")
    a, b = f"{tmp_path}/a.txt", f"{tmp_path}/b.txt"
    assert records.places(range(3)) == ([a, a, b], [0, 1, 0])
    assert records.places(range(1, 2)) == ([a], [1])
    assert input_pipelines.prediction(data, "evaluation").places(range(2)) == (
        ["evaluation"] * 2,
        [0, 1],
    )


def test_a_field_is_that_of_a_table_by_name_or_content(table, tmp_path):
    plain, rows = tmp_path / "a.txt", tmp_path / "rows.txt"
    plain.write_text("one\ntwo\nthree")
    rows.write_text('{"story": "four"}\n{"story": "five"}\n{"story": "six"}')
    fields = {"field": "story", "global_batch_size": 2}
    with pytest.raises(UserError, match=r"data.field='story' names a field of a table, .*a.txt is"):
        input_pipelines.training(Texts(train_text=str(plain), **fields))
    (batch,) = read_epoch(Texts(train_text=f"{plain},{rows}", **fields))[:1]
    assert len(batch) == 2


def test_a_folder_of_texts_is_answered_with_a_pattern(tmp_path):
    data = Texts(train_text="a.txt", eval_text=f"b.txt,{tmp_path}/")
    pattern = re.escape(f"data.eval_text={tmp_path}/*.")
    with pytest.raises(UserError, match=f"is a folder: name the files in it, as {pattern}"):
        data.validate()


def test_fields_of_other_sources_are_refused():
    for fields in ({"data_dir": "texts"}, {"name": "tales"}):
        with pytest.raises(UserError, match=f"data.{next(iter(fields))}=.* does not work with"):
            Texts(train_text="a.txt", **fields).validate()


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"field": "revue"}, "Did you mean 'review'"),
        ({"field": "review", "label": "kind", "classes": ("good", "bat")}, "no class 'bad'"),
        ({"train_text": "nowhere/*.txt"}, "no file"),
    ],
)
def test_mistakes_are_explained(fields, said, table):
    data = Texts(**{"train_text": str(table), **fields})
    with pytest.raises(UserError, match=said):
        input_pipelines.training(data)


def test_a_missing_file_is_answered_with_the_nearest(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tales.txt").write_text("a\n")
    with pytest.raises(UserError, match=r"There is no file 'tale.txt' .* Did you mean 'tales.txt'"):
        read_epoch(Texts(train_text="tale.txt", global_batch_size=1))


def test_texts_that_are_held_out_and_trained_on_are_counted(tmp_path, capsys):
    path = tmp_path / "texts.jsonl"
    # 0, 20 and 40 are held out.
    lines = [json.dumps({"text": f"text {n % 30}"}) for n in range(41)]
    path.write_text("\n".join(lines))
    data = Texts(train_text=str(path), global_batch_size=4)
    input_pipelines.evaluation(data)
    assert "3 in all, is held out to evaluate on; 2 of them are also" in capsys.readouterr().out
    path.write_text("\n".join(lines[:30]))
    input_pipelines.evaluation(data)
    assert capsys.readouterr().out.endswith("2 in all, is held out to evaluate on\n")


@pytest.mark.parametrize(
    ("row", "fields", "message"),
    [
        (
            {"messages": [{"role": "user", "content": "Why?"}]},
            {"field": "messages"},
            "the field 'messages' is .*, not a text: write the texts in it to separate fields",
        ),
        ({"text": 5}, {}, "the field 'text' is 5, not a text: put it in quotes"),
        ({"text": "a", "q": {"a": 1}}, {"prompt": "q"}, "the field 'q' is .*, not a text"),
        ({"text": "a", "kind": ["b"]}, {"label": "kind"}, "the field 'kind' is .*, not a class"),
    ],
    ids=["chat", "number", "prompt", "label"],
)
def test_what_is_not_a_text_is_named_instead_of_being_trained_as_json(
    tmp_path, row, fields, message
):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"text": "first", "q": "why", "kind": 1} | row) + "\n")
    data = Texts(train_text=str(path), global_batch_size=1, **fields)
    with pytest.raises(UserError, match=f"line 1 of .*{message}"):
        input_pipelines.training(data)
    if "field" in fields:
        with pytest.raises(UserError, match=message):
            data.check_patterns(str(path))


def test_a_class_that_is_listed_twice_fails(table):
    data = Texts(train_text=str(table), label="kind", classes=("good", "good", "bad"))
    with pytest.raises(UserError, match="lists 'good' twice"):
        data.validate()
