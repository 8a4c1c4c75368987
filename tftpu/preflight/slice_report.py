"""Results of a preflight check on one slice."""

import dataclasses

from tftpu.amounts import format_duration, format_price, format_size
from tftpu.config.mesh import DATA, parse_mesh
from tftpu.engines.lowered import StateBytes
from tftpu.errors import counted
from tftpu.preflight.compiling.compiler import Compiled
from tftpu.preflight.options import PreflightOptions
from tftpu.preflight.plots import Plots
from tftpu.preflight.pricing import cost as costs
from tftpu.tpu.slices import GENERATIONS, Slice, list_names, parse_slice

_LARGE = 0.25  # share of the memory above which weights and optimizer state are worth sharding
ROOM = 0.9  # largest share of the memory for arrays that do not depend on the batch


@dataclasses.dataclass
class Spent:
    """The time that a layer, a kind of work or an instruction takes in a step.

    Attributes:
        name: the layer, kind or instruction.
        ms: predicted milliseconds.
        step_share: fraction of the step's time.
        cycles: the compiler's estimate.
        layer: the layer of an instruction.
    """

    name: str
    ms: float
    step_share: float
    cycles: int
    layer: str = ""


@dataclasses.dataclass
class SliceReport:
    """Results for one slice.

    Figures are those of one replica and one step unless the name says otherwise. Figures that were
    not determined are None, 0 or empty.

    Attributes:
        slice: name of the slice.
        replicas: number of devices; without a mesh, each gets one shard of the global batch.
        per_core_batch: examples per step in one shard of the global batch.
        parameters: number of parameters of the model; `trained_parameters`: of the trained ones.
        compiles: whether the step can be compiled for this slice, even if it needs too much memory;
            if not, `error` says why.
        undecided: whether the time limit passed or the compiler crashed, so the result is unknown.
        fits: whether the step compiled and fits into HBM and the host's memory.
        error: the compiler's error message, or why the run cannot use this slice.
        compile_seconds: duration of the compilation.
        mesh: axes and sizes of the mesh of devices; "" if each device holds the whole model.
        compiler_options: XLA's options that were set, by name; a run sets the same.
        hbm_bytes: bytes of HBM that the step needs: arguments + outputs - aliased + temporaries +
            code.
        hbm_limit_bytes: bytes of HBM that a program may use.
        hbm: `hbm_bytes` by use, such as "temporaries"; by "weights", "optimizer" and "averages" if
            the step was not compiled.
        host_bytes: bytes that the program of a device keeps in its host's memory.
        host_limit_bytes: bytes of its host's memory for each device; None if it is not known.
        largest_tensors: the largest arrays in HBM.
        largest_per_core_batch: if the step does not fit, even with changes that keep its weight
            update, the largest per-core batch that fits; 0 if none does.
        smallest_failing_batch: likewise the smallest tried per-core batch that does not fit.
        step_ms: predicted time; `step_ms_low` and `step_ms_high` are the ends of its range.
        roofline_ms: time at peak FLOP/s or peak bandwidth, whichever is longer. No program is
            faster.
        collective_ms: predicted time of the collectives that no other work hides, included in
            `step_ms`.
        examples_per_second: on the whole slice.
        tokens_per_second: on the whole slice, if each token of an example has a label.
        flops: FLOPs of the program's dots and convolutions, over all iterations of loops.
        model_flops: FLOPs of the products with weights, forward and backward, that the model needs.
        mfu: `model_flops` divided by the FLOPs of the bfloat16 peak in the predicted time.
        bytes_accessed: HBM traffic.
        arithmetic_intensity: FLOPs per byte.
        bound: what limits the time of the step, "compute" or "memory".
        estimated_cycles: the compiler's estimate over all iterations of loops, before calibration.
        usd_per_1000_steps: price of 1,000 steps on the whole slice. The other prices, hours and
            energies are those of the whole slice, too.
        usd_per_billion_tokens: price of training on 1,000,000,000 tokens.
        by_layer: time by layer, the longest first.
        by_kind: time by kind of work, the longest first.
        top_instructions: the instructions that take the longest.
        lints: findings about the step, such as avoidable causes of lost time.
        advice: if the step does not fit, changes that help.
        plots: the data of the plots on a page: memory curve, roofline and collectives.
    """

    slice: str
    replicas: int
    per_core_batch: int = 0
    parameters: int | None = None
    trained_parameters: int | None = None
    compiles: bool = False
    undecided: bool = False
    fits: bool = False
    error: str = ""
    compile_seconds: float = 0.0
    mesh: str = ""
    compiler_options: dict[str, str] = dataclasses.field(default_factory=dict)
    hbm_bytes: int = 0
    hbm_limit_bytes: int = 0
    hbm: dict[str, int] = dataclasses.field(default_factory=dict)
    host_bytes: int = 0
    host_limit_bytes: int | None = None
    largest_tensors: list[costs.LargeTensor] = dataclasses.field(default_factory=list)
    largest_per_core_batch: int | None = None
    smallest_failing_batch: int | None = None
    step_ms: float | None = None
    step_ms_low: float | None = None
    step_ms_high: float | None = None
    roofline_ms: float | None = None
    collective_ms: float | None = None
    examples_per_second: float | None = None
    tokens_per_second: float | None = None
    flops: int = 0
    model_flops: int = 0
    mfu: float | None = None
    bytes_accessed: int = 0
    arithmetic_intensity: float | None = None
    bound: str = ""
    estimated_cycles: int = 0
    usd_per_1000_steps: float | None = None
    usd_per_billion_tokens: float | None = None
    usd_per_epoch: float | None = None
    usd_per_run: float | None = None
    hours_per_run: float | None = None
    kwh_per_run: float | None = None
    by_layer: list[Spent] = dataclasses.field(default_factory=list, repr=False)
    by_kind: list[Spent] = dataclasses.field(default_factory=list, repr=False)
    top_instructions: list[Spent] = dataclasses.field(default_factory=list, repr=False)
    lints: list[str] = dataclasses.field(default_factory=list)
    advice: list[str] = dataclasses.field(default_factory=list)
    plots: Plots | None = dataclasses.field(default=None, repr=False)

    def __str__(self) -> str:
        return summarize(self)

    @property
    def is_arithmetic(self) -> bool:
        """True if the state alone is too large, so the step was not compiled."""
        return "weights" in self.hbm

    @property
    def exceeds_host(self) -> bool:
        """True if a device's program keeps more in host memory than `host_limit_bytes`."""
        return self.host_limit_bytes is not None and self.host_bytes > self.host_limit_bytes

    @property
    def was_compiled(self) -> bool:
        """True if the step was compiled for the slice, not ruled out before that."""
        return (self.compiles or self.undecided) and not self.is_arithmetic


