"""Packed text: attention and loss stay within a document."""

import numpy as np
import pytest
import tensorflow as tf

from tests.support.data import data_sets
from tftpu import input_pipelines
from tftpu.errors import UserError
from tftpu.input_pipelines.convert import packed_text
from tftpu.input_pipelines.convert.readers.reader import ReadOptions
from tftpu.input_pipelines.datasets import packed_tokens
from tftpu.input_pipelines.formats.manifest import Feature
from tftpu.input_pipelines.reading import listing
from tftpu.input_pipelines.sources import Tokens

CONTEXT = 8
FEATURES = {
    "tokens": Feature("uint16", (CONTEXT + 1,), "raw"),
    "segments": Feature("uint16", (CONTEXT + 1,), "raw"),
}


def row(*lengths: int) -> dict:
    """Returns a padded row of documents of these lengths; token i is i + 1."""
    segments = np.repeat(np.arange(len(lengths)) + 1, lengths)
    pad = (0, CONTEXT + 1 - len(segments))
    numbers = np.arange(CONTEXT + 1) + 1
    return {
        "tokens": np.where(np.pad(segments, pad), numbers, 0),
        "segments": np.pad(segments, pad),
    }


def test_positions_and_weights_of_a_row_match_a_worked_example():
    rows = {name: tf.constant(value[None], tf.uint16) for name, value in row(3, 1, 4).items()}
    features, labels, weights = packed_tokens.split_rows(rows)
    assert features["tokens"].numpy().tolist() == [[1, 2, 3, 4, 5, 6, 7, 8]]
    assert features["segments"].numpy().tolist() == [[1, 1, 1, 2, 3, 3, 3, 3]]
    assert features["positions"].numpy().tolist() == [[0, 1, 2, 0, 0, 1, 2, 3]]
    assert labels.numpy().tolist() == [[2, 3, 4, 5, 6, 7, 8, 0]]
    # The token after the last one of a document is not predicted.
    assert weights.numpy().tolist() == [[1, 1, 0, 0, 1, 1, 1, 0]]


@pytest.mark.parametrize("lengths", [(9,), (1, 1, 1), (2, 7), (4, 4, 1), (1,), (5,)])
def test_positions_count_each_document(lengths):
    rows = {name: tf.constant(value[None], tf.uint16) for name, value in row(*lengths).items()}
    features, _, weights = packed_tokens.split_rows(rows)
    expected = [place for length in lengths for place in range(length)]
    expected = (expected + [0] * CONTEXT)[:CONTEXT]
    assert features["positions"].numpy()[0].tolist() == expected
    assert weights.numpy().sum() == sum(length - 1 for length in lengths)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("packed")
    rows = [row(1 + i % 5, 3) | {"tokens": np.full(CONTEXT + 1, i)} for i in range(30)]
    parts = data_sets.split(rows, 11, 13, 6)
    data_sets.shards(folder, FEATURES, {"train": parts, "test": parts[:1]})
    return folder


@pytest.mark.slow
def test_batches_match_the_spec_and_resume_exactly(folder):
    data = Tokens(data_dir=str(folder), context=CONTEXT, global_batch_size=6, shuffle=8)
    data.validate()
    pipeline = input_pipelines.training(data, 5)
    assert pipeline.starting_at(0).element_spec == input_pipelines.batch_spec(data, 6)

    def rows(start, steps, host=0, hosts=1):
        batches = pipeline.starting_at(start, host, hosts).take(steps)
        return np.stack([features["tokens"][:, 0] for features, _, _ in batches])

    whole = rows(0, 10)
    assert sorted(whole[:5].reshape(-1)) == list(range(30))
    again = np.concatenate([rows(3, 4, host, 3) for host in range(3)], axis=1)
    assert again.tolist() == whole[3:7].tolist()
    assert sum(len(labels) for _, labels, _ in input_pipelines.evaluation(data)) == 11


