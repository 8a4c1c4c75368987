"""Text as tokens, packed into sequences."""

import re
from collections import Counter

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from tftpu.errors import UserError
from tftpu.input_pipelines.convert import packing
from tftpu.input_pipelines.convert.readers import text
from tftpu.input_pipelines.convert.readers.reader import ReadOptions


@settings(max_examples=50, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 30), max_size=6),
    context=st.integers(1, 12),
)
def test_packing_predicts_every_token_but_the_first_of_a_document_once(lengths, context):
    # Every token encodes its document and its position in it.
    documents = [np.arange(n, dtype=np.int32) + 1000 * (d + 1) for d, n in enumerate(lengths)]
    predicted = Counter()
    sequences = list(packing.pack(documents, context))
    for tokens, segments in sequences:
        assert tokens.shape == segments.shape == (context + 1,)
        for i in range(context):
            if segments[i] == segments[i + 1] > 0:
                assert tokens[i + 1] == tokens[i] + 1
                predicted[int(tokens[i + 1])] += 1
    wanted = [t for document in documents for t in document[1:].tolist()]
    assert predicted == Counter(wanted)
    padding = sum((segments == 0).sum() for _, segments in sequences)
    assert padding <= context


def test_a_tokenizer_of_hugging_face_and_its_end_of_text(tmp_path):
    model = tokenizers.models.WordLevel({"a": 0, "b": 1, "<end>": 2, "?": 3}, unk_token="?")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    path = str(tmp_path / "tokenizer.json")
    tokenizer.save(path)
    tokens, vocabulary = packing.build_tokenizer(path, "<end>")
    assert vocabulary == 4
    assert tokens("b a c").tolist() == [1, 0, 3, 2]
    with pytest.raises(UserError, match="no token '</s>'"):
        packing.build_tokenizer(path, "</s>")
    with pytest.raises(UserError, match="cannot be read"):
        packing.build_tokenizer(str(tmp_path / "none.json"))


def test_truncation_and_padding_of_a_tokenizer_are_switched_off_and_said_once(tmp_path, caplog):
    model = tokenizers.models.WordLevel({"a": 0, "[PAD]": 1}, unk_token="a")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    paths = {}
    for name in ("plain", "both"):
        if name == "both":
            tokenizer.enable_truncation(8)
            tokenizer.enable_padding(pad_id=1, length=60)
        paths[name] = str(tmp_path / f"{name}.json")
        tokenizer.save(paths[name])
    for words in ("a " * 50, "a"):
        expected = packing.build_tokenizer(paths["plain"])[0](words).tolist()
        assert packing.build_tokenizer(paths["both"])[0](words).tolist() == expected
        assert len(expected) == words.count("a")
    said = [record.getMessage() for record in caplog.records]
    assert said == [
        f"The tokenizer {paths['both']} enables truncation and padding, which is switched off "
        "here: whole documents are packed."
    ]


def test_text_that_was_converted_with_truncation_is_not_taken_for_the_same(tmp_path):
    """An older tftpu truncated: the name of its packed text must not be found again."""
    (tmp_path / "a.txt").write_text("a a a")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a"))
    tokenizer.enable_truncation(2)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    options = ReadOptions(tokenizer=str(tmp_path / "tokenizer.json"))
    reader = text.TextReader(str(tmp_path / "a.txt"), options)
    plain = text.TextReader(str(tmp_path / "a.txt"), ReadOptions())
    assert plain.parts == reader.parts
    assert "truncation" in reader.state and "truncation" not in plain.state


@pytest.mark.parametrize(
    ("name", "content"),
    [("a.csv", "text,label\ngood,1\n"), ("a.jsonl", '{"label": 1, "text": "good"}\n')],
)
def test_a_conversion_says_which_columns_are_not_read(tmp_path, name, content):
    (tmp_path / name).write_text(content)
    (packed, note) = text.TextReader(str(tmp_path / name), ReadOptions()).notes
    assert re.fullmatch(r"1 file of text, \d+ B, to tokenize and pack in 1 part", packed)
    assert "only 'text' is read, as tokens for a language model, not 'label'." in note
    for file, plain in (("b.csv", "text\ngood\n"), ("c.txt", "text,label\n")):
        (tmp_path / file).write_text(plain)
        assert text.TextReader(str(tmp_path / file), ReadOptions()).notes[1:] == []


def test_the_vocabulary_reaches_to_the_highest_token(tmp_path):
    path = tmp_path / "tokenizer.json"
    model = tokenizers.models.WordLevel({"a": 0, "b": 9}, unk_token="a")
    tokenizers.Tokenizer(model).save(str(path))
    assert packing.build_tokenizer(str(path))[1] == 10
    path.write_text(re.sub(r"\b9\b", "3000000000", path.read_text()))
    with pytest.raises(UserError, match=r"cannot be read|the token id 3000000000: it must"):
        packing.build_tokenizer(str(path))
