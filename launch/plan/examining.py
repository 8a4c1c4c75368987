"""Measures the facts for a plan's bounds, and examines its candidates with preflight.

One thread builds and lowers models; as many threads as this machine has cores each wait for a
compiler process.
"""

import math
import os
import threading
from collections.abc import Mapping, Sequence

import keras
import numpy as np

from tftpu.blocks.running import count_input_bytes
from tftpu.config.mesh import AUTO, TENSOR, parse_mesh
from tftpu.engines import selection
from tftpu.engines.data.conversion import replace_examples
from tftpu.engines.jax.placement.deriving import is_convolutional
from tftpu.engines.lowered import BuiltStep
from tftpu.errors import UserError
from tftpu.launch.plan import table
from tftpu.launch.plan.bounds import Facts
from tftpu.launch.plan.candidates import Candidate, Space, count_shards
from tftpu.launch.plan.journal import Journal
from tftpu.launch.plan.search import Search, Verdict
from tftpu.launch.preflight.check import build_options
from tftpu.launch.run.experiment import build_model
from tftpu.layer_internals import flatten_layers
from tftpu.optim.policy import choose_policy
from tftpu.preflight.advise import parse_memory_error
from tftpu.preflight.compiling.caller import Caller, StoppedError
from tftpu.preflight.compiling.processes import Processes
from tftpu.preflight.compiling.progress import Progress
from tftpu.preflight.examining.examiner import Examiner, count_parameters, count_tokens
from tftpu.preflight.slice_report import SliceReport
from tftpu.tensors import Nest
from tftpu.tpu.slices import Slice, parse_slice

_CONVOLUTIONS = (
    f"Most layers are convolutions, whose communication along {TENSOR!r} a plan cannot estimate: "
    f"to include such a mesh, set --config.cluster.mesh."
)


