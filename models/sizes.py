"""The zoo's hyper-parameters and its published sizes by name.

No Keras here: a config file names a model, and is checked, in milliseconds.
"""

import dataclasses

from tftpu.config import Model, Share
from tftpu.errors import UserError, did_you_mean

ATTENTIONS = ("plain", "flash")
REMATS = ("none", "block")


@dataclasses.dataclass
class ResNet(Model):
    """ResNet v1.5 (He et al. 2015, https://arxiv.org/abs/1512.03385; stride in the 3x3)."""

    blocks: tuple[int, ...] = (3, 4, 6, 3)  # residual blocks a stage
    width: int = 64  # channels of the first stage; doubled from stage to stage
    bottleneck: bool = True
    stride_in: str = "3x3"  # v1.5; "1x1": v1, as keras.applications' weights have it
    # "imagenet": 7x7 stride 2 and max pooling; "space_to_depth": the same numbers, worked out as a
    # 4x4 over blocks of 2x2 pixels; "small": 3x3 stride 1
    stem: str = "imagenet"
    image_size: int = 224
    channels: int = 3
    num_classes: int = 1000
    norm_batch: int | str = 32  # consecutive examples that share batch statistics, or "global"
    dropout: float = 0.0
    remat: str = "none"  # or "block": each is computed again in the backward pass, not kept

    def validate(self, per_step: Share) -> None:
        check_remat(self.remat)
        _check_one_of("stride_in", self.stride_in, ("3x3", "1x1"))
        _check_one_of("stem", self.stem, ("imagenet", "space_to_depth", "small"))
        if self.stem == "space_to_depth" and self.image_size % 2:
            raise UserError(
                f"model.stem='space_to_depth' needs an even model.image_size, not "
                f"{self.image_size}: use model.stem='imagenet'."
            )
        _check_norm_batch(self.norm_batch, per_step)


@dataclasses.dataclass
class GPT(Model):
    """GPT-2 (Radford et al. 2019): decoder-only, pre-norm, learned positions, tied head."""

    vocabulary: int = 50257
    context: int = 1024  # the longest sequence, in tokens
    layers: int = 12
    width: int = 768
    heads: int = 12
    dropout: float = 0.0
    attention: str = "plain"  # or "flash": a kernel on TPUs, see tftpu.models.layers.attention
    remat: str = "none"  # or "block": each is computed again in the backward pass, not kept

    def validate(self, per_step: Share) -> None:
        check_remat(self.remat)
        check_attention(self.attention)
        if self.width % self.heads:
            raise UserError(
                f"model.width {self.width} is not a multiple of model.heads {self.heads}."
            )


@dataclasses.dataclass
class ConvNeXt(Model):
    """ConvNeXt (Liu et al. 2022, https://arxiv.org/abs/2201.03545)."""

    blocks: tuple[int, ...] = (3, 3, 9, 3)  # a stage
    widths: tuple[int, ...] = (96, 192, 384, 768)  # channels of each stage
    image_size: int = 224
    channels: int = 3
    num_classes: int = 1000
    layer_scale: float = 1e-6  # the factor of a branch at first; 0: no factor
    stochastic_depth: float = 0.0  # of the last block; falls to 0 at the first
    remat: str = "none"  # or "block": each is computed again in the backward pass, not kept

    def validate(self, per_step: Share) -> None:
        check_remat(self.remat)
        _check_stages(self, "widths")
        _check_rate("stochastic_depth", self.stochastic_depth)


@dataclasses.dataclass
class EfficientNetV2(Model):
    """EfficientNetV2 (Tan & Le 2021, https://arxiv.org/abs/2104.00298)."""

    blocks: tuple[int, ...] = (2, 4, 4, 6, 9, 15)  # a stage
    widths: tuple[int, ...] = (24, 48, 64, 128, 160, 256)  # channels that a stage gives
    strides: tuple[int, ...] = (1, 2, 2, 2, 1, 2)
    expand: tuple[int, ...] = (1, 4, 4, 4, 6, 6)  # times its input, within a block
    fused_stages: int = 3  # the first so many; the others are depthwise, with squeeze and excite
    squeeze: float = 0.25  # of a block's input
    stem_width: int = 24
    head_width: int = 1280
    image_size: int = 300  # in training; the paper evaluates at a larger one
    channels: int = 3
    num_classes: int = 1000
    norm_batch: int | str = 32  # consecutive examples that share batch statistics, or "global"
    dropout: float = 0.2
    stochastic_depth: float = 0.2  # beyond the last block; falls to 0 at the first
    remat: str = "none"  # or "block": each is computed again in the backward pass, not kept

    def validate(self, per_step: Share) -> None:
        check_remat(self.remat)
        _check_stages(self, "widths", "strides", "expand")
        _check_rate("dropout", self.dropout)
        _check_rate("stochastic_depth", self.stochastic_depth)
        _check_norm_batch(self.norm_batch, per_step)


