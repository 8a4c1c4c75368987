"""The preflight check: lower a step, compile it for each slice, price it, give advice."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras

from tftpu.amounts import format_duration, format_price, format_size
from tftpu.config import ClusterConfig, PerReplicaBatch
from tftpu.config.mesh import AUTO
from tftpu.config.validation import check_types
from tftpu.engines import selection
from tftpu.engines.data.conversion import replace_examples
from tftpu.engines.lowered import BuiltStep, LoweredStep, Lowering, ModelFn, StateBytes
from tftpu.errors import UserError, counted
from tftpu.optim.precision import choose_policy
from tftpu.preflight import advise, compiled_model, request
from tftpu.preflight.compiling.caller import Caller
from tftpu.preflight.compiling.compiler import (
    KERNEL_MEMORY,
    Compiled,
    check_machine,
    compile_program,
)
from tftpu.preflight.compiling.processes import Processes
from tftpu.preflight.compiling.progress import Progress
from tftpu.preflight.options import PreflightOptions
from tftpu.preflight.plots import build_plots
from tftpu.preflight.pricing.cost import count_host_bytes, parse_memory_stats, price
from tftpu.preflight.report import Report
from tftpu.preflight.slice_report import (
    ROOM,
    SliceReport,
    count_parts,
    describe_host_excess,
    fill,
    fill_state,
    fill_unpriced,
    find_usd_hour,
    suggest_for_state,
    summarize,
)
from tftpu.tensors import Nest
from tftpu.tpu.slices import Slice


def check(
    model: keras.Model | ModelFn,
    batch: Nest | int = 32,
    slices: Iterable[str] = ("v3-8", "v5e-8"),
    options: PreflightOptions | None = None,
) -> Report:
    """Compiles the train step of a Keras model for TPU slices, on a machine without a TPU.

    Example:

        model = keras.Sequential([keras.Input((784,)), keras.layers.Dense(10)])
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        print(tftpu.preflight.check(model, 1024, ["v3-8"]))

    Args:
        model: a compiled model that its config describes, which keeps its precision; or a function
            that returns a newly built and compiled model, and is called several times.
        batch: the global batch as arrays or `tf.TensorSpec`s of static shape: `(x, y)` or
            `(x, y, sample_weight)`, nested as the model takes them. Or the number of its examples,
            for a model with symbolic inputs and one output, whose loss tells the labels.
        slices: names such as "v3-8" or "v5e-8".
        options: options of the check; None takes the defaults.

    Raises:
        UserError: a slice does not exist; no TPU can run the model (the message names the layer
            and the op); or this machine has no TPU compiler.
    """
    try:
        return _check(model, batch, slices, options)
    except (UserError, KeyboardInterrupt) as error:
        raise error.with_traceback(None)  # noqa: B904 (the frames of tftpu explain no mistake)


def _check(
    model: keras.Model | ModelFn,
    batch: Nest | int,
    slices: Iterable[str],
    options: PreflightOptions | None,
) -> Report:
    """Does what `check` does, whose tracebacks leave out the frames from here on."""
    targets = request.parse_slices(slices)
    options = PreflightOptions() if options is None else options
    request.refuse_options(options)
    compiled = model if isinstance(model, keras.Model) else None
    if compiled is None:
        request.refuse_model_fn(model)
    request.refuse_batch_argument(batch)
    cluster = ClusterConfig(
        engine=options.engine, mesh=options.mesh, compiler_options=options.compiler_options
    )
    check_types("options", cluster)
    cluster.validate()
    for target in targets:
        selection.check_generation(selection.choose_engine(cluster), target.generation)
    lowering = selection.choose_lowering(cluster)
    precision = choose_policy(options.precision, "tpu")

    def find_model() -> keras.Model:
        if compiled is not None:
            return compiled
        found = lowering.build_model(model, precision)
        request.refuse_model(found)
        return found

    batch_spec = compiled_model.read_batch_spec(batch, find_model)
    request.refuse_batch(batch_spec, options)
    if isinstance(model, keras.Model):
        if options.objectives is None:
            compiled_model.refuse_other_shapes(model, batch_spec)
        options = compiled_model.choose_precision(model, options)
        model_fn = compiled_model.build_function(model)
    else:
        model_fn = model
    check_machine()
    caller = Caller()
    with Progress() as progress:
        processes = Processes(progress)
        examiner = Examiner(model_fn, batch_spec, options, lowering, caller, processes)
        for line in examiner.estimate(targets):
            progress.print_unless_over(line)
        left = [target.name for target in targets]
        known: dict[str, str] = {}

        def examine(target: Slice) -> SliceReport:
            def note(report: SliceReport) -> None:
                known[target.name] = f"{summarize(report)}; changes were being tried"

            report = examiner.examine(target, note)
            advice = [text.removesuffix(".") for text in report.advice[:1]]
            known[target.name] = "; ".join([summarize(report), *advice])
            left.remove(target.name)
            if left:
                progress.print_result(f"{known[target.name]}; still checked: {', '.join(left)}")
            return report

        try:
            found = caller.map_items(examine, targets, processes.stop)
        except KeyboardInterrupt:
            unfinished = [text for name, text in examiner.tried if name in left]
            progress.print_at_end(_describe_unfinished([*known.values(), *unfinished], left))
            raise
    return Report(
        global_batch_size=examiner.global_batch_size,
        precision=compiled_model.read_precision(compiled) if compiled else examiner.precision,
        steps=options.steps,
        slices=found,
    )


class Examiner:
    """A check of one model on several slices; equal numbers of devices share a step.

    Args:
        model_fn: a function that returns a newly built and compiled Keras model.
        batch_spec: the spec of the global batch.
        options: options of the check.
        lowering: the lowering of the engine's steps.
        caller: the thread that builds and lowers models.
        processes: the compiler's processes.
        change: how the model differs from the config's, for the lines of progress, such as
            " with remat=block".
        tried: a list to which names of slices are added, each with a line that answers a change
            that was tried; None begins one.
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
        self.tokens = _count_tokens(batch_spec)
        self.microbatches = options.train.gradient_accumulation_steps
        self.tried = [] if tried is None else tried
        self._shared_build = functools.cache(self._build)
        self._shared_step = functools.cache(self._lower_shared)
        self._list_finer = functools.cache(self._build_finer)

    def estimate(self, targets: Iterable[Slice]) -> Iterator[str]:
        """Yields lines about each slice by closed forms, before anything is lowered.

        Only the thread of the caller may call this.
        """
        longest = 0
        header = (
            "Estimate before compiling, by arithmetic: weights and optimizer's state on a device, "
            "without gradients and activations; the model's products at the peak of matrix units\n"
        )
        for target in targets:
            try:
                self._count_examples(target)
            except UserError as error:
                yield f"{header}  {target.name}: cannot be used. {error}"
                header = ""
                continue
            tried = self._list_until_one_holds(target)
            shown = tried[-1:] if self.options.mesh == AUTO else dict.fromkeys((self, tried[-1]))
            text = "; ".join(one._format_state(target) for one in shown)
            text += self._suggest_dividing(target)
            last = tried[-1]
            if last._holds_state(target):
                text += f"; {last._format_least_step(target)}"
                longest = max(longest, last._measure_state(target).weights * last._divide(target))
            yield f"{header}  {target.name}: {text}"
            header = ""
        if longest:
            yield f"  {_estimate_duration(longest)}"

    def _list_until_one_holds(self, target: Slice) -> list["Examiner"]:
        """Returns this check and those with finer meshes, up to the first that holds the state."""
        tried: list[Examiner] = [self]
        for finer in self._list_finer(target):
            if tried[-1]._holds_state(target):
                break
            tried.append(finer)
        return tried

    def _format_state(self, target: Slice) -> str:
        """Returns what a device holds of what it has, and whether that can fit."""
        held, limit = self._measure_state(target).total, target.generation.hbm_limit
        mesh = self.lowering.format_mesh(target.replicas)
        where = f" with the mesh {mesh}" if mesh else ""
        verdict = "" if self._holds_state(target) else ": does not fit"
        return f"{format_size(held)} of {format_size(limit)}{where}{verdict}"

    def _format_least_step(self, target: Slice) -> str:
        """Returns the time and the price of the model's products at the peak of a slice."""
        built = self._shared_build(target.replicas, self._count_examples(target))
        with self.processes.progress.show_phase("counting the products of the model"):
            seconds = built.count_flops() / target.flops_per_s
        return f"at the peak {self._format_step(seconds, target)}"

    def _format_step(self, seconds: float, target: Slice) -> str:
        usd = 1000 * seconds * find_usd_hour(target, self.options) / 3600
        return f"{format_duration(seconds)} per step, {format_price(usd)} per 1,000"

    def _suggest_dividing(self, target: Slice) -> str:
        """Returns what a device holds if an engine without a mesh is replaced, "" if no help."""
        if self.lowering.format_mesh(target.replicas) or self._holds_state(target):
            return ""
        share = self._measure_state(target).total / target.replicas
        if share > ROOM * target.generation.hbm_limit:
            return ""
        engine = "--config.cluster.engine=jax " if self.options.engine == "tensorflow" else ""
        return f"; with {engine}--config.cluster.mesh=fsdp:-1: {format_size(share)}"

    def _holds_state(self, target: Slice) -> bool:
        return self._measure_state(target).total <= target.generation.hbm_limit

    def _divide(self, target: Slice) -> int:
        """Returns the number of devices that a model is divided among."""
        return count_parts(self.lowering.format_mesh(target.replicas), target.replicas)

    def _measure_state(self, target: Slice) -> StateBytes:
        """Returns the bytes of the state that a device of a slice holds."""
        return self._shared_build(target.replicas, self._count_examples(target)).state_bytes

    def _count_examples(self, target: Slice) -> int:
        """Returns the examples of a step that a device of a slice gets.

        Raises:
            UserError: the run cannot use this slice.
        """
        shards = self.lowering.count_data_shards(target)
        shard = PerReplicaBatch(self.global_batch_size, shards, self.microbatches).examples
        self.options.validate(shards)
        return shard * self.microbatches

    def _build_finer(self, target: Slice) -> list["Examiner"]:
        """Returns checks of the same model with meshes that divide it further."""
        return [
            Examiner(
                *(self.model_fn, self.batch_spec, self.options, lowering),
                *(self.caller, self.processes),
                tried=self.tried,
            )
            for lowering in self.lowering.list_finer_lowerings(target)
        ]

    def examine(
        self, target: Slice, note: Callable[[SliceReport], None] = lambda report: None
    ) -> SliceReport:
        """Returns the report of one slice, with advice if the step does not fit.

        Args:
            target: the slice.
            note: called with the report of a step that does not fit, before changes are tried.
        """
        report = self.examine_once(target)
        if report.fits or not report.compiles or report.exceeds_host:
            return report
        found = advise.parse_memory_error(report.error)
        report.hbm_bytes = found[0] if found else report.hbm_bytes
        note(report)
        progress = self.processes.progress
        progress.print_unless_over(
            f"{summarize(report)}; looking for a change that makes it fit, first those that keep "
            "the update, then smaller batches (Ctrl-C ends that, and says what was found)"
        )
        try:
            return self._search_change(report, target)
        except UserError as error:
            report.advice.append(f"The search for a change that fits has stopped. {error}")
            return report

    def _search_change(self, report: SliceReport, target: Slice) -> SliceReport:
        """Adds changes that make a step fit to its report; returns that of the mesh, for `auto`.

        Raises:
            UserError: a change cannot be judged, as the time was over or the compiler crashed.
        """
        wider, finer = self._try_wider_meshes(target), self._list_finer(target)
        if self.options.mesh == AUTO and (wider is not None or finer):
            return wider or finer[-1].examine(target)
        if wider is not None:
            used = format_size(wider.hbm_bytes)
            if wider.step_ms is not None:
                used += f", {format_duration(wider.step_ms / 1e3)} per step"
            advice = f"--config.cluster.mesh={wider.mesh} makes this batch fit: "
            advice += f"{used}, the same update."
            report.advice.insert(0, advice)
        if report.largest_per_core_batch is None:
            self._add_fixes(report, target)
        return report

    def examine_once(self, target: Slice) -> SliceReport:
        """Returns the report of one slice, without advice."""
        try:
            per_core = self._count_examples(target)
        except UserError as error:
            return SliceReport(slice=target.name, replicas=target.replicas, error=str(error))
        # Only slices with the same number of devices share a step, because the shapes of a batch's
        # shards are part of the traced graph.
        built = self.caller.run(lambda: self._shared_build(target.replicas, per_core))
        report = SliceReport(
            slice=target.name,
            replicas=target.replicas,
            per_core_batch=per_core,
            hbm_limit_bytes=target.generation.hbm_limit,
            host_limit_bytes=target.host_limit,
            mesh=self.lowering.format_mesh(target.replicas),
            compiler_options=self.lowering.choose_compiler_options(target),
        )
        if built.state_bytes.total > target.generation.hbm_limit:
            fill_state(report, built.state_bytes, target)
            return report
        step = self.caller.run(lambda: self._shared_step(target.replicas, per_core))
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
        return report

    def _fill(
        self, report: SliceReport, step: LoweredStep, compiled: Compiled, target: Slice, shard: int
    ) -> None:
        """Adds the costs of the compiled program to the report of a slice."""
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

    def _try_wider_meshes(self, target: Slice) -> SliceReport | None:
        """Returns the report of the fitting mesh that divides the model least, or None.

        Found by bisection: what is cut more needs less memory.
        """
        found = None
        candidates = self._list_finer(target)
        tried = candidates[-1:]  # if the finest mesh does not fit, none does
        while tried:
            [finer] = tried
            report = finer.examine_once(target)
            answer = summarize(report).removeprefix(f"{target.name}: ")
            self._add_try(target, f" with mesh={report.mesh}", answer)
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

    def lower(
        self,
        devices: int,
        per_core: int,
        model_fn: ModelFn | None = None,
        change: str = "",
        **options: Any,
    ) -> LoweredStep:
        """Lowers the step for a batch, another model or other options of the trainer.

        The thread of the caller does it.

        Args:
            devices: number of devices of the slice.
            per_core: examples per share of the global batch.
            model_fn: None takes the model under examination.
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
        return self._lower(self._shared_build(devices, per_core), devices, self.change)

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

    def _compile_change(self, step: LoweredStep, target: Slice, change: str) -> Compiled:
        """Compiles a changed step, of which "does not fit" must not be said without an answer.

        Raises:
            UserError: there is no answer.
        """
        compiled = self.compile(step, target, change)
        if compiled.undecided:
            raise UserError(f"{change[1:2].upper()}{change[2:]}: {compiled.error}")
        self._add_try(target, change, _describe_try(compiled, target))
        return compiled

    def _add_try(self, target: Slice, change: str, answer: str) -> None:
        """Adds the answer to a change to `tried`, and prints it."""
        text = f"{target.name}{change}: {answer}"
        self.tried.append((target.name, text))
        self.processes.progress.print_result(text)

    def suggest_recomputing(self, target: Slice, per_core: int) -> list[str]:
        """Returns advice on whether the batch fits if the blocks keep fewer activations, or none.

        The list is empty if nothing can recompute the model's blocks, or something does.

        Args:
            target: the slice.
            per_core: examples per share of the global batch.
        """
        rebuilt = self.options.recomputing
        if rebuilt is None:
            built = self.caller.run(lambda: self._shared_build(target.replicas, per_core))
            if self.options.train.remat != "none" or not built.has_blocks:
                return []
        field = f"--config.{'train' if rebuilt is None else 'model'}.remat"
        for remat in self.lowering.remats:
            changed: dict[str, Any] = {"remat": remat}
            if rebuilt is not None:
                changed = {"model_fn": functools.partial(rebuilt, remat)}
            change = f" with {field}={remat}"
            step = self.lower(target.replicas, per_core, change=change, **changed)
            compiled = self._compile_change(step, target, change)
            kept = count_host_bytes(compiled.memory)
            if target.host_limit is not None and kept > target.host_limit:
                return [f"{field}={remat} is no help: {describe_host_excess(kept, target)}"]
            if not compiled.error:
                used = self._describe_use(step, compiled, target)
                return [f"{field}={remat} makes this batch fit: {used}, the same update."]
        return [f"{field}={self.lowering.remats[-1]} is not enough to make this batch fit."]

    def _describe_use(self, step: LoweredStep, compiled: Compiled, target: Slice) -> str:
        """Returns the memory of a changed step that fits, and its time and price if it has them."""
        used = format_size(parse_memory_stats(compiled.memory).total)
        if not compiled.text:
            return used
        return f"{used}, {self._format_step(price(step, compiled, target).seconds, target)}"

    def _add_fixes(self, report: SliceReport, target: Slice) -> None:
        """Adds the memory, and changes that would fit, to the report of a step that does not."""
        per_core = report.per_core_batch
        limit = target.generation.hbm_limit
        needs, limit = advise.parse_memory_error(report.error) or (2 * limit, limit)
        report.hbm_bytes = needs

        def measure_need(batch: int) -> tuple[bool, int]:
            change = f" with a batch of {batch:,} per core, as {per_core:,} are too many"
            step = self.lower(target.replicas, batch, change=change)
            compiled = self._compile_change(step, target, change)
            if compiled.error and not compiled.out_of_memory:
                raise UserError(f"With {counted(batch, 'example')} per core: {compiled.error}")
            if compiled.error:
                wanted = advise.parse_memory_error(compiled.error)
                return False, wanted[0] if wanted else limit + 1
            return True, parse_memory_stats(compiled.memory).total

        # What keeps the update is tried before smaller batches, of which there may be a dozen.
        report.advice += self._suggest_accumulation(target, per_core, needs)
        report.advice += self.suggest_recomputing(target, per_core)
        unit = advise.batch_step(per_core // self.microbatches, self.options.batch_unit)
        unit *= self.microbatches
        report.largest_per_core_batch, report.smallest_failing_batch = advise.find_largest_batch(
            measure_need, per_core, needs, limit, unit
        )
        if not report.largest_per_core_batch and not any(" makes " in x for x in report.advice):
            state = self._shared_build(target.replicas, per_core).state_bytes
            report.advice += [
                f"Weights and optimizer's state take {format_size(state.total)} of a device.",
                *suggest_for_state(report, state, target),
            ]

    def _suggest_accumulation(self, target: Slice, per_core: int, needs: int) -> list[str]:
        """Returns advice on microbatches that fit, or none.

        The numbers tried are the present one times powers of two, from the one on that would be
        enough if all but the state shrank like the microbatch.

        Args:
            target: the slice.
            per_core: examples per share of the global batch.
            needs: bytes that the step needs now.
        """
        state = self.caller.run(lambda: self._shared_build(target.replicas, per_core)).state_bytes
        room = max(1, target.generation.hbm_limit - state.total)
        numbers = [self.microbatches * 2**power for power in range(1, per_core.bit_length())]
        unit = self.options.batch_unit or 1
        possible = [number for number in numbers if per_core % (number * unit) == 0]
        enough = self.microbatches * (needs - state.total) / room
        for number in [n for n in possible if n >= enough] or possible[-1:]:
            change = f" with {number} microbatches"
            step = self.lower(
                target.replicas, per_core, change=change, gradient_accumulation_steps=number
            )
            compiled = self._compile_change(step, target, change)
            if not compiled.error:
                used = self._describe_use(step, compiled, target)
                return [
                    f"--config.train.gradient_accumulation_steps={number} makes this batch fit: "
                    f"{used}, the same update."
                ]
        return ["Gradient accumulation is not enough to make this batch fit."] * bool(possible)


def _count_tokens(batch_spec: Nest) -> int | None:
    """Returns the tokens of a batch, if an input has a label for each; None for other data."""
    if not isinstance(batch_spec, tuple | list) or len(batch_spec) < 2:
        return None
    inputs, labels = (keras.tree.flatten(part) for part in batch_spec[:2])
    has_classes = len(labels) == 1 and labels[0].dtype.is_integer and labels[0].shape.rank == 2
    if has_classes and any(spec.shape == labels[0].shape for spec in inputs):
        return math.prod(labels[0].shape)
    return None


def _estimate_duration(weights: int) -> str:
    """Returns about how long the compiler takes for a model, given the bytes of its weights.

    Processor time measured for one slice: 4 s with 3 MB (python_gpt), 64 s with 440 MB
    (llama_110m_tinystories), 115 s with 88 MB (vit_s16_imagenet), 150 s on v5e and 600 s on v6e
    with 100 MB (resnet50_imagenet), 280 to 380 s with 32 GB (Llama 3.1 8B). No simple formula of
    sizes or of the program fits these.
    """
    usual = "five to fifteen minutes" if weights > 4e9 else "one to ten minutes"
    if weights < 8e6:
        usual = "less than a minute"
    return (
        f"Compiling usually takes {usual} per slice for models of this size, on 2 idle CPU cores, "
        "unless it is in the cache."
    )


def _describe_try(compiled: Compiled, target: Slice) -> str:
    """Returns whether a change of the step helps, in a few words."""
    kept = count_host_bytes(compiled.memory)
    if target.host_limit is not None and kept > target.host_limit:
        return "does not fit into the host's memory"
    if not compiled.error:
        return f"fits, {format_size(parse_memory_stats(compiled.memory).total)}"
    if not compiled.out_of_memory:
        return "does not compile"
    needed = advise.parse_memory_error(compiled.error)
    return "does not fit" + (f", {format_size(needed[0])} needed" if needed else "")


def _describe_unfinished(known: list[str], left: list[str]) -> list[str]:
    """Returns lines about a check that was interrupted."""
    if not known:
        return [f"Not known yet, but for the estimates above: {', '.join(left)}."]
    finished = ["Known before the interruption:", *(f"  {line}" for line in known)]
    return [*finished, f"Not finished: {', '.join(left)}. What was compiled comes from the cache."]


def _add_advice(error: str, target: Slice) -> str:
    """Returns the compiler's error, with advice if the cause is a kernel inside the model."""
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
