"""The preflight check: compile a step for each slice, price it, give advice."""

import dataclasses
from collections.abc import Iterable

import keras

from tftpu.config import ClusterConfig
from tftpu.config.validation import check_types
from tftpu.engines import selection
from tftpu.engines.lowered import ModelFn
from tftpu.errors import UserError
from tftpu.optim.policy import choose_policy
from tftpu.preflight import compiled_model, rebuilding, request
from tftpu.preflight.compiling.caller import Caller
from tftpu.preflight.compiling.compiler import check_machine
from tftpu.preflight.compiling.processes import Processes
from tftpu.preflight.compiling.progress import Progress
from tftpu.preflight.examining import changes
from tftpu.preflight.examining.estimates import estimate_slices
from tftpu.preflight.examining.examiner import Examiner
from tftpu.preflight.options import PreflightOptions
from tftpu.preflight.report import Report
from tftpu.preflight.slice_report import SliceReport, summarize
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
        model: a compiled model, which is built again from its config in its own precision; or a
            function that returns a newly built and compiled model, and is called several times.
        batch: the global batch as arrays or `tf.TensorSpec`s of static shape: `(x, y)` or
            `(x, y, sample_weight)`, nested as the model takes them. Or the number of its examples,
            for a model with symbolic inputs and one output, whose loss determines the labels.
        slices: names such as "v3-8" or "v5e-8".
        options: options of the check; None takes the defaults.

    Raises:
        UserError: an argument is invalid; no TPU can run the model (the message names the layer
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
    """Implements `check`, whose tracebacks leave out the frames from here on."""
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
    precision = _choose_precision(model, options)
    options = dataclasses.replace(options, precision=precision)

    def find_model() -> keras.Model:
        if compiled is not None:
            return compiled
        found = lowering.build_model(model, precision)
        request.refuse_model(found)
        return found

    model_fn = rebuilding.build_function(model) if isinstance(model, keras.Model) else model
    batch_spec = compiled_model.read_batch_spec(batch, find_model)
    request.refuse_batch(batch_spec, options)
    if isinstance(model, keras.Model) and options.objectives is None:
        compiled_model.refuse_other_shapes(model, batch_spec)
    check_machine()
    caller = Caller()
    with Progress() as progress:
        processes = Processes(progress)
        examiner = Examiner(model_fn, batch_spec, options, lowering, caller, processes)
        for line in estimate_slices(examiner, targets):
            progress.print_unless_over(line)
        left = [target.name for target in targets]
        known: dict[str, str] = {}

        def examine(target: Slice) -> SliceReport:
            def note(report: SliceReport) -> None:
                known[target.name] = f"{summarize(report)}; changes were being tried"

            report = changes.examine(examiner, target, note)
            advice = [text.removesuffix(".") for text in report.advice[:1]]
            known[target.name] = "; ".join([summarize(report), *advice])
            left.remove(target.name)
            if left:
                progress.print_result(f"{known[target.name]}; still running: {', '.join(left)}")
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


def _choose_precision(model: keras.Model | ModelFn, options: PreflightOptions) -> str:
    """Returns the dtype policy to build under; raises `UserError` if a model has another one."""
    policy = choose_policy(options.precision, "tpu")
    if not isinstance(model, keras.Model):
        return policy
    found = compiled_model.read_precision(model)
    if options.precision is not None and policy != found:
        raise UserError(
            f"precision={options.precision!r}: the layers of {model.name!r} are {found}. Build it "
            "after keras.config.set_dtype_policy(...), or give a function that builds it."
        )
    return compiled_model.find_policy(model)


def _describe_unfinished(known: list[str], left: list[str]) -> list[str]:
    """Returns lines on an interrupted check: the results known so far, and the slices left."""
    if not known:
        return [f"No results yet, except for the estimates above: {', '.join(left)}."]
    finished = ["Known before the interruption:", *(f"  {line}" for line in known)]
    return [*finished, f"Not finished: {', '.join(left)}. Compiled programs are in the cache."]
