"""The hyper-parameters of each family, and the published sizes by name.

This file imports no Keras, so that a config file is loaded and checked in milliseconds. Only
`build` imports the family's module.
"""

import dataclasses
from typing import TYPE_CHECKING

from tftpu.config import OPERATIONAL, ModelConfig, PerReplicaBatch
from tftpu.errors import UserError
from tftpu.models import checks

if TYPE_CHECKING:
    import keras


@dataclasses.dataclass
class ResNet(ModelConfig):
    """ResNet v1.5 (He et al. 2015, https://arxiv.org/abs/1512.03385): strides in the 3x3 layers."""

    blocks: tuple[int, ...] = (3, 4, 6, 3)  # residual blocks in each stage
    width: int = 64  # channels of the first stage; each later stage doubles them
    bottleneck: bool = True
    stride_in: str = "3x3"  # "1x1" is ResNet v1, as in keras.applications
    # "imagenet": 7x7 with stride 2, then max pooling. "space_to_depth": the same result, computed
    # as a 4x4 convolution over blocks of 2x2 pixels. "small": 3x3 with stride 1.
    stem: str = "imagenet"
    image_size: int = 224
    channels: int = 3
    num_classes: int = 1000
    norm_batch: int | str = 32  # consecutive examples that share statistics, or "global"
    dropout: float = 0.0
    # What the backward pass recomputes; see `BlockModel`.
    remat: str = dataclasses.field(default="none", metadata=OPERATIONAL)

    def validate(self, batch: PerReplicaBatch) -> None:
        checks.check_sizes(self)
        checks.check_remat(self.remat)
        checks.check_choice("stride_in", self.stride_in, ("3x3", "1x1"))
        checks.check_choice("stem", self.stem, ("imagenet", "space_to_depth", "small"))
        if self.stem == "space_to_depth" and self.image_size % 2:
            raise UserError(
                f"model.stem='space_to_depth' needs an even model.image_size, not "
                f"{self.image_size}: use model.stem='imagenet'."
            )
        checks.check_rate("dropout", self.dropout)
        checks.check_norm_batch(self.norm_batch, batch)

    def build(self) -> "keras.Model":
        from tftpu.models.families import resnet

        return resnet.build(self)


@dataclasses.dataclass
class GPT(ModelConfig):
    """GPT-2 (Radford et al. 2019): decoder-only, pre-norm, learned positions, tied head."""

    vocabulary: int = 50257
    context: int = 1024  # longest sequence, in tokens
    layers: int = 12
    width: int = 768
    heads: int = 12
    dropout: float = 0.0
    # "plain"; "flash": a Pallas kernel on TPUs; "auto": whichever of the two costs less.
    attention: str = dataclasses.field(default="auto", metadata=OPERATIONAL)
    # What the backward pass recomputes; see `BlockModel`.
    remat: str = dataclasses.field(default="none", metadata=OPERATIONAL)
    # "block" runs the blocks as one loop on the JAX engine; "auto" does so from 10**9 parameters.
    scan: str = dataclasses.field(default="auto", metadata=OPERATIONAL)

    def validate(self, batch: PerReplicaBatch) -> None:
        checks.check_sizes(self)
        checks.check_remat(self.remat)
        checks.check_scan(self.scan)
        checks.check_attention(self.attention)
        checks.check_heads(self)
        checks.check_rate("dropout", self.dropout)

    def build(self) -> "keras.Model":
        from tftpu.models.families import gpt

        return gpt.build(self)


@dataclasses.dataclass
class ConvNeXt(ModelConfig):
    """ConvNeXt (Liu et al. 2022, https://arxiv.org/abs/2201.03545)."""

    blocks: tuple[int, ...] = (3, 3, 9, 3)  # blocks in each stage
    widths: tuple[int, ...] = (96, 192, 384, 768)  # output channels of each stage
    image_size: int = 224
    channels: int = 3
    num_classes: int = 1000
    layer_scale: float = 1e-6  # initial factor of each residual branch; 0: no factor
    # Drop rate of the last block; the rate rises linearly from 0 in the first block.
    stochastic_depth: float = 0.0
    # What the backward pass recomputes; see `BlockModel`.
    remat: str = dataclasses.field(default="none", metadata=OPERATIONAL)

    def validate(self, batch: PerReplicaBatch) -> None:
        checks.check_sizes(self)
        checks.check_remat(self.remat)
        checks.check_stages(self.blocks, widths=self.widths)
        checks.check_rate("stochastic_depth", self.stochastic_depth)

    def build(self) -> "keras.Model":
        from tftpu.models.families import convnext

        return convnext.build(self)