@dataclasses.dataclass
class ViT(Model):
    """Vision Transformer (Dosovitskiy et al. 2020, https://arxiv.org/abs/2010.11929)."""

    patch: int = 16
    layers: int = 12
    width: int = 768
    heads: int = 12
    # "token": a class token and learned positions; "mean": the mean over patches and fixed
    # positions (Beyer et al. 2022, https://arxiv.org/abs/2205.01580).
    pooling: str = "token"
    image_size: int = 224
    channels: int = 3
    num_classes: int = 1000
    dropout: float = 0.0
    stochastic_depth: float = 0.0  # of the last block; falls to 0 at the first
    attention: str = "plain"  # or "flash": a kernel on TPUs, see tftpu.models.layers.attention
    remat: str = "none"  # or "block": each is computed again in the backward pass, not kept

    def validate(self, per_step: Share) -> None:
        check_remat(self.remat)
        check_attention(self.attention)
        _check_heads(self)
        _check_one_of("pooling", self.pooling, ("token", "mean"))
        _check_rate("dropout", self.dropout)
        _check_rate("stochastic_depth", self.stochastic_depth)
        if self.image_size % self.patch:
            raise UserError(
                f"model.image_size {self.image_size} is not a multiple of model.patch {self.patch}."
            )
        if self.pooling == "mean" and self.width % 4:
            raise UserError(
                f"model.width is {self.width}: model.pooling='mean' needs a multiple of 4, for the "
                "sines and cosines of rows and columns."
            )


@dataclasses.dataclass
class BERT(Model):
    """BERT (Devlin et al. 2018, https://arxiv.org/abs/1810.04805): encoder-only, post-norm."""

    vocabulary: int = 30522
    context: int = 512  # the longest sequence, in tokens
    types: int = 2  # of sentences
    layers: int = 12
    width: int = 768
    heads: int = 12
    head: str = "masked_lm"  # or "classes"
    num_classes: int = 2  # of the head "classes"
    dropout: float = 0.1
    attention: str = "plain"  # or "flash": a kernel on TPUs, see tftpu.models.layers.attention
    remat: str = "none"  # or "block": each is computed again in the backward pass, not kept

    def validate(self, per_step: Share) -> None:
        check_remat(self.remat)
        check_attention(self.attention)
        _check_heads(self)
        _check_one_of("head", self.head, ("masked_lm", "classes"))
        _check_rate("dropout", self.dropout)


@dataclasses.dataclass
class Llama(Model):
    """Llama (Touvron et al. 2023, https://arxiv.org/abs/2302.13971) and its successors."""

    vocabulary: int = 32000
    context: int = 2048  # the longest sequence that it is meant for, in tokens
    layers: int = 12
    width: int = 768
    heads: int = 12
    kv_heads: int = 12  # of keys and values, each shared by heads / kv_heads queries
    hidden: int = 2048  # within the feed-forward part
    tied: bool = False  # whether the head is the token embedding
    rope_base: float = 10000.0
    rope_scaling: float = 1.0  # Llama 3.1 and later: stretches the long waves of the positions
    epsilon: float = 1e-5
    attention: str = "plain"  # or "flash": a kernel on TPUs, see tftpu.models.layers.attention
    remat: str = "none"  # or "block": each is computed again in the backward pass, not kept

    def validate(self, per_step: Share) -> None:
        check_remat(self.remat)
        check_attention(self.attention)
        _check_heads(self)
        if not 1 <= self.kv_heads <= self.heads or self.heads % self.kv_heads:
            raise UserError(
                f"model.kv_heads {self.kv_heads} does not divide model.heads {self.heads}."
            )
        if self.width // self.heads % 2:
            raise UserError(
                f"model.width {self.width} gives each of {self.heads} heads an odd number of "
                "channels: rotary positions turn pairs."
            )
        if self.rope_scaling < 1.0:
            raise UserError(f"model.rope_scaling is {self.rope_scaling}: it must be 1 or more.")