def summarize(report: SliceReport) -> str:
    """Returns a one-line summary, such as "v5p-16: fits, 17.6 GiB, 835 ms per step"."""
    if not report.fits:
        held = f", {format_size(report.hbm_bytes)} needed" if report.hbm_bytes else ""
        known = report.compiles or report.undecided
        return f"{report.slice}: {describe_verdict(report) if known else 'no'}{held}"
    return f"{report.slice}: fits, {describe_use(report)}"


def describe_use(report: SliceReport) -> str:
    """Returns the memory of a step that fits, and its time and price if they are known."""
    parts = [format_size(report.hbm_bytes)]
    if report.step_ms is not None:
        parts.append(format_step(report.step_ms / 1e3, report.usd_per_1000_steps))
    return ", ".join(parts)


def format_step(seconds: float, usd_per_1000_steps: float | None) -> str:
    """Returns the time of a step, and the price of a thousand steps if it is known."""
    price = "" if usd_per_1000_steps is None else f", {format_price(usd_per_1000_steps)} per 1,000"
    return f"{format_duration(seconds)} per step{price}"


def describe_parameters(item: SliceReport) -> str:
    """Returns the number of parameters, and the number of trained ones if it differs."""
    count, trained = item.parameters or 0, item.trained_parameters
    text = counted(count, "parameter")
    return text if trained in (None, count) else f"{text} ({trained:,} trained)"


def describe_verdict(item: SliceReport) -> str:
    """Returns in a few words whether the step can run."""
    if item.fits:
        return "fits"
    if item.undecided:
        return "not known"
    return "does not fit" if item.compiles else "does not compile"


