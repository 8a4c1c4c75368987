"""The layouts of Hugging Face Transformers' checkpoints, as they are on disk.

PyTorch stores a dense kernel as (out, in) and a convolution's as (out, in, height, width); Keras
stores (in, out) and (height, width, in, out). Only GPT-2 stores (in, out) in PyTorch, too.
"""

import re
from collections.abc import Callable

from tftpu.config import ModelConfig
from tftpu.models import sizes
from tftpu.models.weights.layouts.entry import Entry, Layout, map_joined, map_same, map_transposed


def build_layout(config: ModelConfig) -> list[Entry] | None:
    """Returns an `Entry` for each variable of a model; None if Transformers lacks the model."""
    family = _LAYOUTS.get(type(config))
    if family is None or (isinstance(config, sizes.ViT) and config.pooling != "token"):
        return None
    return list(family(config))


def map_known_names(config: ModelConfig, names: list[str]) -> dict[str, str]:
    """Maps the names of arrays in `build_layout` to their names in a file.

    Files without a head, and early checkpoints, lack the prefix of the model; early BERTs call
    weight and bias gamma and beta.
    """
    prefix = _PREFIXES[type(config)]
    bare = not any(name.startswith(prefix) for name in names)

    def complete_name(name: str) -> str:
        name = re.sub(r"\.gamma$", ".weight", re.sub(r"\.beta$", ".bias", name))
        return f"{prefix}{name}" if bare and not name.startswith(_HEADS) else name

    return {complete_name(name): name for name in names}


def is_head(config: ModelConfig, name: str) -> bool:
    """Returns whether an array, named as in `build_layout`, serves only a head or pretraining."""
    prefix = _PREFIXES[type(config)]
    # Arrays of a head or of pretraining, in spite of the prefix of the model.
    beside = (f"{prefix}pooler.", f"{prefix}embeddings.mask_token")
    return not name.startswith(prefix) or name.startswith(beside)


def to_current_name(name: str) -> str:
    """Maps an array's name in a file to its name in the model that Transformers 5 builds."""
    if not name.startswith("vit.encoder."):
        return name
    name = name.replace("vit.encoder.layer.", "vit.layers.")
    for old, new in (
        ("attention.attention.query", "attention.q_proj"),
        ("attention.attention.key", "attention.k_proj"),
        ("attention.attention.value", "attention.v_proj"),
        ("attention.output.dense", "attention.o_proj"),
        ("intermediate.dense", "mlp.fc1"),
        ("output.dense", "mlp.fc2"),
    ):
        name = name.replace(old, new)
    return name


def is_buffer(name: str) -> bool:
    """Returns whether an array of a file is a constant or a counter, which no model reads."""
    return bool(
        re.search(r"num_batches_tracked$|position_ids$|rotary_emb\.inv_freq$", name)
        or re.search(r"\.attn\.(bias|masked_bias)$", name)
    )


def list_tied_arrays(config: ModelConfig) -> dict[str, str]:
    """Maps the name of each array of a tied head to the name of the array that it repeats."""
    if isinstance(config, sizes.GPT):
        return {"lm_head.weight": "transformer.wte.weight"}
    if isinstance(config, sizes.Llama) and config.tied:
        return {"lm_head.weight": "model.embed_tokens.weight"}
    if isinstance(config, sizes.BERT) and config.head == "masked_lm":
        return {
            "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
            "cls.predictions.decoder.bias": "cls.predictions.bias",
        }
    return {}


def _map_gpt(config: sizes.GPT) -> Layout:
    yield map_same("tokens_embed/embeddings", "transformer.wte.weight")
    yield map_same("positions_embed/positions", "transformer.wpe.weight")
    for block in range(config.layers):
        ours, theirs = f"block{block + 1}", f"transformer.h.{block}"
        yield from _map_norm(f"{ours}_norm1", f"{theirs}.ln_1")
        yield from _map_norm(f"{ours}_norm2", f"{theirs}.ln_2")
        for layer, name in (
            ("attention/qkv", "attn.c_attn"),
            ("attention/out", "attn.c_proj"),
            ("expand", "mlp.c_fc"),
            ("contract", "mlp.c_proj"),
        ):
            yield map_same(f"{ours}_{layer}/kernel", f"{theirs}.{name}.weight")
            yield map_same(f"{ours}_{layer}/bias", f"{theirs}.{name}.bias")
    yield from _map_norm("final_norm", "transformer.ln_f")


