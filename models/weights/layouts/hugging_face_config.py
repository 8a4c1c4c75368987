"""Compares the `config.json` that Hugging Face Transformers writes beside weights with a model.

Names and shapes of arrays do not determine the number of heads, the rotation of positions or the
attention window: networks that differ only in these have the same weight files.
"""

import json
import os
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from tftpu.config import ModelConfig
from tftpu.errors import UserError
from tftpu.models import sizes
from tftpu.storage import files

NAME = "config.json"
_GELU = ("gelu", "gelu_python")
_TANH_GELU = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast")
# Epsilons up to this count as equal, because float32 hardly distinguishes them when they are added
# to a variance of one. Published ViTs and ConvNeXts state 1e-12, but were trained with 1e-6.
_TINY_EPSILON = 1e-6


class Setting(NamedTuple):
    """A setting of Transformers that changes what a network computes.

    Attributes:
        key: its name in `config.json`.
        default: its value where the file lacks it.
        ours: the values that describe what the zoo's model computes.
        field: the field of the zoo's config that sets it; "" if it is the same for all models of
            the family.
    """

    key: str
    default: Any
    ours: tuple[Any, ...]
    field: str = ""


def check(config: ModelConfig, name: str, path: str) -> None:
    """Compares the `config.json` beside weights, if there is one, with a model.

    Args:
        config: the config of the model, of a family that Transformers has.
        name: the name of the model.
        path: the path of the weights: a file or a folder.

    Raises:
        UserError: the config cannot be read, or describes another network.
    """
    in_file = path.endswith((".safetensors", ".json"))
    place = files.join(os.path.dirname(path) if in_file else path, NAME)
    if files.find_size(place) is None:
        return
    try:
        theirs = json.loads(files.read(place))
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"{place!r} describes the network of the weights in its folder, but is not JSON: "
            f"{error}. Get it again from the source of the weights."
        ) from error
    kinds, settings = _FAMILIES[type(config)]
    if not isinstance(theirs, dict) or not ({"model_type", "architectures"} & theirs.keys()):
        return  # config.json belongs to another program, for example to a run of tftpu
    theirs = _merge_rotary(theirs)
    kind = theirs.get("model_type", kinds[0])
    if kind not in kinds:
        raise UserError(
            f"Nothing was loaded from {path!r}: according to {place}, it has weights of the "
            f"architecture {kind!r}, but {name!r} is a {type(config).__name__}, which takes "
            f"weights of {' or '.join(map(repr, kinds))}."
        )
    differences = [
        _describe(setting, theirs, config)
        for setting in settings(config, theirs)
        if not _is_same(theirs.get(setting.key, setting.default), setting.ours)
    ]
    if differences:
        raise UserError(
            f"Nothing was loaded from {path!r}: {place} describes a network that differs from "
            f"{name!r}. {'; '.join(differences)}."
        )


def _is_same(value: Any, ours: tuple[Any, ...]) -> bool:
    alike = [value == one and isinstance(value, bool) == isinstance(one, bool) for one in ours]
    tiny = [
        isinstance(value, float) and isinstance(one, float) and max(value, one) <= _TINY_EPSILON
        for one in ours
    ]
    return any(alike) or any(tiny)


def _describe(setting: Setting, theirs: dict[str, Any], config: ModelConfig) -> str:
    value = theirs.get(setting.key, setting.default)
    by_default = "" if setting.key in theirs else " by default"
    there = f"{setting.key} is {value!r} there{by_default}"
    if not setting.field:
        meant = " or ".join(repr(one) for one in setting.ours)
        return f"{there}, and the zoo's {type(config).__name__} is for {meant}"
    return f"{there}, and model.{setting.field} is {getattr(config, setting.field)!r}"