@dataclasses.dataclass
class EfficientNetV2(ModelConfig):
    """EfficientNetV2 (Tan & Le 2021, https://arxiv.org/abs/2104.00298)."""

    blocks: tuple[int, ...] = (2, 4, 4, 6, 9, 15)  # blocks in each stage
    widths: tuple[int, ...] = (24, 48, 64, 128, 160, 256)  # output channels of each stage
    strides: tuple[int, ...] = (1, 2, 2, 2, 1, 2)
    expand: tuple[int, ...] = (1, 4, 4, 4, 6, 6)  # expansion factor within a block
    # Number of first stages with fused blocks; the other stages have depthwise blocks.
    fused_stages: int = 3
    squeeze: float = 0.25  # width of squeeze-and-excite, relative to a block's input
    stem_width: int = 24
    head_width: int = 1280
    image_size: int = 300  # the size for training; the paper evaluates at a larger one
    channels: int = 3
    num_classes: int = 1000
    norm_batch: int | str = 32  # consecutive examples that share statistics, or "global"
    dropout: float = 0.2
    # Drop rate that a block after the last would have; it rises linearly from 0 in the first.
    stochastic_depth: float = 0.2
    # What the backward pass recomputes; see `BlockModel`.
    remat: str = dataclasses.field(default="none", metadata=OPERATIONAL)

    def validate(self, batch: PerReplicaBatch) -> None:
        checks.check_sizes(self, may_be_zero=("fused_stages",))
        checks.check_remat(self.remat)
        checks.check_stages(
            self.blocks, widths=self.widths, strides=self.strides, expand=self.expand
        )
        checks.check_rate("dropout", self.dropout)
        checks.check_rate("stochastic_depth", self.stochastic_depth)
        checks.check_norm_batch(self.norm_batch, batch)

    def build(self) -> "keras.Model":
        from tftpu.models.families import efficientnetv2

        return efficientnetv2.build(self)


@dataclasses.dataclass
class ViT(ModelConfig):
    """Vision Transformer (Dosovitskiy et al. 2020, https://arxiv.org/abs/2010.11929)."""

    patch: int = 16
    layers: int = 12
    width: int = 768
    heads: int = 12
    # "token": a class token and learned positions. "mean": the mean over the patches, with fixed
    # positions (Beyer et al. 2022, https://arxiv.org/abs/2205.01580).
    pooling: str = "token"
    image_size: int = 224
    channels: int = 3
    num_classes: int = 1000
    dropout: float = 0.0
    # Drop rate of the last block; the rate rises linearly from 0 in the first block.
    stochastic_depth: float = 0.0
    # "plain"; "flash": a Pallas kernel on TPUs; "auto": whichever of the two costs less.
    attention: str = dataclasses.field(default="auto", metadata=OPERATIONAL)
    # What the backward pass recomputes; see `BlockModel`.
    remat: str = dataclasses.field(default="none", metadata=OPERATIONAL)
    # "block" runs the blocks as one loop on the JAX engine; "auto" does so from 10**9 parameters.
    scan: str = dataclasses.field(default="auto", metadata=OPERATIONAL)

    def validate(self, batch: PerReplicaBatch) -> None:
        checks.check_sizes(self)
        checks.check_remat(self.remat)
        checks.check_scan(self.scan)
        checks.check_attention(self.attention)
        checks.check_heads(self)
        checks.check_choice("pooling", self.pooling, ("token", "mean"))
        checks.check_rate("dropout", self.dropout)
        checks.check_rate("stochastic_depth", self.stochastic_depth)
        if self.image_size % self.patch:
            raise UserError(
                f"model.image_size {self.image_size} is not a multiple of model.patch {self.patch}."
            )
        if self.pooling == "mean" and self.width % 4:
            raise UserError(
                f"model.width is {self.width}: model.pooling='mean' needs a multiple of 4, "
                "because sines and cosines of rows and columns each take a quarter of it."
            )

    def build(self) -> "keras.Model":
        from tftpu.models.families import vit

        return vit.build(self)


