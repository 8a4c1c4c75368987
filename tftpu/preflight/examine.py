"""Preflight from end to end: lower once, compile for each slice, count, price, advise."""

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any

import keras
import tensorflow as tf

from tftpu.config import PRECISIONS, Share
from tftpu.engines.tensorflow import checks
from tftpu.errors import UserError, did_you_mean
from tftpu.preflight import advise
from tftpu.preflight.compiler import (
    KERNEL_MEMORY,
    TIME_LIMIT,
    Compiled,
    check_machine,
    compile_program,
)
from tftpu.preflight.cost import memory_of, price
from tftpu.preflight.lower import Program, lower
from tftpu.preflight.report import Report, SliceReport, fill
from tftpu.tpu.slices import Slice, parse_slice


@dataclasses.dataclass
class Run:
    """What is asked of a run, besides the model.

    Attributes:
        steps: of the whole run; None: its cost is not asked for.
        examples_per_epoch: None: the cost of an epoch is not asked for.
        prices: US dollars for a chip-hour by generation, in place of the table's.
        validate: called with the replicas of a slice; raises `UserError` if the run cannot be
            shared by so many.
        batch_unit: the per-core batch is a multiple of this, in the search for one that fits.
        recomputing: makes the same model with `remat="block"`; None: there is none, or it has
            that already.
        time_limit: seconds for one compile.
        verbose: show what the compiler writes to standard error.
    """

    steps: int | None = None
    examples_per_epoch: int | None = None
    prices: dict[str, float] = dataclasses.field(default_factory=dict)
    validate: Callable[[int], None] = lambda replicas: None
    batch_unit: int = advise.SUBLANES
    recomputing: Callable[[], keras.Model] | None = None
    time_limit: float = TIME_LIMIT
    verbose: bool = False


def check(
    model_fn: Callable[[], keras.Model],
    batch_spec: Any,
    slices: Iterable[str],
    *,
    precision: str = "auto",
    gradient_accumulation_steps: int = 1,
    global_clipnorm: float | None = None,
    ema_momentum: float | None = None,
    **run,
) -> Report:
    """Compiles the train step of a Keras model for TPU slices, on a machine without one.

    Args:
        model_fn: makes the compiled Keras model, anew at each call.
        batch_spec: the global batch, `(x, y)` or `(x, y, sample_weight)`, nested as the model
            takes them, of `tf.TensorSpec`s of static shape.
        slices: names, as "v3-8" or "v5e-8".
        precision: the policy that the model is built under, as for `tftpu.set_precision`; "auto"
            is what it is on a TPU, bfloat16.
        gradient_accumulation_steps, global_clipnorm, ema_momentum: as for `tftpu.Trainer`.
        run: the fields of `Run`.

    Raises:
        UserError: an unknown slice; a model that no TPU can run, with the layer and the op; no
            TPU compiler on this machine.
    """
    if precision not in PRECISIONS:
        raise UserError(
            f"There is no precision {precision!r}.{did_you_mean(precision, PRECISIONS)}"
        )
    targets = [parse_slice(name) for name in slices]
    if not targets:
        raise UserError("No slice was named: give some, as v3-8,v5e-8.")
    check_machine()
    for spec in keras.tree.flatten(batch_spec):
        checks.refuse_spec(spec)
    precision = "mixed_bfloat16" if precision == "auto" else precision
    options = {"global_clipnorm": global_clipnorm, "ema_momentum": ema_momentum}
    examiner = _Examiner(
        model_fn, batch_spec, precision, gradient_accumulation_steps, options, Run(**run)
    )
    return Report(
        global_batch_size=keras.tree.flatten(batch_spec)[0].shape[0],
        precision=precision,
        steps=examiner.run.steps,
        slices=[examiner.examine(target) for target in targets],
    )