def _list_llama(c: sizes.Llama, theirs: dict[str, Any]) -> Iterator[Setting]:
    mistral = theirs.get("model_type") == "mistral"
    yield Setting("num_hidden_layers", 32, (c.layers,), "layers")
    yield Setting("hidden_size", 4096, (c.width,), "width")
    yield Setting("num_attention_heads", 32, (c.heads,), "heads")
    shared = (c.kv_heads, None) if c.kv_heads == c.heads else (c.kv_heads,)
    yield Setting("num_key_value_heads", 8 if mistral else None, shared, "kv_heads")
    yield Setting("head_dim", None, (c.width // c.heads, None))
    yield Setting("intermediate_size", 14336 if mistral else 11008, (c.hidden,), "hidden")
    yield Setting("vocab_size", 32000, (c.vocabulary,), "vocabulary")
    yield Setting("rms_norm_eps", 1e-6, (c.epsilon,), "epsilon")
    yield Setting("tie_word_embeddings", False, (c.tied,), "tied")
    yield Setting("hidden_act", "silu", ("silu", "swish"))
    yield Setting("attention_bias", False, (False,))
    yield Setting("mlp_bias", False, (False,))
    if mistral and (theirs.get("sliding_window", 4096) or c.context) < c.context:
        # A sliding window hides earlier tokens, but this model reads its whole context.
        yield Setting("sliding_window", 4096, (None, 0), "context")
    yield Setting("rope_theta", 10000.0, (c.rope_base,), "rope_base")
    yield Setting("partial_rotary_factor", 1.0, (1.0,))
    yield Setting("rope_type", "default", ("default", "llama3"))
    yield Setting("factor", 1.0, (c.rope_scaling,), "rope_scaling")
    if theirs.get("rope_type") == "llama3":
        yield Setting("low_freq_factor", None, (1.0,))
        yield Setting("high_freq_factor", None, (4.0,))
        yield Setting("original_max_position_embeddings", None, (8192,))


def _merge_rotary(theirs: dict[str, Any]) -> dict[str, Any]:
    """Returns a config with its nested settings of rotary positions at the top level."""
    rope = theirs.get("rope_parameters") or theirs.get("rope_scaling")
    if not isinstance(rope, dict):
        return theirs
    return {**theirs, "rope_type": rope.get("type", "default"), **rope}


def _list_gpt(c: sizes.GPT, theirs: dict[str, Any]) -> Iterator[Setting]:
    yield Setting("n_layer", 12, (c.layers,), "layers")
    yield Setting("n_embd", 768, (c.width,), "width")
    yield Setting("n_head", 12, (c.heads,), "heads")
    yield Setting("n_inner", None, (None, 4 * c.width))
    yield Setting("n_positions", 1024, (c.context,), "context")
    yield Setting("vocab_size", 50257, (c.vocabulary,), "vocabulary")
    yield Setting("activation_function", "gelu_new", _TANH_GELU)
    yield Setting("layer_norm_epsilon", 1e-5, (1e-5,))
    yield Setting("tie_word_embeddings", True, (True,))
    yield Setting("scale_attn_weights", True, (True,))
    yield Setting("scale_attn_by_inverse_layer_idx", False, (False,))
    yield Setting("add_cross_attention", False, (False,))


def _list_encoder(c: sizes.BERT | sizes.ViT, epsilon: float) -> Iterator[Setting]:
    yield Setting("num_hidden_layers", 12, (c.layers,), "layers")
    yield Setting("hidden_size", 768, (c.width,), "width")
    yield Setting("num_attention_heads", 12, (c.heads,), "heads")
    yield Setting("intermediate_size", 3072, (4 * c.width,))
    yield Setting("hidden_act", "gelu", _GELU)
    yield Setting("layer_norm_eps", 1e-12, (epsilon,))


def _list_bert(c: sizes.BERT, theirs: dict[str, Any]) -> Iterator[Setting]:
    yield from _list_encoder(c, 1e-12)
    yield Setting("max_position_embeddings", 512, (c.context,), "context")
    yield Setting("vocab_size", 30522, (c.vocabulary,), "vocabulary")
    yield Setting("type_vocab_size", 2, (c.types,), "types")
    yield Setting("position_embedding_type", "absolute", ("absolute",))
    yield Setting("is_decoder", False, (False,))
    if c.head == "masked_lm":
        yield Setting("tie_word_embeddings", True, (True,))


def _list_vit(c: sizes.ViT, theirs: dict[str, Any]) -> Iterator[Setting]:
    yield from _list_encoder(c, 1e-6)
    yield Setting("image_size", 224, (c.image_size, [c.image_size] * 2), "image_size")
    yield Setting("patch_size", 16, (c.patch, [c.patch] * 2), "patch")
    yield Setting("num_channels", 3, (c.channels,), "channels")
    yield Setting("qkv_bias", True, (True,))


def _list_convnext(c: sizes.ConvNeXt, theirs: dict[str, Any]) -> Iterator[Setting]:
    yield Setting("depths", [3, 3, 9, 3], (list(c.blocks),), "blocks")
    yield Setting("hidden_sizes", [96, 192, 384, 768], (list(c.widths),), "widths")
    yield Setting("num_channels", 3, (c.channels,), "channels")
    yield Setting("patch_size", 4, (4,))
    yield Setting("hidden_act", "gelu", _GELU)
    yield Setting("layer_norm_eps", 1e-12, (1e-6,))


def _list_resnet(c: sizes.ResNet, theirs: dict[str, Any]) -> Iterator[Setting]:
    kind = "bottleneck" if c.bottleneck else "basic"
    widths = [(4 if c.bottleneck else 1) * c.width * 2**stage for stage in range(len(c.blocks))]
    yield Setting("layer_type", "bottleneck", (kind,), "bottleneck")
    yield Setting("depths", [3, 4, 6, 3], (list(c.blocks),), "blocks")
    yield Setting("embedding_size", 64, (c.width,), "width")
    yield Setting("hidden_sizes", [256, 512, 1024, 2048], (widths,), "width")
    yield Setting("num_channels", 3, (c.channels,), "channels")
    yield Setting("hidden_act", "relu", ("relu",))
    yield Setting("downsample_in_first_stage", False, (False,))
    if c.bottleneck:
        strides = c.stride_in == "1x1"
        yield Setting("downsample_in_bottleneck", False, (strides,), "stride_in")


# A Mistral without a window is a Llama. The encoder of an autoencoder (ViT-MAE) is a ViT.
_FAMILIES: dict[type[ModelConfig], tuple[tuple[str, ...], Callable[..., Iterator[Setting]]]] = {
    sizes.Llama: (("llama", "mistral"), _list_llama),
    sizes.GPT: (("gpt2",), _list_gpt),
    sizes.BERT: (("bert",), _list_bert),
    sizes.ViT: (("vit", "vit_mae", "vit_msn"), _list_vit),
    sizes.ConvNeXt: (("convnext",), _list_convnext),
    sizes.ResNet: (("resnet",), _list_resnet),
}