def test_mistakes_fail_with_clear_errors(folder):
    for changes, message in (
        ({"context": 9}, "packed for a context of 8 tokens, .* --config.data.context=8, and"),
        ({"train_text": "*.txt"}, "Set either data.data_dir"),
        ({"data_dir": None}, "Set either data.data_dir"),
        (
            {"data_dir": None, "train_text": "a/*,/"},
            r"data.train_text=/ is a folder: name the files in it, as data.train_text=/\*\.",
        ),
        ({"data_dir": None, "train_text": "a", "eval_text": "/"}, "data.eval_text=/ is a folder"),
        ({"eval_text": "*.txt"}, "data.eval_text works only with data.train_text"),
        (
            {"data_dir": None, "train_text": "no.txt"},
            "nothing in data.train_text=no.txt. There is no such file",
        ),
        (
            {"data_dir": None, "train_text": __file__, "tokenizer": "no.json"},
            r"no such file\. .*: --config\.data\.tokenizer=FILE\.$",
        ),
    ):
        data = Tokens(**{"data_dir": str(folder), "context": CONTEXT, **changes})
        with pytest.raises(UserError, match=message):
            data.validate()
            input_pipelines.training(data)


@pytest.mark.slow
def test_text_files_are_packed_once_and_again_when_they_change(tmp_path, monkeypatch):
    monkeypatch.setenv("TFTPU_CACHE", str(tmp_path / "cache"))
    texts = [f"This is the text {i}, " + "x" * i for i in range(20)]
    for i, text in enumerate(texts):
        (tmp_path / f"{i}.txt").write_text(text)
    (tmp_path / "eval.jsonl").write_text('{"text": "hello"}\n{"text": "world!"}\n')
    data = Tokens(
        train_text=f"{tmp_path}/*.txt",
        eval_text=f"{tmp_path}/eval.jsonl",
        context=CONTEXT,
        global_batch_size=4,
    )
    data.validate()
    predicted = sum(weights.numpy().sum() for *_, weights in input_pipelines.evaluation(data))
    assert predicted == len("ello") + len("orld!")
    pipeline = input_pipelines.training(data)
    stream = pipeline.starting_at(0).rebatch(1).take(pipeline.count)
    assert sum(int(w.numpy().sum()) for *_, w in stream) == sum(len(t) - 1 for t in texts)
    made = sorted((tmp_path / "cache" / "packed").iterdir())
    input_pipelines.training(data)
    assert sorted((tmp_path / "cache" / "packed").iterdir()) == made and len(made) == 2
    (tmp_path / "0.txt").write_text("another text")
    assert input_pipelines.training(data).count != pipeline.count


@pytest.mark.slow
def test_without_a_text_to_evaluate_on_rows_are_held_out_that_are_never_trained(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("TFTPU_CACHE", str(tmp_path / "cache"))
    for name, count in (("a.txt", 300), ("b.md", 200), ("c.md", 0)):
        (tmp_path / name).write_text("".join(f"{name[0]}{n:05}" for n in range(count)))
    patterns = [f"{tmp_path}/*.txt", f"{tmp_path}/*.md"]
    data = Tokens(train_text=patterns, context=6, global_batch_size=5)
    data.validate()
    assert data == Tokens(train_text=",".join(patterns), context=6, global_batch_size=5)
    pipeline, evaluation = input_pipelines.training(data), input_pipelines.evaluation(data)
    assert "held out to evaluate on" in capsys.readouterr().out

    def read(batches):
        return [row.tobytes() for features, *_ in batches for row in features["tokens"].numpy()]

    training = read(pipeline.starting_at(0).rebatch(1).take(pipeline.count))
    held = read(evaluation)
    assert (len(training), len(held)) == (475, 25)
    assert len({*training, *held}) == 500


def test_text_is_read_once_for_its_checksums(tmp_path, monkeypatch):
    monkeypatch.setenv("TFTPU_CACHE", str(tmp_path / "cache"))
    (tmp_path / "a.txt").write_text("some text")
    read, checksums = [], listing.list_checksums
    monkeypatch.setattr(
        listing, "list_checksums", lambda pattern: read.append(1) or checksums(pattern)
    )
    packed_text.prepare_folder(f"{tmp_path}/*.txt", ReadOptions(context=4))
    assert read == [1]


def test_packing_is_told_once_and_packed_text_opens_without_a_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TFTPU_CACHE", str(tmp_path / "cache"))
    (tmp_path / "a.txt").write_text("some words " * 20)
    options = ReadOptions(split="train", context=CONTEXT)
    first = packed_text.prepare_folder(str(tmp_path / "*.txt"), options)
    assert "is ready." in capsys.readouterr().out
    assert packed_text.prepare_folder(str(tmp_path / "*.txt"), options) == first
    assert capsys.readouterr().out == ""