class _Examiner:
    """One model on several slices: slices with as many replicas share a program."""

    def __init__(
        self, model_fn, batch_spec, precision, gradient_accumulation_steps, options, run: Run
    ):
        self.model_fn = model_fn
        self.batch_spec = batch_spec
        self.precision = precision
        self.gradient_accumulation_steps = gradient_accumulation_steps
        self.options = options
        self.run = run
        self.global_batch_size = keras.tree.flatten(batch_spec)[0].shape[0]
        self.program = functools.lru_cache(maxsize=2)(self._lower)

    def examine(self, target: Slice) -> SliceReport:
        try:
            share = Share(
                self.global_batch_size, target.replicas, self.gradient_accumulation_steps
            ).examples
            self.run.validate(target.replicas)
        except UserError as error:
            return SliceReport(slice=target.name, replicas=target.replicas, error=str(error))
        per_core = share * self.gradient_accumulation_steps
        program = self.program(target.replicas, per_core, self.gradient_accumulation_steps)
        compiled = self._compile(program, target)
        report = SliceReport(
            slice=target.name,
            replicas=target.replicas,
            per_core_batch=per_core,
            hbm_limit_bytes=target.generation.hbm_limit,
            compiles=not compiled.error or compiled.out_of_memory,
            fits=not compiled.error,
            error=_explained(compiled.error, target),
            compile_seconds=round(compiled.seconds, 1),
        )
        if compiled.out_of_memory:
            self._advise(report, target, per_core)
        elif not compiled.error:
            cost = price(program, compiled, target)
            fill(report, cost, target, self.run, self.global_batch_size)
            report.lints = [str(item) for item in advise.lint(program, cost, share)]
        return report

    def _lower(
        self, replicas: int, per_core: int, gradient_accumulation_steps: int, model_fn=None
    ) -> Program:
        batch = keras.tree.map_structure(
            lambda s: tf.TensorSpec((per_core, *s.shape[1:]), s.dtype), self.batch_spec
        )
        return lower(
            model_fn or self.model_fn,
            batch,
            replicas,
            self.precision,
            gradient_accumulation_steps=gradient_accumulation_steps,
            **self.options,
        )

    def _compile(self, program: Program, target: Slice) -> Compiled:
        return compile_program(program.hlo, target, self.run.time_limit, self.run.verbose)

    def _advise(self, report: SliceReport, target: Slice, per_core: int) -> None:
        """Says by how much it does not fit, the largest batch that does, and what else helps."""
        limit = target.generation.hbm_limit
        needs, limit = advise.memory_wanted(report.error) or (2 * limit, limit)
        report.hbm_bytes = needs

        def need(batch: int) -> tuple[bool, int]:
            compiled = self._compile(
                self._lower(target.replicas, batch, self.gradient_accumulation_steps), target
            )
            if compiled.error and not compiled.out_of_memory:
                raise UserError(f"At {batch} examples a core: {compiled.error}")
            if compiled.error:
                wanted = advise.memory_wanted(compiled.error)
                return False, wanted[0] if wanted else limit + 1
            return True, memory_of(compiled.memory).total

        unit = self.run.batch_unit * self.gradient_accumulation_steps
        while per_core > 1024 * unit:  # to a part in 500: nobody needs 250,008 examples
            unit *= 2
        report.largest_per_core_batch, report.smallest_failing_batch = advise.largest_batch(
            need, per_core, needs, limit, unit
        )
        report.advice = [self._accumulating(target, per_core)]
        if self.run.recomputing:
            report.advice.append(self._recomputing(target, per_core))

    def _accumulating(self, target: Slice, per_core: int) -> str:
        """The fewest microbatches, by powers of two, with which the batch fits."""
        microbatches = 2 * self.gradient_accumulation_steps
        while per_core % (microbatches * self.run.batch_unit) == 0:
            program = self._lower(target.replicas, per_core, microbatches)
            compiled = self._compile(program, target)
            if not compiled.error:
                used = memory_of(compiled.memory).total / 2**30
                return f"gradient_accumulation_steps={microbatches} fits this batch: {used:.2f} GiB, the same update."
            microbatches *= 2
        return "Accumulation alone does not make this batch fit."

    def _recomputing(self, target: Slice, per_core: int) -> str:
        """Whether the batch fits if the blocks keep nothing for the backward pass."""
        program = self._lower(
            target.replicas, per_core, self.gradient_accumulation_steps, self.run.recomputing
        )
        compiled = self._compile(program, target)
        if compiled.error:
            return "model.remat=block alone does not make this batch fit."
        used = memory_of(compiled.memory).total / 2**30
        milliseconds = price(program, compiled, target).seconds * 1e3
        return (
            f"model.remat=block fits this batch: {used:.2f} GiB, {milliseconds:.3g} ms a step, "
            "the same update."
        )


def _explained(error: str, target: Slice) -> str:
    """The compiler's error, with the way out where it is one that models of ours can meet."""
    kernel = "A kernel inside the model, as model.attention='flash' has it,"
    if KERNEL_MEMORY in error:
        return (
            f"{kernel} needs more of a core's own memory (VMEM) than {target.generation.name} has: "
            "use fewer tokens, smaller heads, or model.attention='plain'. "
            f"The compiler says: {error[:300]}"
        )
    if "Mosaic failed to compile TPU kernel" in error:
        return (
            f"{kernel} does not compile for {target.generation.name}. Use a later generation, or "
            f"model.attention='plain'. The compiler says: {error[:300]}"
        )
    return error
