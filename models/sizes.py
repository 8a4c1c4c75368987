"""The zoo's hyper-parameters and its published sizes by name.

No Keras here: a config file names a model, and is checked, in milliseconds.
"""

import dataclasses

from tftpu.config import Model, Share
from tftpu.errors import UserError, did_you_mean

ATTENTIONS = ("plain", "flash")


@dataclasses.dataclass
class ResNet(Model):
    """ResNet v1.5 (He et al. 2015, https://arxiv.org/abs/1512.03385; stride in the 3x3)."""

    blocks: tuple[int, ...] = (3, 4, 6, 3)  # residual blocks a stage
    width: int = 64  # channels of the first stage; doubled from stage to stage
    bottleneck: bool = True
    stem: str = "imagenet"  # "imagenet": 7x7 stride 2 and max pooling; "small": 3x3 stride 1
    image_size: int = 224
    channels: int = 3
    classes: int = 1000
    norm_batch: int | str = 32  # consecutive examples that share batch statistics, or "global"
    dropout: float = 0.0

    def validate(self, per_step: Share) -> None:
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
    attention: str = "plain"  # or "flash": a kernel on TPUs, see tftpu.models.attention

    def validate(self, per_step: Share) -> None:
        check_attention(self.attention)
        if self.width % self.heads:
            raise UserError(
                f"model.width {self.width} is not a multiple of model.heads {self.heads}."
            )


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
    )
}


def check_attention(attention: str) -> None:
    """Raises `UserError` for what `tftpu.models.attention` does not know."""
    if attention not in ATTENTIONS:
        raise UserError(
            f"There is no model.attention {attention!r}.{did_you_mean(attention, ATTENTIONS)}"
        )


def _check_norm_batch(norm_batch: int | str, per_step: Share) -> None:
    if norm_batch == "global":
        if per_step.accumulate > 1:
            raise UserError(
                "model.norm_batch='global' needs the whole batch at once and train.accumulate is "
                f"{per_step.accumulate}: use train.accumulate=1, or a number for model.norm_batch."
            )
        return
    if not isinstance(norm_batch, int) or norm_batch < 1:
        raise UserError(
            f"model.norm_batch is {norm_batch!r}: it must be a number of examples, or 'global'."
        )
    if per_step.examples % norm_batch:
        raise UserError(
            f"model.norm_batch={norm_batch} does not divide the {per_step.examples} examples that "
            f"one of {per_step.replicas} replicas holds in one of {per_step.accumulate} "
            "microbatches: batch statistics need whole groups. Use a divisor of it, or a larger "
            "data.global_batch."
        )