SIZES: dict[str, Model] = {
    model.name: model
    for model in (
        ResNet("resnet18", blocks=(2, 2, 2, 2), bottleneck=False),
        ResNet("resnet34", blocks=(3, 4, 6, 3), bottleneck=False),
        ResNet("resnet50", blocks=(3, 4, 6, 3)),
        ResNet("resnet101", blocks=(3, 4, 23, 3)),
        ResNet("resnet152", blocks=(3, 8, 36, 3)),
        GPT("gpt2_small", layers=12, width=768, heads=12),
        GPT("gpt2_medium", layers=24, width=1024, heads=16),
        GPT("gpt2_large", layers=36, width=1280, heads=20),
        GPT("gpt2_xl", layers=48, width=1600, heads=25),
        # The paper's rates of stochastic depth for 300 epochs on ImageNet-1k, table 5.
        ConvNeXt("convnext_tiny", stochastic_depth=0.1),
        ConvNeXt("convnext_small", blocks=(3, 3, 27, 3), stochastic_depth=0.4),
        ConvNeXt(
            "convnext_base",
            blocks=(3, 3, 27, 3),
            widths=(128, 256, 512, 1024),
            stochastic_depth=0.5,
        ),
        EfficientNetV2(
            "efficientnetv2_b0",
            blocks=(1, 2, 2, 3, 5, 8),
            widths=(16, 32, 48, 96, 112, 192),
            stem_width=32,
            image_size=192,
        ),
        EfficientNetV2("efficientnetv2_s"),
        EfficientNetV2(
            "efficientnetv2_m",
            blocks=(3, 5, 5, 7, 14, 18, 5),
            widths=(24, 48, 80, 160, 176, 304, 512),
            strides=(1, 2, 2, 2, 1, 2, 1),
            expand=(1, 4, 4, 4, 6, 6, 6),
            image_size=384,
            dropout=0.3,
        ),
        ViT("vit_ti16", width=192, heads=3),
        ViT("vit_s16", width=384, heads=6),
        ViT("vit_b16"),
        ViT("vit_l16", layers=24, width=1024, heads=16),
        BERT("bert_base"),
        BERT("bert_large", layers=24, width=1024, heads=16),
        # The shape of Karpathy's stories110M, Llama 3.2 1B, Llama 3 8B.
        Llama("llama_110m", context=1024, tied=True),
        Llama(
            "llama_1b",
            vocabulary=128256,
            context=131072,
            layers=16,
            width=2048,
            heads=32,
            kv_heads=8,
            hidden=8192,
            tied=True,
            rope_base=500000.0,
            rope_scaling=32.0,
        ),
        Llama(
            "llama_8b",
            vocabulary=128256,
            context=8192,
            layers=32,
            width=4096,
            heads=32,
            kv_heads=8,
            hidden=14336,
            rope_base=500000.0,
        ),
    )
}


def check_attention(attention: str) -> None:
    """Raises `UserError` for what `tftpu.models.layers.attention` does not know."""
    if attention not in ATTENTIONS:
        raise UserError(
            f"There is no model.attention {attention!r}.{did_you_mean(attention, ATTENTIONS)}"
        )


def check_remat(remat: str) -> None:
    """Raises `UserError` for what `tftpu.models.layers.remat` does not know."""
    _check_one_of("remat", remat, REMATS)


def _check_one_of(field: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise UserError(f"There is no model.{field} {value!r}.{did_you_mean(value, allowed)}")


def _check_rate(field: str, value: float) -> None:
    if not 0 <= value < 1:
        raise UserError(f"model.{field} is {value}: it must be 0 or more, and below 1.")


def _check_heads(model: Model) -> None:
    if model.width % model.heads:
        raise UserError(
            f"model.width {model.width} is not a multiple of model.heads {model.heads}."
        )


def _check_stages(model: Model, *fields: str) -> None:
    """Each of the fields must have an entry a stage."""
    for field in fields:
        if len(getattr(model, field)) != len(model.blocks):
            raise UserError(
                f"model.{field} has {len(getattr(model, field))} entries and model.blocks "
                f"{len(model.blocks)}: give one a stage in both."
            )


def _check_norm_batch(norm_batch: int | str, per_step: Share) -> None:
    if norm_batch == "global":
        if per_step.gradient_accumulation_steps > 1:
            raise UserError(
                "model.norm_batch='global' needs the whole batch at once and train.gradient_accumulation_steps is "
                f"{per_step.gradient_accumulation_steps}: use train.gradient_accumulation_steps=1, or a number for model.norm_batch."
            )
        return
    if not isinstance(norm_batch, int) or norm_batch < 1:
        raise UserError(
            f"model.norm_batch is {norm_batch!r}: it must be a number of examples, or 'global'."
        )
    if per_step.examples % norm_batch:
        raise UserError(
            f"model.norm_batch={norm_batch} does not divide the {per_step.examples} examples that "
            f"one of {per_step.replicas} replicas holds in one of {per_step.gradient_accumulation_steps} "
            "microbatches: batch statistics need whole groups. Use a divisor of it, or a larger "
            "data.global_batch_size."
        )
