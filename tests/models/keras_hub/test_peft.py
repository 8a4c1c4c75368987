"""Adapters of a task, written for PEFT, give the same logits in its twin of Transformers.

`make test-parity`; needs torch, transformers and peft. The weights are random.
"""

import keras
import numpy as np
import pytest

from tests.support.hub.tiny_gemma3 import build_tiny_gemma3
from tests.support.models.adapted import stir
from tests.support.models.strategies import relative
from tftpu import models
from tftpu.errors import UserError
from tftpu.models.keras_hub import peft as writing

TOKENS = np.random.default_rng(0).integers(4, 80, (2, 12)).astype("int32")
X = {"token_ids": TOKENS, "padding_mask": np.ones_like(TOKENS)}


def build(name: str) -> keras.Model:
    import keras_hub

    keras.utils.set_random_seed(0)
    if name == "gemma3":
        model = build_tiny_gemma3()
        model.preprocessor = None
        return model
    if name == "llama3":
        backbone = keras_hub.models.Llama3Backbone(80, 2, 4, 16, 32, num_key_value_heads=2)
        return keras_hub.models.Llama3CausalLM(backbone=backbone, preprocessor=None)
    if name == "gpt2":
        backbone = keras_hub.models.GPT2Backbone(80, 2, 2, 16, 64, max_sequence_length=32)
        return keras_hub.models.GPT2CausalLM(backbone=backbone, preprocessor=None)
    backbone = keras_hub.models.QwenBackbone(80, 2, 4, 2, 16, 32, tie_word_embeddings=True)
    return keras_hub.models.QwenCausalLM(backbone=backbone, preprocessor=None)


@pytest.mark.parity
@pytest.mark.parametrize("name", ["gemma3", "llama3", "qwen", "gpt2"])
def test_peft_adds_the_adapters_to_the_twin(name, tmp_path):
    torch = pytest.importorskip("torch", reason="make test-parity installs it")
    peft = pytest.importorskip("peft", reason="make test-parity installs it")
    transformers = pytest.importorskip("transformers")
    model = build(name)
    for variable in model.weights:  # the norms' scales are not all the same
        variable.assign(variable + 0.05 * keras.random.normal(variable.shape, seed=1))
    model.export_to_transformers(str(tmp_path / "twin"))
    before = np.asarray(model(X))
    models.enable_lora(model, 3)
    stir(model)
    plain = build(name)
    writing.save_adapters(model, plain, str(tmp_path / "adapters"), base="twin")
    twin = transformers.AutoModelForCausalLM.from_pretrained(str(tmp_path / "twin")).eval()
    with torch.no_grad():
        tokens = torch.tensor(TOKENS, dtype=torch.long)
        assert relative(twin(tokens).logits.numpy(), before) < 1e-4
        adapted = peft.PeftModel.from_pretrained(twin, str(tmp_path / "adapters")).eval()
        found = adapted(tokens).logits.numpy()
    assert relative(found, before) > 0.01
    assert relative(np.asarray(model(X)), found) < 1e-4


def test_a_task_that_kerashub_cannot_write_for_transformers_is_refused(tmp_path):
    import keras_hub

    def build_opt() -> keras.Model:
        backbone = keras_hub.models.OPTBackbone(80, 1, 2, 16, 32, max_sequence_length=32)
        return keras_hub.models.OPTCausalLM(backbone=backbone, preprocessor=None)

    model = build_opt()
    models.enable_lora(model, 3)
    stir(model)
    with pytest.raises(UserError, match="--merge"):
        writing.save_adapters(model, build_opt(), str(tmp_path / "adapters"))