def fill(
    report: SliceReport,
    cost: costs.Cost,
    target: Slice,
    options: PreflightOptions,
    global_batch_size: int,
    tokens: int | None = None,
) -> None:
    """Adds the cost of a step to the report of its slice.

    Args:
        report: the report, changed in place.
        cost: cost of the step on this slice.
        target: the slice.
        options: length and prices of the run.
        global_batch_size: examples per step.
        tokens: tokens per step; None if examples have none.
    """
    report.hbm = dataclasses.asdict(cost.memory)
    report.hbm_bytes = cost.memory.total
    report.largest_tensors = cost.large
    report.step_ms = cost.seconds * 1e3
    report.step_ms_low, report.step_ms_high = cost.seconds_low * 1e3, cost.seconds_high * 1e3
    report.roofline_ms = cost.roofline_seconds * 1e3
    report.collective_ms = cost.collective_seconds * 1e3
    report.examples_per_second = global_batch_size / cost.seconds
    report.tokens_per_second = tokens / cost.seconds if tokens else None
    report.flops, report.model_flops = cost.flops, cost.model_flops
    report.mfu = cost.model_flops / (cost.seconds * target.flops_per_s)
    report.bytes_accessed = cost.bytes_accessed
    report.arithmetic_intensity = costs.compute_intensity(cost)
    balance = target.flops_per_s / target.bytes_per_s
    report.bound = "compute" if report.arithmetic_intensity > balance else "memory"
    report.estimated_cycles = cost.cycles
    report.by_layer = _list_spent(cost.group_by("layer"), cost.seconds)
    report.by_kind = _list_spent(cost.group_by("kind"), cost.seconds)
    top = sorted(cost.instructions, key=lambda p: -p.seconds)[:10]
    report.top_instructions = [
        Spent(p.name, p.seconds * 1e3, p.seconds / cost.seconds, p.cycles, p.layer) for p in top
    ]
    _add_prices(report, cost.seconds, target, options, global_batch_size)


def describe_host_excess(held: int, target: Slice) -> str:
    """Returns an error message: the step's programs keep too much in a host's memory.

    Args:
        held: the bytes that the program of one device keeps in the host's memory.
        target: the slice; the memory of its hosts is known.
    """
    return (
        f"It needs {format_size(held)} of the host's memory for each device, but a host of "
        f"{target.generation.name} has {format_size(target.host_limit or 0)} for a device."
    )


def fill_unpriced(report: SliceReport, compiled: Compiled, model_flops: int, target: Slice) -> None:
    """Adds to a slice's report what is known of a program that jaxlib cannot read.

    Args:
        report: the report, changed in place.
        compiled: the compiled program.
        model_flops: the model FLOPs of one replica's step.
        target: the slice.
    """
    memory = costs.parse_memory_stats(compiled.memory)
    report.hbm, report.hbm_bytes = dataclasses.asdict(memory), memory.total
    report.model_flops = model_flops
    read = memory.arguments / target.bytes_per_s
    report.roofline_ms = 1e3 * max(model_flops / target.flops_per_s, read)
    report.lints = [
        "The program compiled, but this version of jaxlib cannot read it: its time is not known. "
        "The roofline counts only the model's matrix products and one read of the arguments."
    ]


def fill_state(report: SliceReport, held: StateBytes, target: Slice) -> None:
    """Records in a slice's report that no batch fits, because the state alone is too large.

    Args:
        report: the report of a step that was not compiled, changed in place.
        held: bytes of the state that each device would hold.
        target: the slice.
    """
    report.compiles, report.largest_per_core_batch = True, 0
    report.hbm, report.hbm_bytes = held._asdict(), held.total
    report.advice = suggest_for_state(report, held, target)


