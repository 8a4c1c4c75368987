"""Adapters are named as KerasHub reads the twin: PEFT adds them to twins of Transformers' own.

`make test-parity`; needs torch, transformers and peft. The weights are random.
"""

import contextlib
import json
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from tests.support.models.adapted import stir
from tests.support.models.strategies import relative
from tftpu import models
from tftpu.errors import UserError
from tftpu.models.keras_hub import peft as writing

ATTENTION = "*query,*key,*value,*attention_output"
TOKENS = np.random.default_rng(0).integers(4, 80, (2, 12)).astype("int32")
X = {"token_ids": TOKENS, "padding_mask": np.ones_like(TOKENS)}
SIZES: dict[str, Any] = {
    "vocab_size": 80,
    "hidden_size": 16,
    "intermediate_size": 96,  # so that kernels have more than 1024 numbers
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attn_implementation": "eager",
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
OWN: dict[str, dict[str, Any]] = {
    "Gemma": {"head_dim": 8},
    "Gemma2": {"head_dim": 8, "query_pre_attn_scalar": 8},
    "Mistral": {"head_dim": 8, "sliding_window": None},
    "Qwen3": {"head_dim": 8, "tie_word_embeddings": False},
    "SmolLM3": {},
    "Mixtral": {**EXPERTS, "sliding_window": None},
    "Qwen2Moe": {**EXPERTS, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16},
    "Qwen3Moe": {**EXPERTS, "head_dim": 8, "moe_intermediate_size": 16, "norm_topk_prob": True},
}


def build_twin(family: str, **sizes: Any) -> Any:
    """Returns a language model of Transformers, whose weights float16 holds, as KerasHub reads."""
    torch = pytest.importorskip("torch", reason="make test-parity installs it")
    pytest.importorskip("peft", reason="make test-parity installs it")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SIZES | sizes)
    twin = getattr(transformers, f"{family}ForCausalLM")(config).eval().float()
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.copy_((parameter + 0.3 * torch.randn_like(parameter)).half())
    return twin


def compute(twin: Any) -> np.ndarray:
    import torch

    with torch.no_grad():
        return twin(torch.tensor(TOKENS, dtype=torch.long)).logits.numpy()


def check_adapted(twin: Any, model: Any, plain: Any, targets: str, folder: Path) -> None:
    """Asserts that adapters of a model do to the twin what they do to the model."""
    import peft

    before = np.asarray(model(X))
    assert relative(compute(twin), before) < 1e-4
    models.enable_lora(model, 3, targets)
    stir(model)
    writing.save_adapters(model, plain, str(folder), base="twin")
    found = compute(peft.PeftModel.from_pretrained(twin, str(folder)).eval())
    assert relative(found, before) > 0.01
    assert relative(np.asarray(model(X)), found) < 1e-4


@pytest.mark.parity
@pytest.mark.parametrize("family", OWN)
def test_peft_adds_the_adapters_to_the_twin_that_kerashub_reads(family, tmp_path):
    import keras_hub

    twin = build_twin(family, **OWN[family])
    twin.save_pretrained(tmp_path / "twin")
    file = tmp_path / "twin/config.json"
    config = json.loads(file.read_text())  # Transformers 5 has another name for it
    file.write_text(json.dumps({"num_experts": config.get("num_local_experts")} | config))
    model, plain = (
        keras_hub.models.CausalLM.from_preset(str(tmp_path / "twin"), preprocessor=None)
        for _ in range(2)
    )
    targets = ATTENTION if "num_local_experts" in OWN[family] else ""
    check_adapted(twin, model, plain, targets, tmp_path / "adapters")


class StateLoader:
    """KerasHub's loader, of the state of a twin in memory; it has no rounded experts."""

    def __init__(self, twin: Any):
        self._state = twin.state_dict()

    def port_weight(self, keras_variable: Any, hf_weight_key: str, hook_fn: Any = None) -> None:
        value = self._state[hf_weight_key].numpy()
        keras_variable.assign(hook_fn(value, list(keras_variable.shape)) if hook_fn else value)

    def get_tensor(self, name: str) -> Any:
        raise KeyError(name)


def build_gpt_oss() -> Any:
    import keras_hub

    keras.utils.set_random_seed(0)
    backbone = keras_hub.models.GptOssBackbone(
        vocabulary_size=80,
        num_layers=1,
        num_query_heads=4,
        hidden_dim=16,
        intermediate_dim=SIZES["intermediate_size"],
        num_key_value_heads=2,
        num_experts=4,
        top_k=2,
        head_dim=8,
        sliding_window=16,
        rope_scaling_factor=1.0,
        layer_norm_epsilon=1e-5,
    )
    return keras_hub.models.GptOssCausalLM(backbone=backbone, preprocessor=None)


@pytest.mark.parity
def test_peft_adds_the_adapters_to_the_attention_of_gpt_oss(tmp_path):
    """KerasHub reads its experts only as they are published, rounded to 4 bits."""
    from keras_hub.src.utils.transformers import convert_gpt_oss

    sizes = {"num_hidden_layers": 1, "head_dim": 8, "sliding_window": 16, **EXPERTS}
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    twin = build_twin("GptOss", **sizes, rope_parameters=rope)
    model = build_gpt_oss()
    with contextlib.suppress(KeyError):
        convert_gpt_oss.convert_weights(model.backbone, StateLoader(twin), {})
    layer, theirs = model.backbone.transformer_layers[0], twin.model.layers[0]
    experts = layer.sparse_moe_block.experts
    for name in ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias"):
        getattr(experts, name).assign(getattr(theirs.mlp.experts, name).detach().numpy())
    norm = theirs.post_attention_layernorm.weight
    layer.post_attention_layernorm.scale.assign(norm.detach().numpy())
    model.backbone.layer_norm.scale.assign(twin.model.norm.weight.detach().numpy())
    check_adapted(twin, model, build_gpt_oss(), ATTENTION, tmp_path / "adapters")


def build_mixtral() -> Any:
    import keras_hub

    backbone = keras_hub.models.MixtralBackbone(80, 1, 4, 16, 32, 2, 4, 2)
    return keras_hub.models.MixtralCausalLM(backbone=backbone, preprocessor=None)


def build_gemma3() -> Any:
    import keras_hub

    backbone = keras_hub.models.Gemma3Backbone(
        80, None, 1, 2, 1, 16, 32, 8, use_query_key_norm=True, vision_encoder=None
    )
    return keras_hub.models.Gemma3CausalLM(backbone=backbone, preprocessor=None)


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (build_mixtral, r"sparse_feedforward_gate_dense/kernel' has no counterpart .* that PEFT"),
        (build_gemma3, r"no model like this Gemma3Backbone: .*post_attention_norm.*--merge"),
    ],
)
def test_what_the_twin_cannot_be_is_refused(build, said, tmp_path):
    model = build()
    models.enable_lora(model, 3)
    stir(model)
    with pytest.raises(UserError, match=said):
        writing.save_adapters(model, build(), str(tmp_path / "adapters"))
    assert not (tmp_path / "adapters").exists()
