"""Lowers a step, compiles it for a slice and prices it."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import keras

from tftpu.config import PerReplicaBatch
from tftpu.engines.data.conversion import replace_examples
from tftpu.engines.lowered import BuiltStep, LoweredStep, Lowering, ModelFn, StateBytes
from tftpu.errors import UserError, counted
from tftpu.optim.policy import choose_policy
from tftpu.preflight import advise, request
from tftpu.preflight.compiling.caller import Caller
from tftpu.preflight.compiling.compiler import KERNEL_MEMORY, Compiled, compile_program
from tftpu.preflight.compiling.processes import Processes
from tftpu.preflight.options import PreflightOptions
from tftpu.preflight.plots import build_plots
from tftpu.preflight.pricing.cost import count_host_bytes, price
from tftpu.preflight.slice_report import (
    SliceReport,
    describe_host_excess,
    describe_undivided,
    fill,
    fill_state,
    fill_unpriced,
    find_usd_hour,
    format_step,
)
from tftpu.tensors import Nest
from tftpu.tpu.slices import Slice


class Examiner:
    """A check of one model on several slices; slices of equal size share a lowered step.

    Args:
        model_fn: a function that returns a newly built and compiled Keras model.
        batch_spec: the spec of the global batch.
        options: options of the check.
        lowering: the lowering of the engine's steps.
        caller: the thread that builds and lowers models.
        processes: the compiler's processes.
        change: how the model differs from that of the config, for the lines of progress, such as
            " with remat=block".
        tried: a list to which each change that was tried is added: the name of the slice, and a
            line with the result. None starts a new list.

    Attributes:
        build_shared: function that builds the step, given the numbers of devices and of examples
            per shard of the global batch; cached.
        lower_shared: function that lowers that step; cached.
        list_finer: function that returns, for a slice, an examiner for each finer mesh; cached.
    """

    def __init__(
        self,
        model_fn: ModelFn,
        batch_spec: Nest,
        options: PreflightOptions,
        lowering: Lowering,
        caller: Caller,
        processes: Processes,
        change: str = "",
        tried: list[tuple[str, str]] | None = None,
    ):
        self.lowering, self.change = lowering, change
        self.caller, self.processes = caller, processes
        self.model_fn = model_fn
        self.batch_spec = batch_spec
        self.options = options
        self.precision = choose_policy(options.precision, "tpu")
        self.global_batch_size: int = keras.tree.flatten(batch_spec)[0].shape[0]
        self.tokens = count_tokens(batch_spec)
        self.microbatches = options.train.gradient_accumulation_steps
        self.tried = [] if tried is None else tried
        self.build_shared = functools.cache(self._build)
        self.lower_shared = functools.cache(self._lower_shared)
        self.list_finer = functools.cache(self._build_finer)

    def examine_once(self, target: Slice) -> SliceReport:
        """Returns the report of one slice, without trying changes that would make the step fit."""
        try:
            per_core = self.count_examples(target)
        except UserError as error:
            return SliceReport(slice=target.name, replicas=target.replicas, error=str(error))
        # Only slices with the same number of devices share a step, because the shapes of a batch's
        # shards are part of the traced graph.
        built = self.caller.run(lambda: self.build_shared(target.replicas, per_core))
        report = SliceReport(
            slice=target.name,
            replicas=target.replicas,
            per_core_batch=per_core,
            parameters=count_parameters(built.model.weights),
            trained_parameters=count_parameters(built.model.trainable_weights),
            hbm_limit_bytes=target.generation.hbm_limit,
            host_limit_bytes=target.host_limit,
            mesh=self.lowering.format_mesh(target.replicas),
            compiler_options=self.lowering.choose_compiler_options(target),
        )
        if built.state_bytes.total > target.generation.hbm_limit:
            fill_state(report, built.state_bytes, target)
            return report
        step = self.caller.run(lambda: self.lower_shared(target.replicas, per_core))
        compiled = self.compile(step, target, self.change)
        report = dataclasses.replace(
            report,
            compiles=not compiled.error or compiled.out_of_memory,
            undecided=compiled.undecided,
            fits=not compiled.error,
            error=_add_advice(compiled.error, target),
            compile_seconds=round(compiled.seconds, 1),
        )
        if not compiled.error:
            with self.processes.progress.show_phase(f"reading {target.name}"):
                self._fill(report, step, compiled, target, per_core // self.microbatches)
            if undivided := describe_undivided(report, built.state_bytes, target):
                report.lints.append(" ".join(undivided))
        return report

    def _fill(
        self, report: SliceReport, step: LoweredStep, compiled: Compiled, target: Slice, shard: int
    ) -> None:
        """Adds the compiled program's host memory, costs and plots to the report of a slice."""
        report.host_bytes = count_host_bytes(compiled.memory)
        if report.exceeds_host:
            report.fits, report.error = False, describe_host_excess(report.host_bytes, target)
        if not compiled.text:
            fill_unpriced(report, compiled, step.model_flops, target)
            return
        cost = price(step, compiled, target)
        fill(report, cost, target, self.options, self.global_batch_size, self.tokens)
        report.lints = [str(item) for item in advise.find_lints(step, cost, shard)]
        report.plots = build_plots(step, compiled, cost, target)

    def measure_state(self, target: Slice) -> StateBytes:
        """Returns the bytes of the state that a device of a slice holds."""
        return self.build_shared(target.replicas, self.count_examples(target)).state_bytes

    def holds_state(self, target: Slice) -> bool:
        """Returns whether the state alone fits into the memory of a device of a slice."""
        return self.measure_state(target).total <= target.generation.hbm_limit

    def count_examples(self, target: Slice) -> int:
        """Returns the number of examples in a shard of the global batch on a slice.

        Raises:
            UserError: the run cannot use this slice.
        """
        shards = self.lowering.count_data_shards(target)
        shard = PerReplicaBatch(self.global_batch_size, shards, self.microbatches).examples
        self.options.validate(shards)
        return shard * self.microbatches

    def _build_finer(self, target: Slice) -> list["Examiner"]:
        """Returns examiners of the same model with meshes that divide it further."""
        return [
            Examiner(
                *(self.model_fn, self.batch_spec, self.options, lowering),
                *(self.caller, self.processes),
                tried=self.tried,
            )
            for lowering in self.lowering.list_finer_lowerings(target)
        ]

    def lower(
        self,
        devices: int,
        per_core: int,
        model_fn: ModelFn | None = None,
        change: str = "",
        **options: Any,
    ) -> LoweredStep:
        """Lowers the step for another batch, another model or other options of the trainer.

        The work is done in the thread of `caller`.

        Args:
            devices: number of devices of the slice.
            per_core: examples per shard of the global batch.
            model_fn: builds the other model; None: the model under examination.
            change: see `compile`.
            **options: fields of `TrainConfig` that differ from the options.
        """

        def lower() -> LoweredStep:
            built = self._build(devices, per_core, model_fn, **options)
            return self._lower(built, devices, change)

        return self.caller.run(lower)

    def _build(
        self,
        devices: int,
        per_core: int,
        model_fn: ModelFn | None = None,
        **options: Any,
    ) -> BuiltStep:
        train = dataclasses.replace(self.options.train, **options)
        shard_spec = replace_examples(self.batch_spec, per_core)
        make = model_fn or self.model_fn
        objectives = self.options.objectives

        def build_model() -> keras.Model:
            model = make()
            request.refuse_model(model)
            return model

        mesh = self.lowering.format_mesh(devices)
        text = f"building the model for {mesh or counted(devices, 'device')}"
        with self.processes.progress.show_phase(text):
            return self.lowering.build(
                build_model, shard_spec, devices, self.precision, train, objectives
            )

    def _lower(self, built: BuiltStep, devices: int, change: str = "") -> LoweredStep:
        text = f"lowering for {counted(devices, 'device')}{change}"
        with self.processes.progress.show_phase(text):
            return built.lower()

    def _lower_shared(self, devices: int, per_core: int) -> LoweredStep:
        return self._lower(self.build_shared(devices, per_core), devices, self.change)

    def compile(self, step: LoweredStep, target: Slice, change: str = "") -> Compiled:
        """Compiles a lowered step for a slice.

        Args:
            step: the lowered step.
            target: the slice.
            change: what differs from the step under examination, for the line of progress, such as
                " with remat=block".
        """
        chosen = self.lowering.choose_compiler_options(target)
        limit, verbose = self.options.time_limit, self.options.verbose
        mesh = self.lowering.format_mesh(target.replicas)
        text = f"compiling {target.name}{f' ({mesh})' if mesh else ''}{change}"
        return compile_program(step, target, chosen, limit, verbose, self.processes, text)

    def format_step(self, seconds: float, target: Slice) -> str:
        """Returns the time of a step and the price of a thousand steps on a slice."""
        return format_step(seconds, 1000 * seconds * find_usd_hour(target, self.options) / 3600)