def suggest_for_state(report: SliceReport, held: StateBytes, target: Slice) -> list[str]:
    """Returns advice on changes that make the state of a device smaller, or its memory larger.

    Args:
        report: the report of the slice; its `mesh` says how the state is sharded.
        held: bytes of the state on each device.
        target: the slice.
    """
    room = ROOM * target.generation.hbm_limit
    divided = count_parts(report.mesh, target.replicas)
    counts = (n for n in range(2, target.replicas + 1) if target.replicas % n == 0)
    enough = next((n for n in counts if held.total * divided / n < room), None)
    found = suggest_dividing(report, held, target) if enough else []
    if held.optimizer and held.total - held.optimizer < room:
        found.append("An optimizer with less state would help: Lion, Adafactor or SGD.")
    if held.optimizer > held.weights / 2 and held.weights < room:
        found.append(
            "LoRA (--config.model.lora=16) needs hardly any optimizer state: the weights take "
            f"{format_size(held.weights)}."
        )
    more = _find_more_devices(held.total * divided, target)
    if more and (not enough or divided == target.replicas):
        engine = "" if report.mesh else "--config.cluster.engine=jax "
        found.append(
            f"More chips would hold it: {more.name} with "
            f"{engine}--config.cluster.mesh=fsdp:-1 takes "
            f"{format_size(held.total * divided / more.replicas)} per device."
        )
    own = target.generation.hbm_limit
    usable = [g for g in GENERATIONS.values() if report.mesh or g.supports_tensorflow]
    names = [
        f"{g.name} has {format_size(g.hbm_limit)}"
        for g in usable
        if g.hbm_limit > own and held.total < ROOM * g.hbm_limit
    ]
    if names:
        found.append(f"A slice with more memory per device would hold it: {', '.join(names)}.")
    return found


def suggest_dividing(report: SliceReport, held: StateBytes, target: Slice) -> list[str]:
    """Returns advice to shard a state that each device holds in full; [] if a mesh shards it.

    Args: as for `suggest_for_state`.
    """
    if report.mesh or target.replicas == 1:
        return []
    return [
        "--config.cluster.engine=jax --config.cluster.mesh=fsdp:-1 divides it: "
        f"{format_size(held.total / target.replicas)} per device. `tftpu plan` looks for the "
        "cheapest mesh and settings."
    ]


def describe_undivided(report: SliceReport, held: StateBytes, target: Slice) -> list[str]:
    """Returns advice on a large state that each device holds in full; [] if there is none.

    Args: as for `suggest_for_state`.
    """
    dividing = suggest_dividing(report, held, target)
    if not dividing or held.total < _LARGE * target.generation.hbm_limit:
        return []
    return [describe_state(held), *dividing]


def describe_state(held: StateBytes) -> str:
    """Returns a sentence with the size of the state on each device."""
    return f"Weights and optimizer's state take {format_size(held.total)} of each device."


def count_parts(mesh: str, devices: int) -> int:
    """Returns the number of devices that share one copy of the model; 1 without a mesh.

    Args:
        mesh: axes and sizes, as in `SliceReport.mesh`; "" for no mesh.
        devices: number of devices.
    """
    return devices // parse_mesh(mesh).get(DATA, 1) if mesh else 1


def _find_more_devices(state: int, target: Slice) -> Slice | None:
    """Returns the smallest larger slice that can hold the sharded state, or None."""
    same = [name for name in list_names() if name.startswith(f"{target.generation.name}-")]
    larger = (s for s in map(parse_slice, same) if s.replicas > target.replicas)
    room = ROOM * target.generation.hbm_limit
    return next((s for s in larger if state / s.replicas < room), None)


def _list_spent(rows: list[tuple[str, float, int]], total: float) -> list[Spent]:
    return [Spent(name, seconds * 1e3, seconds / total, cycles) for name, seconds, cycles in rows]


def find_usd_hour(target: Slice, options: PreflightOptions) -> float:
    """Returns the dollars for an hour of a slice, at list price unless another was given."""
    generation = target.generation
    return options.prices.get(generation.name, generation.usd_hour) * target.chips


def _add_prices(
    report: SliceReport,
    seconds: float,
    target: Slice,
    options: PreflightOptions,
    global_batch_size: int,
) -> None:
    generation, usd_hour = target.generation, find_usd_hour(target, options)
    usd_step = usd_hour * seconds / 3600
    report.usd_per_1000_steps = 1000 * usd_step
    if report.tokens_per_second:
        report.usd_per_billion_tokens = 1e9 * usd_hour / 3600 / report.tokens_per_second
    if options.examples_per_epoch:
        report.usd_per_epoch = usd_step * options.examples_per_epoch / global_batch_size
    if options.steps:
        hours = options.steps * seconds / 3600
        report.hours_per_run = hours
        report.usd_per_run = options.steps * usd_step
        if generation.watts:
            report.kwh_per_run = hours * generation.watts * target.chips / 1000