def _map_llama(config: sizes.Llama) -> Layout:
    yield map_same("tokens_embed/embeddings", "model.embed_tokens.weight")
    for block in range(config.layers):
        ours, theirs = f"block{block + 1}", f"model.layers.{block}"
        yield map_same(f"{ours}_norm1/scale", f"{theirs}.input_layernorm.weight")
        yield map_same(f"{ours}_norm2/scale", f"{theirs}.post_attention_layernorm.weight")
        for layer, name in (
            ("attention/query", "self_attn.q_proj"),
            ("attention/key", "self_attn.k_proj"),
            ("attention/value", "self_attn.v_proj"),
            ("attention/out", "self_attn.o_proj"),
            ("gate", "mlp.gate_proj"),
            ("expand", "mlp.up_proj"),
            ("contract", "mlp.down_proj"),
        ):
            yield map_transposed(f"{ours}_{layer}/kernel", f"{theirs}.{name}.weight", (1, 0))
    yield map_same("final_norm/scale", "model.norm.weight")
    if not config.tied:
        yield map_transposed("head/kernel", "lm_head.weight", (1, 0))


def _map_bert(config: sizes.BERT) -> Layout:
    embed = "bert.embeddings"
    yield map_same("tokens_embed/embeddings", f"{embed}.word_embeddings.weight")
    yield map_same("positions_embed/positions", f"{embed}.position_embeddings.weight")
    yield map_same("positions_embed/types", f"{embed}.token_type_embeddings.weight")
    yield from _map_norm("embed_norm", f"{embed}.LayerNorm")
    for block in range(config.layers):
        ours, theirs = f"block{block + 1}", f"bert.encoder.layer.{block}"
        yield from _map_qkv(f"{ours}_attention", f"{theirs}.attention.self")
        yield from _map_dense(f"{ours}_attention/out", f"{theirs}.attention.output.dense")
        yield from _map_norm(f"{ours}_norm1", f"{theirs}.attention.output.LayerNorm")
        yield from _map_dense(f"{ours}_expand", f"{theirs}.intermediate.dense")
        yield from _map_dense(f"{ours}_contract", f"{theirs}.output.dense")
        yield from _map_norm(f"{ours}_norm2", f"{theirs}.output.LayerNorm")
    if config.head == "masked_lm":
        yield from _map_dense("head_transform", "cls.predictions.transform.dense")
        yield from _map_norm("head_norm", "cls.predictions.transform.LayerNorm")
        yield map_same("head/bias", "cls.predictions.bias")
    else:
        yield from _map_dense("pool", "bert.pooler.dense")
        yield from _map_dense("head", "classifier")


def _map_vit(config: sizes.ViT) -> Layout:
    embed = "vit.embeddings"
    yield from _map_conv("patches", f"{embed}.patch_embeddings.projection")
    yield map_same("class_token/token", f"{embed}.cls_token")
    yield Entry(
        "positions/positions",
        (f"{embed}.position_embeddings",),
        lambda array: array[0],  # Hugging Face's shape is (1, time, width)
        lambda value: (value[None],),
    )
    for block in range(config.layers):
        ours, theirs = f"block{block + 1}", f"vit.encoder.layer.{block}"
        yield from _map_norm(f"{ours}_norm1", f"{theirs}.layernorm_before")
        yield from _map_qkv(f"{ours}_attention", f"{theirs}.attention.attention")
        yield from _map_dense(f"{ours}_attention/out", f"{theirs}.attention.output.dense")
        yield from _map_norm(f"{ours}_norm2", f"{theirs}.layernorm_after")
        yield from _map_dense(f"{ours}_expand", f"{theirs}.intermediate.dense")
        yield from _map_dense(f"{ours}_contract", f"{theirs}.output.dense")
    yield from _map_norm("final_norm", "vit.layernorm")
    yield from _map_dense("head", "classifier")