@dataclasses.dataclass
class BERT(ModelConfig):
    """BERT (Devlin et al. 2018, https://arxiv.org/abs/1810.04805): encoder-only, post-norm."""

    vocabulary: int = 30522
    context: int = 512  # longest sequence, in tokens
    types: int = 2  # number of segment types, such as sentence A and sentence B
    layers: int = 12
    width: int = 768
    heads: int = 12
    head: str = "masked_lm"  # "masked_lm" or "classes"
    num_classes: int = 2  # number of classes, for head="classes"
    dropout: float = 0.1
    # "plain"; "flash": a Pallas kernel on TPUs; "auto": whichever of the two costs less.
    attention: str = dataclasses.field(default="auto", metadata=OPERATIONAL)
    # What the backward pass recomputes; see `BlockModel`.
    remat: str = dataclasses.field(default="none", metadata=OPERATIONAL)
    # "block" runs the blocks as one loop on the JAX engine; "auto" does so from 10**9 parameters.
    scan: str = dataclasses.field(default="auto", metadata=OPERATIONAL)

    def validate(self, batch: PerReplicaBatch) -> None:
        checks.check_sizes(self)
        checks.check_remat(self.remat)
        checks.check_scan(self.scan)
        checks.check_attention(self.attention)
        checks.check_heads(self)
        checks.check_choice("head", self.head, ("masked_lm", "classes"))
        checks.check_rate("dropout", self.dropout)

    def build(self) -> "keras.Model":
        from tftpu.models.families import bert

        return bert.build(self)


@dataclasses.dataclass
class Llama(ModelConfig):
    """Llama (Touvron et al. 2023, https://arxiv.org/abs/2302.13971) and its successors."""

    vocabulary: int = 32000
    context: int = 2048  # longest sequence that the model was trained for, in tokens
    layers: int = 12
    width: int = 768
    heads: int = 12
    kv_heads: int = 12  # key and value heads, each shared by heads / kv_heads query heads
    hidden: int = 2048  # width of the feed-forward layers
    tied: bool = False  # whether the head shares the token embedding
    rope_base: float = 10000.0
    rope_scaling: float = 1.0  # factor by which Llama 3.1 stretches long wavelengths
    epsilon: float = 1e-5
    # "plain"; "flash": a Pallas kernel on TPUs; "auto": whichever of the two costs less.
    attention: str = dataclasses.field(default="auto", metadata=OPERATIONAL)
    # What the backward pass recomputes; see `BlockModel`.
    remat: str = dataclasses.field(default="none", metadata=OPERATIONAL)
    # "block" runs the blocks as one loop on the JAX engine; "auto" does so from 10**9 parameters.
    scan: str = dataclasses.field(default="auto", metadata=OPERATIONAL)

    def validate(self, batch: PerReplicaBatch) -> None:
        checks.check_sizes(self)
        checks.check_remat(self.remat)
        checks.check_scan(self.scan)
        checks.check_attention(self.attention)
        checks.check_heads(self)
        if not 1 <= self.kv_heads <= self.heads or self.heads % self.kv_heads:
            raise UserError(
                f"model.kv_heads {self.kv_heads} does not divide model.heads {self.heads}."
            )
        if self.width // self.heads % 2:
            raise UserError(
                f"model.width {self.width} gives each of the {self.heads} heads an odd number of "
                "channels, but rotary positions rotate pairs of channels: choose an even "
                "model.width / model.heads."
            )
        if self.rope_scaling < 1.0:
            raise UserError(f"model.rope_scaling is {self.rope_scaling}: it must be 1 or more.")

    def build(self) -> "keras.Model":
        from tftpu.models.families import llama

        return llama.build(self)


SIZES: dict[str, ModelConfig] = {
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
        # Rates of stochastic depth for 300 epochs on ImageNet-1k, from the paper's table 5.
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
        # The next four are Karpathy's stories110M, Llama 3.2 1B, Llama 2 7B and Llama 3 8B.
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
            "llama_7b",
            context=4096,
            layers=32,
            width=4096,
            heads=32,
            kv_heads=32,
            hidden=11008,
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

# Trainable parameters of each size. A test compares them with built models.
PARAMETERS = {
    "bert_base": 109_514_298,
    "bert_large": 335_174_458,
    "convnext_base": 88_591_464,
    "convnext_small": 50_223_688,
    "convnext_tiny": 28_589_128,
    "efficientnetv2_b0": 7_139_704,
    "efficientnetv2_m": 54_139_356,
    "efficientnetv2_s": 21_458_488,
    "gpt2_large": 774_030_080,
    "gpt2_medium": 354_823_168,
    "gpt2_small": 124_439_808,
    "gpt2_xl": 1_557_611_200,
    "llama_110m": 109_529_856,
    "llama_1b": 1_235_814_400,
    "llama_7b": 6_738_415_616,
    "llama_8b": 8_030_261_248,
    "resnet101": 44_549_160,
    "resnet152": 60_192_808,
    "resnet18": 11_689_512,
    "resnet34": 21_797_672,
    "resnet50": 25_557_032,
    "vit_b16": 86_567_656,
    "vit_l16": 304_326_632,
    "vit_s16": 22_050_664,
    "vit_ti16": 5_717_416,
}