class PlanExaminer:
    """The examination of a plan's candidates with preflight.

    Args:
        space: the config as preflight compiles it, and the fields that the plan must not change.
        batch_spec: the spec of the config's global batch.
    """

    def __init__(self, space: Space, batch_spec: Nest):
        self._space, self._batch_spec = space, batch_spec
        self._caller = Caller()

    def measure_facts(self, states: Mapping[str, tuple[Slice, str]], known: Facts | None) -> Facts:
        """Returns the facts about the config, from models whose variables have no values.

        Args:
            states: a slice and a mesh for each state to measure; see `Space.list_states`.
            known: the facts that were measured before, or None.

        Raises:
            UserError: no slice can divide the global batch evenly, or no mesh can shard the model.
        """
        first = keras.tree.flatten(self._batch_spec)[0]
        examples: int = first.shape[0]
        measured = dict(known.states) if known else {}
        if known is not None and states.keys() <= measured.keys():
            return known
        if not states:
            raise UserError(f"None of the slices divides the global batch of {examples} examples.")
        first_built: tuple[BuiltStep, Slice] | None = None
        with Progress() as progress:
            for name, (target, mesh) in states.items():
                if first_built and name in measured:
                    continue
                if first_built and self._leaves_out(mesh, first_built[0].model):
                    measured[name] = _CONVOLUTIONS
                    continue
                try:
                    built = self._build(target, mesh, progress)
                except UserError as error:
                    measured[name] = str(error)
                else:
                    measured[name] = built.state_bytes
                    first_built = first_built or (built, target)
        if first_built is None:
            raise UserError(
                f"With the global batch of {examples} examples, no mesh of the slices divides the "
                f"model: {next(iter(measured.values()))}"
            )
        one, target = first_built
        layers = flatten_layers(one.model)
        return Facts(
            flops=one.count_flops() * target.replicas,
            examples=examples,
            tokens=count_tokens(self._batch_spec),
            input_bytes=count_input_bytes(one.model, first.shape[1] if first.shape.rank > 1 else 1),
            parameters=count_parameters(one.model.weights),
            weights=_count_bytes(one.model.variables),
            trained=_count_bytes(one.model.trainable_variables),
            blocks=one.has_blocks,
            statistics=any(isinstance(x, keras.layers.BatchNormalization) for x in layers),
            states=measured,
        )

    def _leaves_out(self, mesh: str, model: keras.Model) -> bool:
        """Returns whether a mesh is left out because its communication cannot be estimated."""
        own = self._space.experiment.cluster.mesh
        asked = own not in (None, AUTO) and TENSOR in parse_mesh(own)
        return TENSOR in parse_mesh(mesh) and not asked and is_convolutional(model)

    def _build(self, target: Slice, mesh: str, progress: Progress) -> BuiltStep:
        examples = self._space.experiment.data.global_batch_size // count_shards(mesh, target)
        remat = self._space.read_remat()
        experiment = self._space.apply(Candidate(target.name, mesh, remat, 1))
        lowering = selection.choose_lowering(experiment.cluster)
        with progress.show_phase(f"building the model for {mesh or target.name}"):
            return lowering.build(
                lambda: build_model(experiment),
                replace_examples(self._batch_spec, examples),
                target.replicas,
                choose_policy(experiment.train.precision, "tpu"),
                experiment.train,
                build_options(experiment).objectives,
            )

    def run(self, search: Search, journal: Journal, seconds: float) -> None:
        """Examines candidates until none is left that can be better, or the time is over.

        Args:
            search: the search, which has the known verdicts; new ones are added to it.
            journal: the record of earlier verdicts, to which the new ones are added.
            seconds: the time limit.

        Raises:
            KeyboardInterrupt: Ctrl-C was pressed; the verdicts until then are recorded.
        """
        changed, ended = threading.Condition(), threading.Event()

        def describe_slices() -> list[str]:
            return [*table.describe_ruled_out(search, self._space), *table.describe_priced(search)]

        printed = set(describe_slices())  # known before this plan
        with Progress() as progress:
            processes = Processes(progress)
            # The compiler processes of each candidate, to stop them if it is pruned.
            parts: dict[Candidate, Processes] = {}

            def choose() -> tuple[Candidate, Processes] | None:
                with changed:
                    while not ended.is_set():
                        if candidate := search.choose_next():
                            parts[candidate] = Processes(progress, processes)
                            return candidate, parts[candidate]
                        if not search.left:
                            return None
                        changed.wait()  # until a running candidate has a verdict
                return None

            def stop() -> None:
                ended.set()
                processes.stop()
                with changed:
                    changed.notify_all()

            def work(_: int) -> None:
                while chosen := choose():
                    candidate, part = chosen
                    try:
                        verdict, decided = self._examine(candidate, part)
                    except StoppedError:  # the candidate was pruned meanwhile, or the plan ends
                        with changed:
                            reason = search.pruned.get(candidate)
                        if reason:
                            shown = self._space.format_candidate(candidate)
                            progress.print_line(f"  {shown}: ended, {reason}")
                        continue
                    with changed:
                        search.record(candidate, verdict)
                        if decided:
                            journal.write_verdict(candidate, verdict)
                        described = table.describe_verdict(search, self._space, candidate)
                        progress.print_line(f"  {described}")
                        for line in describe_slices():
                            if line not in printed:
                                printed.add(line)
                                progress.print_line(line)
                        for other in parts.keys() & search.pruned.keys():
                            parts.pop(other).stop()
                        changed.notify_all()

            timer = threading.Timer(seconds, stop)
            timer.daemon = True
            timer.start()
            try:
                self._caller.map_items(work, range(len(os.sched_getaffinity(0))), stop)
            finally:
                timer.cancel()

    def _examine(self, candidate: Candidate, processes: Processes) -> tuple[Verdict, bool]:
        """Returns the verdict on a candidate, and whether it is final and can be recorded."""
        experiment = self._space.apply(candidate)
        options = build_options(experiment)
        changes = self._space.list_changes(candidate)
        other = [change for change in changes if not change.startswith("cluster.mesh")]
        examiner = Examiner(
            lambda: build_model(experiment),
            *(self._batch_spec, options, selection.choose_lowering(experiment.cluster)),
            *(self._caller, processes),
            f" with {' '.join(other)}" if other else " as configured",
        )
        try:
            report = examiner.examine_once(parse_slice(candidate.slice))
        except UserError as error:  # such as an attention that the model's shapes do not allow
            return Verdict(fits=False, error=str(error)), True
        return _read_verdict(report), not report.undecided


def _read_verdict(report: SliceReport) -> Verdict:
    found = parse_memory_error(report.error)
    times = report.step_ms, report.step_ms_low, report.step_ms_high
    seconds, low, high = (ms / 1e3 if report.fits and ms is not None else None for ms in times)
    return Verdict(
        fits=report.fits,
        hbm_bytes=found[0] if found else report.hbm_bytes,
        host_bytes=report.host_bytes,
        step_seconds=seconds,
        step_seconds_low=low,
        step_seconds_high=high,
        mfu=report.mfu,
        error=report.error,
        too_large=report.compiles and not (report.fits or report.undecided or report.exceeds_host),
    )


def _count_bytes(variables: Sequence[keras.Variable]) -> int:
    return sum(math.prod(v.shape) * np.dtype(v.dtype).itemsize for v in variables)
