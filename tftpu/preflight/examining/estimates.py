"""Estimates memory and time by closed forms, before anything is lowered."""

from collections.abc import Iterable, Iterator

from tftpu.amounts import format_size
from tftpu.config.mesh import AUTO
from tftpu.errors import UserError
from tftpu.preflight.examining.examiner import Examiner
from tftpu.preflight.slice_report import ROOM, count_parts
from tftpu.tpu.slices import Slice


def estimate_slices(examiner: Examiner, targets: Iterable[Slice]) -> Iterator[str]:
    """Yields lines with closed-form estimates for each slice, before anything is lowered.

    Must run in the thread of `examiner.caller`.
    """
    longest = 0
    header = (
        "Estimate before compiling, by arithmetic: weights and optimizer's state on a device, "
        "without gradients and activations; the model's matrix products at the chip's peak\n"
    )
    for target in targets:
        try:
            examiner.count_examples(target)
        except UserError as error:
            yield f"{header}  {target.name}: cannot be used. {error}"
            header = ""
            continue
        tried = _list_until_one_holds(examiner, target)
        shown = (
            tried[-1:] if examiner.options.mesh == AUTO else dict.fromkeys((examiner, tried[-1]))
        )
        text = "; ".join(_format_state(one, target) for one in shown)
        text += _suggest_dividing(examiner, target)
        last = tried[-1]
        if last.holds_state(target):
            text += f"; {_format_least_step(last, target)}"
            longest = max(longest, last.measure_state(target).weights * _count_parts(last, target))
        yield f"{header}  {target.name}: {text}"
        header = ""
    if longest:
        yield f"  {estimate_duration(longest)}"


def _list_until_one_holds(examiner: Examiner, target: Slice) -> list[Examiner]:
    """Returns this examiner and those of finer meshes, up to the first where the state fits."""
    tried: list[Examiner] = [examiner]
    for finer in examiner.list_finer(target):
        if tried[-1].holds_state(target):
            break
        tried.append(finer)
    return tried


def _format_state(examiner: Examiner, target: Slice) -> str:
    """Returns the size of the state on a device, the device's memory, and whether it can fit."""
    held, limit = examiner.measure_state(target).total, target.generation.hbm_limit
    mesh = examiner.lowering.format_mesh(target.replicas)
    where = f" with the mesh {mesh}" if mesh else ""
    verdict = "" if examiner.holds_state(target) else ": does not fit"
    return f"{format_size(held)} of {format_size(limit)}{where}{verdict}"


def _format_least_step(examiner: Examiner, target: Slice) -> str:
    """Returns the time and the price of the model's matrix products at a slice's peak FLOP/s."""
    built = examiner.build_shared(target.replicas, examiner.count_examples(target))
    with examiner.processes.progress.show_phase("counting the products of the model"):
        seconds = built.count_flops() / target.flops_per_s
    return f"at the peak {examiner.format_step(seconds, target)}"


def _suggest_dividing(examiner: Examiner, target: Slice) -> str:
    """Returns advice to shard the state with a mesh; "" if that is not needed or does not help."""
    if examiner.lowering.format_mesh(target.replicas) or examiner.holds_state(target):
        return ""
    share = examiner.measure_state(target).total / target.replicas
    if share > ROOM * target.generation.hbm_limit:
        return ""
    engine = "--config.cluster.engine=jax " if examiner.options.engine == "tensorflow" else ""
    return f"; with {engine}--config.cluster.mesh=fsdp:-1: {format_size(share)}"


def _count_parts(examiner: Examiner, target: Slice) -> int:
    """Returns the number of devices that share one copy of the model."""
    return count_parts(examiner.lowering.format_mesh(target.replicas), target.replicas)


def estimate_duration(weights: int, what: str = "slice") -> str:
    """Returns a sentence on the usual compile time of models with this many bytes of weights.

    Processor time measured for one slice: 4 s with 3 MB (python_gpt), 64 s with 440 MB
    (llama_110m_tinystories), 115 s with 88 MB (vit_s16_imagenet), 150 s on v5e and 600 s on v6e
    with 100 MB (resnet50_imagenet), 280 to 380 s with 32 GB (Llama 3.1 8B). No simple formula of
    sizes or of the program fits these.
    """
    usual = "five to fifteen minutes" if weights > 4e9 else "one to ten minutes"
    if weights < 8e6:
        usual = "less than a minute"
    return (
        f"Compiling usually takes {usual} per {what} for models of this size, on 2 idle CPU cores, "
        "unless it is in the cache."
    )
