"""Text to the tokens of a model, and back."""

import pytest

import tftpu
from tests.support.hub.byte_gpt2 import build_byte_gpt2
from tftpu.errors import UserError
from tftpu.launch.run import texts

pytestmark = pytest.mark.medium


@pytest.mark.parametrize("text", ["a\udcff", "\ud800"])
def test_a_text_of_half_a_character_is_explained_for_kerashub(text, tmp_path):
    build_byte_gpt2().save_to_preset(str(tmp_path / "gpt2"))
    codec = texts.TaskCodec(tftpu.KerasHub(str(tmp_path / "gpt2"), "causal_lm"))
    assert len(codec.encode("ab")) == 3
    with pytest.raises(UserError, match="not a valid character"):
        codec.encode(text)
