"""The layouts of keras.applications, whose arrays have a layer's name and an index: "conv1/0"."""

import re
from collections.abc import Callable

from tftpu.config import ModelConfig
from tftpu.errors import UserError
from tftpu.models import sizes
from tftpu.models.weights.layouts.entry import Entry, Layout, map_same, map_transposed


def build_layout(config: ModelConfig) -> list[Entry] | None:
    """Returns an `Entry` for each variable; None if keras.applications lacks the model.

    Raises:
        UserError: the model is a ResNet with strides in its 3x3 convolutions.
    """
    family = _LAYOUTS.get(type(config))
    if family is None or (isinstance(config, sizes.ResNet) and not config.bottleneck):
        return None
    return list(family(config))


def map_known_names(config: ModelConfig, names: list[str]) -> dict[str, str]:
    """Maps the names of arrays in `build_layout` to their names in a file.

    In files of ConvNeXt, the names begin with the name of the model.
    """
    return {
        re.sub(r"^convnext_[a-z]+_(?=stem_|stage_|downsampling_|head_)", "", name): name
        for name in names
    }


def is_head(config: ModelConfig, name: str) -> bool:
    """Returns whether an array, named as in `build_layout`, belongs to a head."""
    return name.startswith(("predictions/", "head_"))


def _map_resnet(config: sizes.ResNet) -> Layout:
    if config.stride_in != "1x1":
        raise UserError(
            "ResNets of keras.applications have the stride in a block's first 1x1 convolution, "
            "but this model has it in the 3x3 convolution. To use these weights, build it with "
            "stride_in='1x1'."
        )
    yield from _map_biased_conv_norm("stem", "conv1")
    for stage, blocks in enumerate(config.blocks):
        for block in range(blocks):
            ours, theirs = f"stage{stage + 1}_block{block + 1}", f"conv{stage + 2}_block{block + 1}"
            if block == 0:
                yield from _map_biased_conv_norm(f"{ours}_project", f"{theirs}_0")
            for index, name in enumerate(("reduce", "conv", "expand"), 1):
                yield from _map_biased_conv_norm(f"{ours}_{name}", f"{theirs}_{index}")
    yield from _map_arrays("head", "predictions", ("kernel", "bias"))


def _map_biased_conv_norm(ours: str, theirs: str) -> Layout:
    """Yields the entries of a convolution and its norm, into whose mean the bias is folded."""
    conv, norm = f"{theirs}_conv", f"{theirs}_bn"
    yield map_same(f"{ours}_conv/kernel", f"{conv}/0")
    yield from _map_arrays(f"{ours}_norm", norm, ("gamma", "beta"))
    yield Entry(
        f"{ours}_norm/moving_mean",
        (f"{norm}/2", f"{conv}/1"),
        lambda mean, bias: mean - bias,
        None,
    )
    yield map_same(f"{ours}_norm/moving_variance", f"{norm}/3")


def _map_convnext(config: sizes.ConvNeXt) -> Layout:
    yield from _map_arrays("stem_conv", "stem_conv", ("kernel", "bias"))
    yield from _map_arrays("stem_norm", "stem_layernorm", ("gamma", "beta"))
    for stage, blocks in enumerate(config.blocks):
        if stage > 0:
            down = f"stage{stage + 1}"
            yield from _map_arrays(
                f"{down}_norm", f"downsampling_layernorm_{stage - 1}", ("gamma", "beta")
            )
            yield from _map_arrays(
                f"{down}_conv", f"downsampling_conv_{stage - 1}", ("kernel", "bias")
            )
        for block in range(blocks):
            ours, theirs = f"stage{stage + 1}_block{block + 1}", f"stage_{stage}_block_{block}"
            # keras.applications has a grouped convolution here: (height, width, 1, channels).
            yield map_transposed(
                f"{ours}_depthwise/kernel", f"{theirs}_depthwise_conv/0", (0, 1, 3, 2)
            )
            yield map_same(f"{ours}_depthwise/bias", f"{theirs}_depthwise_conv/1")
            yield from _map_arrays(f"{ours}_norm", f"{theirs}_layernorm", ("gamma", "beta"))
            yield from _map_arrays(
                f"{ours}_expand", f"{theirs}_pointwise_conv_1", ("kernel", "bias")
            )
            yield from _map_arrays(
                f"{ours}_contract", f"{theirs}_pointwise_conv_2", ("kernel", "bias")
            )
            if config.layer_scale:
                yield map_same(f"{ours}_layer_scale/scale", f"{theirs}_layer_scale/0")
    yield from _map_arrays("head_norm", "head_layernorm", ("gamma", "beta"))
    yield from _map_arrays("head", "head_dense", ("kernel", "bias"))


def _map_efficientnetv2(config: sizes.EfficientNetV2) -> Layout:
    yield from _map_conv_norm("stem", "stem_")
    for stage, blocks in enumerate(config.blocks):
        expands, fused = config.expand[stage] > 1, stage < config.fused_stages
        for block in range(blocks):
            ours = f"stage{stage + 1}_block{block + 1}"
            theirs = f"block{stage + 1}{chr(ord('a') + block)}_"
            if expands:
                yield from _map_conv_norm(f"{ours}_expand", f"{theirs}expand_")
            if not fused:
                yield map_same(f"{ours}_depthwise_conv/kernel", f"{theirs}dwconv2/0")
                yield from _batch_norm(f"{ours}_depthwise_norm", f"{theirs}bn")
                yield from _map_arrays(f"{ours}_squeeze", f"{theirs}se_reduce", ("kernel", "bias"))
                yield from _map_arrays(f"{ours}_excite", f"{theirs}se_expand", ("kernel", "bias"))
            yield from _map_conv_norm(f"{ours}_project", f"{theirs}project_")
    yield from _map_conv_norm("top", "top_")
    yield from _map_arrays("head", "predictions", ("kernel", "bias"))


def _map_conv_norm(ours: str, theirs: str) -> Layout:
    yield map_same(f"{ours}_conv/kernel", f"{theirs}conv/0")
    yield from _batch_norm(f"{ours}_norm", f"{theirs}bn")


def _batch_norm(ours: str, theirs: str) -> Layout:
    yield from _map_arrays(ours, theirs, ("gamma", "beta", "moving_mean", "moving_variance"))


def _map_arrays(ours: str, theirs: str, names: tuple[str, ...]) -> Layout:
    for index, name in enumerate(names):
        yield map_same(f"{ours}/{name}", f"{theirs}/{index}")


_LAYOUTS: dict[type[ModelConfig], Callable[..., Layout]] = {
    sizes.ResNet: _map_resnet,
    sizes.ConvNeXt: _map_convnext,
    sizes.EfficientNetV2: _map_efficientnetv2,
}
