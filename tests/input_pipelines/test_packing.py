"""Text as tokens, packed into sequences."""

from collections import Counter

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from tftpu.errors import UserError
from tftpu.input_pipelines.convert import packing


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
        places = packing.positions(segments)
        for i in range(context):
            if segments[i] == segments[i + 1] > 0:
                assert tokens[i + 1] == tokens[i] + 1
                assert places[i + 1] == places[i] + 1
                predicted[int(tokens[i + 1])] += 1
            elif segments[i + 1]:
                assert places[i + 1] == 0
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
    tokens, vocabulary = packing.tokenizer(path, "<end>")
    assert vocabulary == 4
    assert tokens("b a c").tolist() == [1, 0, 3, 2]
    with pytest.raises(UserError, match="no token '</s>'"):
        packing.tokenizer(path, "</s>")
    with pytest.raises(UserError, match="cannot be read"):
        packing.tokenizer(str(tmp_path / "none.json"))
