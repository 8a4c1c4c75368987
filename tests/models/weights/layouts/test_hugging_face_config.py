"""Weights of other networks, whose names and shapes fit a model of the zoo, are refused."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import tftpu
from tests.support.models import zoo
from tftpu import models

# As Transformers writes them for networks of the zoo's tiny shapes.
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "attention_bias": False,
    "head_dim": 4,
    "hidden_act": "silu",
    "hidden_size": 16,
    "intermediate_size": 32,
    "max_position_embeddings": 2048,
    "mlp_bias": False,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "vocab_size": 20,
}
GPT = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "n_ctx": 12,
    "n_embd": 16,
    "n_head": 2,
    "n_layer": 2,
    "n_positions": 12,
    "vocab_size": 20,
}
ENCODER = {
    "hidden_act": "gelu",
    "hidden_size": 16,
    "intermediate_size": 64,
    "layer_norm_eps": 1e-12,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
}
BERT = {**ENCODER, "model_type": "bert", "max_position_embeddings": 12, "vocab_size": 20}
VIT = {**ENCODER, "model_type": "vit", "image_size": 8, "patch_size": 4}
CONVNEXT = {"model_type": "convnext", "depths": [1, 2], "hidden_sizes": [8, 16]}
RESNET = {
    "model_type": "resnet",
    "depths": [1, 1],
    "embedding_size": 8,
    "hidden_sizes": [32, 64],
    "layer_type": "bottleneck",
}
CONFIGS = {
    "llama": LLAMA,
    "gpt": GPT,
    "bert": BERT,
    "bert_classes": BERT,
    "vit": VIT,
    "convnext": CONVNEXT,
    "resnet": RESNET,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.fixture(scope="module")
def published(tmp_path_factory) -> dict[str, dict[str, np.ndarray]]:
    """Returns the arrays of a file of each family, as Transformers names them."""
    folder = tmp_path_factory.mktemp("published")
    arrays = {}
    for family in CONFIGS:
        models.save_weights(zoo.build(family), folder / f"{family}.safetensors")
        arrays[family] = load_file(folder / f"{family}.safetensors")
    return arrays


def refused(model, folder, arrays, config=None) -> str:
    """Returns the message with which a folder is refused; the model keeps its values."""
    before = [np.array(v) for v in model.weights]
    with pytest.raises(tftpu.UserError) as error:
        load(model, folder, arrays, config)
    for variable, value in zip(model.weights, before, strict=True):
        np.testing.assert_array_equal(variable, value)
    return str(error.value)


def load(model, folder, arrays, config=None):
    save_file(arrays, folder / "model.safetensors")
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return models.load_weights(model, str(folder), replace_head=True)


def ones(*names: str, size: int = 16) -> dict[str, np.ndarray]:
    layers = [f"model.layers.{layer}" for layer in range(2)]
    return {f"{layer}.{name}": np.ones(size, "float32") for layer in layers for name in names}


@pytest.mark.medium
@pytest.mark.parametrize(
    "more",
    [
        # Qwen 2 has biases, Qwen 3 norms of queries and keys, Gemma 3 both kinds of further norms.
        ones("self_attn.q_proj.bias") | ones("self_attn.k_proj.bias", size=8),
        ones("self_attn.q_norm.weight", "self_attn.k_norm.weight", size=4),
        ones("pre_feedforward_layernorm.weight", "post_feedforward_layernorm.weight"),
        {"model.layers.2.input_layernorm.weight": np.ones(16, "float32")},
        {"model.layers.0.self_attn.q_proj.weight_scale": np.ones(1, "float32")},
    ],
    ids=["qwen2", "qwen3", "gemma3", "deeper", "quantized"],
)
def test_an_array_left_over_in_the_layers_is_an_error(more, published, tmp_path):
    model = zoo.build("llama")
    said = refused(model, tmp_path, published["llama"] | more)
    assert "do not fit the network 'llama'" in said and next(iter(sorted(more))) in said


@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("gpt", "transformer.h.2.ln_1.weight"),
        ("gpt", "transformer.h.0.crossattention.q_attn.weight"),
        ("bert", "bert.encoder.layer.2.output.dense.bias"),
        ("vit", "vit.embeddings.distillation_token"),
        ("convnext", "convnext.encoder.stages.0.layers.0.grn.weight"),
        ("resnet", "resnet.encoder.stages.1.layers.1.layer.0.convolution.weight"),
    ],
)
def test_of_each_family_an_array_left_over_is_an_error(family, more, published, tmp_path):
    arrays = published[family] | {more: np.ones(3, "float32")}
    assert more in refused(zoo.build(family), tmp_path, arrays)


@pytest.mark.parametrize("layer", ["input_layernorm", "self_attn.v_proj"])
def test_a_file_without_an_array_of_the_layers_is_an_error(layer, published, tmp_path):
    lost = f"model.layers.1.{layer}.weight"
    arrays = {name: array for name, array in published["llama"].items() if name != lost}
    assert "it lacks block2_" in refused(zoo.build("llama"), tmp_path, arrays)


def test_a_head_that_is_not_the_embedding_needs_a_model_that_is_not_tied(published, tmp_path):
    said = refused(zoo.build("llama", tied=True), tmp_path, published["llama"])
    assert "lm_head.weight differs from its model.embed_tokens.weight" in said
    same = published["llama"] | {"lm_head.weight": published["llama"]["model.embed_tokens.weight"]}
    assert not load(zoo.build("llama", tied=True), tmp_path, same).unused


@pytest.mark.parametrize("family", CONFIGS)
def test_the_config_of_the_same_network_is_accepted(family, published, tmp_path):
    fields = {"stem": "imagenet"} if family == "resnet" else {}
    model = zoo.build(family, **fields)
    models.save_weights(model, tmp_path / "saved.safetensors")
    report = load(model, tmp_path, load_file(tmp_path / "saved.safetensors"), CONFIGS[family])
    assert not (report.missing or report.unused)


@pytest.mark.parametrize(
    ("family", "changes", "said"),
    [
        ("llama", {"model_type": "gemma"}, "architecture 'gemma'"),
        ("llama", {"model_type": "qwen2"}, "architecture 'qwen2'"),
        ("llama", {"num_attention_heads": 2, "head_dim": 8}, "num_attention_heads is 2 there"),
        ("llama", {"num_key_value_heads": 4}, "num_key_value_heads is 4"),
        ("llama", {"head_dim": 8}, "head_dim is 8"),
        (
            "llama",
            {"rms_norm_eps": 1e-6},
            "rms_norm_eps is 1e-06 there, and model.epsilon is 1e-05",
        ),
        (
            "llama",
            {"rope_theta": 5e5},
            "rope_theta is 500000.0 there, and model.rope_base is 10000",
        ),
        ("llama", {"rope_parameters": {"rope_theta": 5e5}}, "rope_theta is 500000.0"),
        ("llama", {"rope_scaling": LLAMA3}, "factor is 32.0 there, and model.rope_scaling is 1.0"),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type is 'linear'"),
        (
            "llama",
            {"tie_word_embeddings": True},
            "tie_word_embeddings is True there, and model.tied",
        ),
        ("llama", {"hidden_act": "gelu_pytorch_tanh"}, "hidden_act is 'gelu_pytorch_tanh'"),
        ("llama", {"attention_bias": True}, "attention_bias is True"),
        ("llama", {"vocab_size": 24}, "vocab_size is 24"),
        ("gpt", {"n_head": 4}, "n_head is 4 there, and model.heads is 2"),
        ("gpt", {"activation_function": "relu"}, "activation_function is 'relu'"),
        ("gpt", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        (
            "bert",
            {"num_attention_heads": 4},
            "num_attention_heads is 4 there, and model.heads is 2",
        ),
        ("bert", {"model_type": "roberta"}, "architecture 'roberta'"),
        ("bert", {"layer_norm_eps": 1e-5}, "layer_norm_eps is 1e-05"),
        ("bert", {"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ("bert", {"hidden_act": "relu"}, "hidden_act is 'relu'"),
        ("vit", {"num_attention_heads": 1}, "num_attention_heads is 1"),
        ("vit", {"qkv_bias": False}, "qkv_bias is False"),
        ("convnext", {"model_type": "convnextv2"}, "architecture 'convnextv2'"),
        ("convnext", {"hidden_act": "relu"}, "hidden_act is 'relu'"),
        ("resnet", {"downsample_in_bottleneck": True}, "model.stride_in is '3x3'"),
        ("resnet", {"downsample_in_first_stage": True}, "downsample_in_first_stage is True"),
    ],
)
def test_a_config_of_another_network_is_an_error_that_names_the_difference(
    family, changes, said, published, tmp_path
):
    model = zoo.build(family)
    assert said in refused(model, tmp_path, published[family], CONFIGS[family] | changes)


def test_a_llama_with_stretched_positions_is_accepted_as_it_is_published(published, tmp_path):
    model = zoo.build("llama", rope_base=5e5, rope_scaling=32.0)
    config = LLAMA | {"rope_theta": 5e5, "rope_scaling": LLAMA3}
    load(model, tmp_path, published["llama"], config)
    newer = LLAMA | {"rope_parameters": {"rope_theta": 5e5, **LLAMA3}}
    load(model, tmp_path, published["llama"], newer)
    wider = {**LLAMA3, "original_max_position_embeddings": 4096}
    said = refused(model, tmp_path, published["llama"], config | {"rope_scaling": wider})
    assert "original_max_position_embeddings is 4096" in said


def test_rotary_positions_without_a_type_are_the_usual_ones(published, tmp_path):
    config = LLAMA | {"rope_parameters": {"rope_theta": 10000.0}}
    load(zoo.build("llama"), tmp_path, published["llama"], config)


def test_a_mistral_is_a_llama_within_its_window(published, tmp_path):
    mistral = LLAMA | {"model_type": "mistral"}
    for window in (None, 12):  # the model's context
        load(zoo.build("llama"), tmp_path, published["llama"], mistral | {"sliding_window": window})
    said = refused(
        zoo.build("llama"), tmp_path, published["llama"], mistral | {"sliding_window": 8}
    )
    assert "sliding_window is 8 there, and model.context is 12" in said
    said = refused(zoo.build("llama", context=4097), tmp_path, published["llama"], mistral)
    assert "sliding_window is 4096" in said  # Transformers' default


@pytest.mark.parametrize("where", ["file", "index"])
def test_the_config_is_found_beside_a_file_and_an_index(where, published, tmp_path):
    save_file(published["gpt"], tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(GPT | {"n_head": 4}))
    path = tmp_path / "model.safetensors"
    if where == "index":
        path = tmp_path / "model.safetensors.index.json"
        places = dict.fromkeys(published["gpt"], "model.safetensors")
        path.write_text(json.dumps({"weight_map": places}))
    with pytest.raises(tftpu.UserError, match="n_head is 4"):
        models.load_weights(zoo.build("gpt"), path)


@pytest.mark.parametrize("content", ["{", "[" * 100_000])
def test_a_config_that_is_not_json_is_an_error(content, published, tmp_path):
    (tmp_path / "config.json").write_text(content)
    assert "is not JSON" in refused(zoo.build("gpt"), tmp_path, published["gpt"])


@pytest.mark.parametrize("config", [{"model": {"name": "gpt2_small"}, "loss": None}, [1], None])
def test_a_config_of_another_program_is_not_read(config, published, tmp_path):
    load(zoo.build("gpt"), tmp_path, published["gpt"], config)


@pytest.mark.medium
def test_buffers_and_other_heads_of_published_files_are_no_error(published, tmp_path):
    one = np.ones((1,), "float32")
    for family, more in (
        ("llama", {"model.layers.0.self_attn.rotary_emb.inv_freq": one, "score.weight": one}),
        ("gpt", {"transformer.h.0.attn.bias": one, "transformer.h.0.attn.masked_bias": one}),
        ("bert", {"bert.pooler.dense.bias": one, "bert.embeddings.position_ids": one}),
        ("bert_classes", {"cls.predictions.bias": one, "qa_outputs.bias": one}),
        ("vit", {"vit.pooler.dense.bias": one, "vit.embeddings.mask_token": one}),
        ("resnet", {"resnet.embedder.embedder.normalization.num_batches_tracked": one}),
    ):
        load(zoo.build(family), tmp_path, published[family] | more)


def test_a_network_trained_for_another_task_gives_all_but_its_head(published, tmp_path):
    report = load(zoo.build("bert_classes"), tmp_path, published["bert"], BERT)
    assert report.missing == ["pool/kernel", "pool/bias", "head/kernel", "head/bias"]
    report = load(zoo.build("bert"), tmp_path, published["bert_classes"], BERT)
    assert report.missing[-1] == "head/bias" and "classifier.weight" in report.unused
    without = {n: a for n, a in published["vit"].items() if not n.startswith("classifier")}
    bare = {name.removeprefix("vit."): array for name, array in without.items()}
    report = load(zoo.build("vit", num_classes=3), tmp_path, bare, VIT)
    assert report.missing == ["head/kernel", "head/bias"]


@pytest.mark.parametrize("fields", [{"dropout": 0.1}, {"stochastic_depth": 0.1}])
def test_states_of_random_numbers_are_no_weights(fields, tmp_path):
    random, plain = zoo.build("vit", **fields), zoo.build("vit")
    for saved, model in ((random, plain), (plain, random)):
        arrays = {v.path: np.array(v) for v in saved.variables}
        report = load(model, tmp_path, arrays)
        assert report.loaded == [v.path for v in model.weights]


def test_weights_of_tftpu_of_another_depth_are_an_error(tmp_path):
    deeper = zoo.build("vit", layers=3)
    arrays = {v.path: np.array(v) for v in deeper.weights}
    assert "it has block3_" in refused(zoo.build("vit"), tmp_path, arrays)
    shorter = {path: array for path, array in arrays.items() if "block3" not in path}
    assert "it lacks block3_" in refused(deeper, tmp_path, shorter)
