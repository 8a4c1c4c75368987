"""The search for changes that make a step fit a slice."""

import functools
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tftpu.amounts import format_size
from tftpu.config.mesh import AUTO
from tftpu.engines.lowered import LoweredStep
from tftpu.errors import UserError, counted
from tftpu.preflight import advise
from tftpu.preflight.compiling.compiler import Compiled
from tftpu.preflight.examining.examiner import Examiner
from tftpu.preflight.pricing.cost import count_host_bytes, parse_memory_stats, price
from tftpu.preflight.slice_report import (
    SliceReport,
    describe_host_excess,
    describe_state,
    describe_undivided,
    describe_use,
    suggest_for_state,
    summarize,
)
from tftpu.tpu.slices import Slice


def examine(
    examiner: Examiner, target: Slice, note: Callable[[SliceReport], None] = lambda report: None
) -> SliceReport:
    """Returns the report of one slice, with advice if the step does not fit.

    Args:
        examiner: the check of the model.
        target: the slice.
        note: called with the report of a step that needs too much HBM, before changes are tried.
    """
    report = examiner.examine_once(target)
    if report.fits or not report.compiles or report.exceeds_host:
        return report
    found = advise.parse_memory_error(report.error)
    report.hbm_bytes = found[0] if found else report.hbm_bytes
    note(report)
    progress = examiner.processes.progress
    said = summarize(report)
    if report.mesh and examiner.options.mesh == AUTO:
        said = said.replace(":", f" with mesh={report.mesh}:", 1)
    if report.largest_per_core_batch is not None and not examiner.list_finer(target):
        return report  # no batch fits, and there is no finer mesh to try
    progress.print_unless_over(
        f"{said}; looking for a change that makes it fit: first changes that keep "
        "the update, then smaller batches (Ctrl-C ends the search and prints its results)"
    )
    try:
        return _search_change(examiner, report, target)
    except UserError as error:
        report.advice.append(f"The search for a change that fits has stopped. {error}")
        return report


def _search_change(examiner: Examiner, report: SliceReport, target: Slice) -> SliceReport:
    """Returns the report with advice on changes that fit; with mesh="auto", a finer mesh's report.

    Raises:
        UserError: a change has no result: the time limit passed, or the compiler crashed.
    """
    wider, finer = _try_wider_meshes(examiner, target), examiner.list_finer(target)
    if examiner.options.mesh == AUTO and (wider is not None or finer):
        return wider or _examine_mesh(finer[-1], target)
    if wider is not None:
        report.advice.insert(
            0,
            f"--config.cluster.mesh={wider.mesh} makes this batch fit: {describe_use(wider)}, the "
            "same update.",
        )
    elif report.largest_per_core_batch is None:
        _add_fixes(examiner, report, target)
    return report


def _examine_mesh(examiner: Examiner, target: Slice) -> SliceReport:
    """Returns the report of a finer mesh, and adds the mesh's flag to advice that gives flags."""
    report = examine(examiner, target)
    mesh = f"--config.cluster.mesh={report.mesh} "
    report.advice = [mesh * text.startswith("--config.") + text for text in report.advice]
    return report