def count_parameters(weights: Sequence[keras.Variable]) -> int:
    """Returns the number of parameters in weights."""
    return sum(math.prod(variable.shape) for variable in weights)


def count_tokens(batch_spec: Nest) -> int | None:
    """Returns the number of tokens of a batch if each has a label; None for other data."""
    if not isinstance(batch_spec, tuple | list) or len(batch_spec) < 2:
        return None
    inputs, labels = (keras.tree.flatten(part) for part in batch_spec[:2])
    has_classes = len(labels) == 1 and labels[0].dtype.is_integer and labels[0].shape.rank == 2
    if has_classes and any(spec.shape == labels[0].shape for spec in inputs):
        return math.prod(labels[0].shape)
    return None


def _add_advice(error: str, target: Slice) -> str:
    """Returns the compiler's error, with advice if the cause is one of the model's kernels."""
    kernel = "A kernel inside the model (its attention has one unless it is plain)"
    generation = target.generation.name
    if KERNEL_MEMORY in error:
        return (
            f"{kernel} needs more of a core's own memory (VMEM) than {generation} has: use fewer "
            "tokens, smaller heads, or --config.model.attention=plain. The compiler says: "
            f"{error[:300]}"
        )
    if "Mosaic failed to compile TPU kernel" in error:
        return (
            f"{kernel} does not compile for {generation}: use a later generation, or "
            f"--config.model.attention=plain. The compiler says: {error[:300]}"
        )
    return error
