"""Checks of hyper-parameters, shared by the configs of all families and by the layers."""

import dataclasses
from collections.abc import Sequence
from typing import Protocol

from tftpu.blocks import REMATS
from tftpu.config import ModelConfig, PerReplicaBatch
from tftpu.errors import UserError, did_you_mean
from tftpu.kernels import ATTENTIONS

SCANS = ("auto", "none", "block")
_DEEPEST = 10_000  # largest number of blocks or layers that a config may have
_LARGEST = (1 << 31) - 1


class _HeadsConfig(Protocol):
    width: int
    heads: int


def check_attention(implementation: str) -> None:
    """Raises `UserError` for an implementation that `tftpu.kernels.attention` does not have."""
    check_choice("attention", implementation, ATTENTIONS)


def check_remat(value: str) -> None:
    """Raises `UserError` for a mode of `remat` that `tftpu.models.blocks.block_model` lacks."""
    check_choice("remat", value, REMATS)


def check_scan(value: str) -> None:
    """Raises `UserError` for a mode of `scan` that `tftpu.blocks.scanned` lacks."""
    check_choice("scan", value, SCANS)


def check_choice(field: str, value: str, allowed: tuple[str, ...]) -> None:
    """Raises `UserError` if `value` is not allowed."""
    if value not in allowed:
        raise UserError(f"There is no model.{field} {value!r}.{did_you_mean(value, allowed)}")


def check_rate(field: str, value: float) -> None:
    """Raises `UserError` for a dropout rate outside [0, 1)."""
    if not 0 <= value < 1:
        raise UserError(f"model.{field} is {value}: it must be at least 0, and below 1.")


def check_sizes(config: ModelConfig, may_be_zero: tuple[str, ...] = ()) -> None:
    """Raises `UserError` for a whole number below 1, alone or in a tuple.

    Also for an empty tuple, for a size above 2**31 - 1, and for more than 10,000 blocks or layers.

    Args:
        config: the config of a family.
        may_be_zero: names of fields that may be 0, besides "lora".
    """
    for field, value in dataclasses.asdict(config).items():
        if value == ():
            raise UserError(f"model.{field} is (): give it an entry for each stage.")
        low = 0 if field in ("lora", *may_be_zero) else 1
        high = _DEEPEST if field in ("blocks", "layers") else _LARGEST
        for number in value if isinstance(value, tuple) else (value,):
            if not isinstance(number, int) or isinstance(number, bool):
                continue
            if number < low:
                raise UserError(f"model.{field} is {value}: it must be {low} or more.")
            if number > high:
                raise UserError(f"model.{field} is {value}: it must be {high:,} or less.")


def check_heads(config: _HeadsConfig) -> None:
    """Raises `UserError` if the width cannot be split evenly among the heads."""
    if config.width % config.heads:
        raise UserError(
            f"model.width {config.width} is not a multiple of model.heads {config.heads}."
        )


def check_stages(blocks: Sequence[int], **fields: Sequence[int]) -> None:
    """Raises `UserError` for a field that does not have one entry for each stage."""
    for name, value in fields.items():
        if len(value) != len(blocks):
            raise UserError(
                f"model.{name} has {len(value)} entries, but model.blocks has {len(blocks)}: give "
                "both one entry for each stage."
            )


def check_norm_batch(value: int | str, batch: PerReplicaBatch) -> None:
    """Raises `UserError` if `value` does not divide a microbatch, or is "global" with several."""
    if value == "global":
        if batch.gradient_accumulation_steps > 1:
            raise UserError(
                "model.norm_batch='global' needs the whole batch at once, but "
                f"train.gradient_accumulation_steps is {batch.gradient_accumulation_steps}: set "
                "that to 1, or model.norm_batch to a number."
            )
        return
    if not isinstance(value, int) or value < 1:
        raise UserError(
            f"model.norm_batch is {value!r}: it must be a number of examples, or 'global'."
        )
    if batch.examples % value:
        each = f"each of {batch.replicas} replicas" if batch.replicas > 1 else "the one replica"
        raise UserError(
            f"model.norm_batch={value} does not divide the {batch.examples} examples that {each} "
            "computes at a time with "
            f"train.gradient_accumulation_steps={batch.gradient_accumulation_steps}: batch "
            "statistics need complete groups. Use a divisor of that number, or a larger "
            "data.global_batch_size."
        )