def _try_wider_meshes(examiner: Examiner, target: Slice) -> SliceReport | None:
    """Returns the report of the fitting mesh that divides the model least, or None.

    Uses bisection: the further a mesh divides the model, the less memory a device needs.
    """
    found = None
    candidates = examiner.list_finer(target)
    tried = candidates[-1:]  # if the finest mesh does not fit, none does
    while tried:
        [finer] = tried
        report = finer.examine_once(target)
        answer = summarize(report).removeprefix(f"{target.name}: ")
        _add_try(examiner, target, f" with mesh={report.mesh}", answer)
        if report.undecided and found is not None:
            return found
        if report.undecided:
            raise UserError(f"With the mesh {report.mesh}: {report.error}")
        place = candidates.index(finer)
        if report.fits:
            found, candidates = report, candidates[:place]
        elif found is None:
            return None
        else:
            candidates = candidates[place + 1 :]
        tried = candidates[len(candidates) // 2 :][:1]
    return found


def suggest_recomputing(
    examiner: Examiner, target: Slice, per_core: int
) -> tuple[float | None, list[str]]:
    """Returns the seconds of a step that fits with recomputed activations, and advice on it.

    The time is None if no step fits, and infinite if it is not known. There is no advice if the
    model's blocks cannot be recomputed, or already are.

    Args:
        examiner: the check of the model.
        target: the slice.
        per_core: examples per shard of the global batch.
    """
    rebuilt = examiner.options.recomputing
    if rebuilt is None:
        built = examiner.caller.run(lambda: examiner.build_shared(target.replicas, per_core))
        if examiner.options.train.remat != "none" or not built.has_blocks:
            return None, []
    field = f"--config.{'train' if rebuilt is None else 'model'}.remat"
    for remat in examiner.lowering.remats:
        changed: dict[str, Any] = {"remat": remat}
        if rebuilt is not None:
            changed = {"model_fn": functools.partial(rebuilt, remat)}
        change = f" with {field}={remat}"
        step = examiner.lower(target.replicas, per_core, change=change, **changed)
        compiled, seconds, answer = _try_change(examiner, step, target, change)
        if seconds is not None:
            return seconds, [f"{field}={remat} makes this batch fit: {answer}, the same update."]
        if _exceeds_host(compiled, target):
            kept = count_host_bytes(compiled.memory)
            return None, [f"{field}={remat} does not help: {describe_host_excess(kept, target)}"]
    last = examiner.lowering.remats[-1]
    return None, [f"{field}={last} is not enough to make this batch fit."]


def _add_fixes(examiner: Examiner, report: SliceReport, target: Slice) -> None:
    """Adds the needed memory, and changes that fit, to the report of a step that does not fit.

    Smaller batches, up to a dozen, are tried only if no change with the same weight update fits.
    """
    per_core = report.per_core_batch
    limit = target.generation.hbm_limit
    needs, limit = advise.parse_memory_error(report.error) or (2 * limit, limit)
    report.hbm_bytes = needs
    with ThreadPoolExecutor(2, "changes") as pool:  # at once, as each compiler uses one core
        accumulates = pool.submit(_suggest_accumulation, examiner, target, per_core, needs)
        recomputes = pool.submit(suggest_recomputing, examiner, target, per_core)
    found, errors = [], []
    for search in (accumulates, recomputes):
        try:
            found.append(search.result())
        except UserError as error:
            errors.append(error)
    # First the changes that fit, the fastest first; then those that do not.
    found.sort(key=lambda change: (change[0] is None, change[0]))
    report.advice += [text for _, advice in found for text in advice]
    state = examiner.build_shared(target.replicas, per_core).state_bytes
    if found and found[0][0] is not None:
        report.advice += [f"Another change could not be checked. {error}" for error in errors]
        report.advice += describe_undivided(report, state, target)
        return
    if errors:
        raise errors[0]
    report.largest_per_core_batch, report.smallest_failing_batch = find_largest_batch(
        examiner, target, per_core, needs, limit
    )
    if report.largest_per_core_batch:
        report.advice += describe_undivided(report, state, target)
    else:
        report.advice += [describe_state(state), *suggest_for_state(report, state, target)]


def find_largest_batch(
    examiner: Examiner, target: Slice, per_core: int, needs: int, limit: int
) -> tuple[int, int]:
    """Returns the largest tried per-core batch that fits, or 0, and the smallest that does not.

    Args:
        examiner: the check of the model.
        target: the slice.
        per_core: a number of examples per shard of the global batch that does not fit.
        needs: bytes that the step needs with that number.
        limit: bytes of a device's memory.
    """

    def measure_need(batch: int) -> tuple[bool, int]:
        change = f" with a batch of {batch:,} per core, as {per_core:,} are too many"
        step = examiner.lower(target.replicas, batch, change=change)
        compiled, seconds, _ = _try_change(examiner, step, target, change, priced=False)
        if compiled.error and not compiled.out_of_memory:
            raise UserError(f"With {counted(batch, 'example')} per core: {compiled.error}")
        if seconds is not None:
            return True, parse_memory_stats(compiled.memory).total
        wanted = advise.parse_memory_error(compiled.error)
        return False, wanted[0] if wanted else limit + 1

    unit = advise.batch_step(per_core // examiner.microbatches, examiner.options.batch_unit)
    unit *= examiner.microbatches
    return advise.find_largest_batch(measure_need, per_core, needs, limit, unit)


def _suggest_accumulation(
    examiner: Examiner, target: Slice, per_core: int, needs: int
) -> tuple[float | None, list[str]]:
    """Returns the seconds of a step that fits with more microbatches, or None, and advice on it.

    Tries the current number of microbatches times powers of two, from the first that would fit if
    all memory but the state shrank with the microbatch, until more microbatches cannot help.

    Args:
        examiner: the check of the model.
        target: the slice.
        per_core: examples per shard of the global batch.
        needs: bytes that the step needs without this change.
    """
    state = examiner.caller.run(
        lambda: examiner.build_shared(target.replicas, per_core)
    ).state_bytes
    room = max(1, target.generation.hbm_limit - state.total)
    numbers = [examiner.microbatches * 2**power for power in range(1, per_core.bit_length())]
    unit = examiner.options.batch_unit or 1
    possible = [number for number in numbers if per_core % (number * unit) == 0]
    enough = examiner.microbatches * (needs - state.total) / room
    for number in [n for n in possible if n >= enough] or possible[-1:]:
        field = f"--config.train.gradient_accumulation_steps={number}"
        change = f" with {field}"
        step = examiner.lower(
            target.replicas, per_core, change=change, gradient_accumulation_steps=number
        )
        compiled, seconds, answer = _try_change(examiner, step, target, change)
        if seconds is not None:
            return seconds, [f"{field} makes this batch fit: {answer}, the same update."]
        # Even more microbatches can save at most the memory that the state does not use.
        shrinks = (needs - state.total) * examiner.microbatches / number
        wanted = advise.parse_memory_error(compiled.error)
        if wanted and wanted[0] - shrinks > wanted[1]:
            break
    said = ["Gradient accumulation is not enough to make this batch fit."]
    return None, said if possible else []


def _try_change(
    examiner: Examiner, step: LoweredStep, target: Slice, change: str, priced: bool = True
) -> tuple[Compiled, float | None, str]:
    """Compiles a changed step, and adds the result to `examiner.tried`.

    Args:
        examiner: the check of the model.
        step: the changed step.
        target: the slice.
        change: see `Examiner.compile`.
        priced: whether to compute the time and the price of a step that fits.

    Returns:
        The compiled step, its seconds (None if it does not fit, infinite without a price), and the
        answer in a few words: its memory, time and price, or why it does not fit.

    Raises:
        UserError: there is no answer: the time limit passed, or the compiler crashed.
    """
    compiled = examiner.compile(step, target, change)
    if compiled.undecided:
        raise UserError(f"{change[1:2].upper()}{change[2:]}: {compiled.error}")
    fits = not compiled.error and not _exceeds_host(compiled, target)
    seconds, answer = None, _explain_misfit(compiled)
    if fits:
        seconds = math.inf
        answer = format_size(parse_memory_stats(compiled.memory).total)
        if priced and compiled.text:
            with examiner.processes.progress.show_phase(f"reading {target.name}"):
                seconds = price(step, compiled, target).seconds
            answer += f", {examiner.format_step(seconds, target)}"
    _add_try(examiner, target, change, f"{'fits, ' * fits}{answer}")
    return compiled, seconds, answer


def _add_try(examiner: Examiner, target: Slice, change: str, answer: str) -> None:
    """Adds the result of a change to `examiner.tried`; prints it if the check takes long."""
    text = f"{target.name}{change}: {answer}"
    examiner.tried.append((target.name, text))
    examiner.processes.progress.print_result(text)


def _exceeds_host(compiled: Compiled, target: Slice) -> bool:
    return target.host_limit is not None and count_host_bytes(compiled.memory) > target.host_limit


def _explain_misfit(compiled: Compiled) -> str:
    """Returns why a changed step does not fit."""
    if not compiled.error:
        return "does not fit into the host's memory"
    if not compiled.out_of_memory:
        return "does not compile"
    needed = advise.parse_memory_error(compiled.error)
    return "does not fit" + (f", {format_size(needed[0])} needed" if needed else "")
