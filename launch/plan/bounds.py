"""Closed forms for a candidate's memory and step time: lower bounds, and rough estimates.

The bounds prune candidates without compiling them; the estimates sort the other candidates.
"""

import dataclasses
from collections.abc import Mapping

from tftpu.config.mesh import DATA, FSDP, SEQUENCE, TENSOR, mesh_sizes
from tftpu.engines.lowered import StateBytes
from tftpu.launch.plan.candidates import Candidate, count_shards, name_state
from tftpu.preflight.pricing.collectives import estimate_all_reduce
from tftpu.tpu.slices import Slice

_SENT = 0.5  # weights and gradients are sent as bfloat16, in half of the bytes of float32
_RECOMPUTED = 4 / 3  # FLOPs of a step that recomputes its blocks, relative to one that does not
# Bytes of a step's activations for each kind of `remat`, relative to the inputs of the blocks. On
# compiled Llama 3.1 8B with flash attention: 36 ("none"), 12 ("products") and 2.5 ("block").
_KEPT = {"none": 36, "products": 12, "attention": 3, "block": 2, "offload": 1}
# Time of the FLOPs, relative to that at peak; how often activations are written or read. Fitted to
# 14 compiled steps of a Llama of 1.1 billion weights on v5e and v6e, with errors up to 37 %.
_WORK, _PASSES = 1.3, 8
_BLOCK_SUMS = 4  # all-reduces of a block over `tensor`: of attention and MLP, in both passes


@dataclasses.dataclass(frozen=True)
class Facts:
    """Facts about a config that the closed forms need.

    Attributes:
        flops: model FLOPs of a global batch, forward and backward.
        examples: the number of examples in a global batch.
        tokens: the number of tokens in a global batch; None if the examples are not tokens.
        input_bytes: bytes of one example at the input of the model's blocks.
        parameters: the number of the model's parameters, trained or not.
        weights, trained: bytes of all weights, and of the trained ones.
        blocks: whether `train.remat` can recompute blocks of the model.
        statistics: whether the model normalizes with statistics of a microbatch.
        states: for each result of `candidates.name_state`, the bytes of the training state on a
            device, or the reason why the model cannot be sharded that way.
    """

    flops: int
    examples: int
    tokens: int | None
    input_bytes: int
    parameters: int
    weights: int
    trained: int
    blocks: bool
    statistics: bool
    states: Mapping[str, StateBytes | str]


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A candidate with its bounds and estimates.

    Attributes:
        candidate: the candidate.
        state_bytes: bytes of weights, their averages and the optimizer's state on a device.
        least_bytes: lower bound of the bytes that the program needs on a device.
        likely_bytes: estimate of the bytes that the program needs on a device.
        limit_bytes: bytes of a device's memory.
        least_seconds: time of a step at peak FLOP/s or peak bandwidth, whichever is longer.
        likely_seconds: estimate of a step's time: the sum of the times for computation, memory
            traffic and communication.
        usd_hour: dollars for an hour of the slice.
    """

    candidate: Candidate
    state_bytes: int
    least_bytes: int
    likely_bytes: int
    limit_bytes: int
    least_seconds: float
    likely_seconds: float
    usd_hour: float


def estimate(candidate: Candidate, target: Slice, facts: Facts, usd_hour: float) -> Estimate:
    """Returns the bounds and estimates for a candidate.

    The least memory is that of the state, and of the inputs of blocks unless the host keeps them.
    The least time is that of the model's FLOPs, or if longer, that of reading the weights and of
    reading and writing the optimizer's state and averages.

    Args:
        candidate: the candidate.
        target: the slice of the candidate.
        facts: the facts about the config.
        usd_hour: dollars for an hour of the slice.
    """
    sizes = mesh_sizes(candidate.mesh or None, target.replicas)
    state = facts.states[name_state(candidate.mesh, target)]
    assert not isinstance(state, str), state
    examples = facts.examples // count_shards(candidate.mesh, target)
    # Inputs of blocks may also be sharded along `sequence` and `tensor`.
    entering = facts.input_bytes * examples // (sizes[SEQUENCE] * sizes[TENSOR])
    part = entering // candidate.microbatches
    gradients = facts.trained // (sizes[FSDP] * sizes[TENSOR])
    work = facts.flops / target.replicas / target.flops_per_s
    traffic = (state.total + state.optimizer + state.averages) / target.bytes_per_s
    again = 1.0 if candidate.remat in ("none", "products") else _RECOMPUTED
    exchange = _estimate_exchange(candidate.microbatches, sizes, target, facts, examples)
    kept = _PASSES * _KEPT[candidate.remat] * entering / target.bytes_per_s
    # Each microbatch reads the weights forward and backward. With several microbatches, sums of
    # the gradients are also written, read and written again.
    sums = gradients if candidate.microbatches > 1 else 0
    reads = candidate.microbatches * (2 * state.weights + 3 * sums) / target.bytes_per_s
    return Estimate(
        candidate=candidate,
        state_bytes=state.total,
        least_bytes=state.total + (0 if candidate.remat == "offload" else part),
        likely_bytes=state.total + gradients + sums + _KEPT[candidate.remat] * part,
        limit_bytes=target.generation.hbm_limit,
        least_seconds=max(work, traffic),
        likely_seconds=_WORK * again * work + traffic + kept + reads + exchange,
        usd_hour=usd_hour,
    )


def _estimate_exchange(
    microbatches: int, sizes: Mapping[str, int], target: Slice, facts: Facts, examples: int
) -> float:
    """Returns an estimate of the seconds that devices communicate in a step.

    Along `fsdp`, each microbatch gathers the weights twice and scatters the sums of the gradients.
    Along `data`, the gradients are summed once. Along `tensor`, each block sums its outputs.
    """
    cut = sizes[TENSOR]
    gathered = microbatches * _SENT * (facts.weights + facts.trained / 2) / cut
    entering = facts.input_bytes * examples / sizes[SEQUENCE]
    sent = {
        FSDP: gathered,
        DATA: _SENT * facts.trained / (cut * sizes[FSDP]),
        TENSOR: _BLOCK_SUMS * entering,
    }
    return sum(_sum_seconds(size, sizes[axis], target) for axis, size in sent.items())


def _sum_seconds(size: float, devices: int, target: Slice) -> float:
    """Returns the seconds in which devices all-reduce `size` bytes; a gather takes half as long."""
    if devices == 1:
        return 0.0
    chips = max(1, min(devices, target.chips_per_slice) // target.generation.cores)
    if chips == 1:
        return size / (target.generation.core_gbps * 1e9)
    return estimate_all_reduce(size, target.single, chips, target.count_links(chips))