def _map_convnext(config: sizes.ConvNeXt) -> Layout:
    yield from _map_conv("stem_conv", "convnext.embeddings.patch_embeddings")
    yield from _map_norm("stem_norm", "convnext.embeddings.layernorm")
    for stage, blocks in enumerate(config.blocks):
        theirs = f"convnext.encoder.stages.{stage}"
        if stage > 0:
            yield from _map_norm(f"stage{stage + 1}_norm", f"{theirs}.downsampling_layer.0")
            yield from _map_conv(f"stage{stage + 1}_conv", f"{theirs}.downsampling_layer.1")
        for block in range(blocks):
            ours = f"stage{stage + 1}_block{block + 1}"
            layer = f"{theirs}.layers.{block}"
            # Hugging Face's shape is (channels, 1, height, width), ours (height, width, channels,
            # 1)
            yield map_transposed(f"{ours}_depthwise/kernel", f"{layer}.dwconv.weight", (2, 3, 0, 1))
            yield map_same(f"{ours}_depthwise/bias", f"{layer}.dwconv.bias")
            yield from _map_norm(f"{ours}_norm", f"{layer}.layernorm")
            yield from _map_dense(f"{ours}_expand", f"{layer}.pwconv1")
            yield from _map_dense(f"{ours}_contract", f"{layer}.pwconv2")
            if config.layer_scale:
                yield map_same(f"{ours}_layer_scale/scale", f"{layer}.layer_scale_parameter")
    yield from _map_norm("head_norm", "convnext.layernorm")
    yield from _map_dense("head", "classifier")


def _map_resnet(config: sizes.ResNet) -> Layout:
    yield from _map_conv_norm("stem", "resnet.embedder.embedder")
    branch = ("reduce", "conv", "expand") if config.bottleneck else ("conv1", "conv2")
    out = 4 if config.bottleneck else 1
    channels = config.width
    for stage, blocks in enumerate(config.blocks):
        width = config.width * 2**stage
        for block in range(blocks):
            ours = f"stage{stage + 1}_block{block + 1}"
            theirs = f"resnet.encoder.stages.{stage}.layers.{block}"
            for index, name in enumerate(branch):
                yield from _map_conv_norm(f"{ours}_{name}", f"{theirs}.layer.{index}")
            if channels != out * width or (stage > 0 and block == 0):
                yield from _map_conv_norm(f"{ours}_project", f"{theirs}.shortcut")
            channels = out * width
    yield from _map_dense("head", "classifier.1")


def _map_norm(ours: str, theirs: str) -> Layout:
    yield map_same(f"{ours}/gamma", f"{theirs}.weight")
    yield map_same(f"{ours}/beta", f"{theirs}.bias")


def _map_dense(ours: str, theirs: str) -> Layout:
    yield map_transposed(f"{ours}/kernel", f"{theirs}.weight", (1, 0))
    yield map_same(f"{ours}/bias", f"{theirs}.bias")


def _map_qkv(ours: str, theirs: str) -> Layout:
    """Yields the entries of queries, keys and values: one matrix in the zoo, three in files."""
    parts = [f"{theirs}.{name}" for name in ("query", "key", "value")]
    yield map_joined(f"{ours}/qkv/kernel", [f"{part}.weight" for part in parts], transpose=True)
    yield map_joined(f"{ours}/qkv/bias", [f"{part}.bias" for part in parts], transpose=False)


def _map_conv(ours: str, theirs: str) -> Layout:
    yield map_transposed(f"{ours}/kernel", f"{theirs}.weight", (2, 3, 1, 0))
    yield map_same(f"{ours}/bias", f"{theirs}.bias")


def _map_conv_norm(ours: str, theirs: str) -> Layout:
    yield map_transposed(f"{ours}_conv/kernel", f"{theirs}.convolution.weight", (2, 3, 1, 0))
    yield from _map_norm(f"{ours}_norm", f"{theirs}.normalization")
    yield map_same(f"{ours}_norm/moving_mean", f"{theirs}.normalization.running_mean")
    yield map_same(f"{ours}_norm/moving_variance", f"{theirs}.normalization.running_var")


_LAYOUTS: dict[type[ModelConfig], Callable[..., Layout]] = {
    sizes.ResNet: _map_resnet,
    sizes.ConvNeXt: _map_convnext,
    sizes.ViT: _map_vit,
    sizes.BERT: _map_bert,
    sizes.GPT: _map_gpt,
    sizes.Llama: _map_llama,
}
# Prefixes of heads; files never put the prefix of the model before them.
_HEADS = ("lm_head.", "classifier.", "cls.", "score.", "qa_outputs.")
_PREFIXES: dict[type[ModelConfig], str] = {
    sizes.ResNet: "resnet.",
    sizes.ConvNeXt: "convnext.",
    sizes.ViT: "vit.",
    sizes.BERT: "bert.",
    sizes.GPT: "transformer.",
    sizes.Llama: "model.",
}
