"""Shows the newest profile of a run, or compares the newest profiles of two runs.

tftpu profile runs/digits_resnet
"""

import contextlib
import dataclasses
import json
import os
import statistics
import tempfile
from collections.abc import Iterator
from typing import Any, NamedTuple

from tftpu.errors import UserError
from tftpu.launch.settings.options import required
from tftpu.observe.profiler import INPUT_WAIT
from tftpu.storage import files

TOP = 10


class Op(NamedTuple):
    """An operation of a profile: where ("Host" or "Device"), kind, name, and ms per step."""

    where: str
    kind: str
    name: str
    ms: float


class Profile(NamedTuple):
    """A summary of a profile.

    Attributes:
        path: the folder of the profile.
        device: "CPU", "TPU" and so on.
        steps: the number of profiled steps.
        step_ms: the median, the smallest and the largest milliseconds of a step.
        input_share: the share of the step spent waiting for input.
        device_share: the share of the step spent on the device; 0 on a CPU, which is also the host.
        ops: the operations, the costliest first.
    """

    path: str
    device: str
    steps: int
    step_ms: tuple[float, float, float]
    input_share: float
    device_share: float
    ops: list[Op]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The runs whose profiles to show."""

    workdirs: tuple[str, ...] = required(
        "RUN", "folder of a run; two are compared", word=True, aliases=("workdir",)
    )


def run(options: Options) -> None:
    """Prints the newest profile of a run, or compares the newest profiles of two runs."""
    workdirs = options.workdirs
    if len(workdirs) > 2:
        raise UserError(f"tftpu profile compares two runs, but {len(workdirs)} are given.")
    profiles = [read(workdir) for workdir in workdirs]
    lines = (
        describe_profile(profiles[0])
        if len(profiles) == 1
        else compare_profiles(profiles[0], profiles[1])
    )
    print("\n".join(lines))


def read(workdir: str) -> Profile:
    """Reads the newest profile of a workdir.

    Raises:
        UserError: there is no profile, it is damaged, or it holds no complete step.
    """
    folder = files.join(workdir, "plugins", "profile")
    sessions = files.list_names(folder)
    if not sessions:
        raise UserError(
            f"There is no profile in {workdir!r}: train with --config.train.profile=100:110 (in "
            "a script, tftpu.TrainConfig(profile='100:110')), or send SIGUSR1 to a running "
            "process (kill -USR1 PROCESS)."
        )
    path = files.join(folder, sessions[-1])
    with tempfile.TemporaryDirectory() as copy:  # xprof writes cache files beside the trace
        traces = []
        for name in files.list_names(path):
            if name.endswith(".xplane.pb"):
                traces.append(os.path.join(copy, name))
                with open(traces[-1], "wb") as file:
                    file.write(files.read(files.join(path, name)))
        return _summarize_traces(path, traces)


def describe_profile(profile: Profile) -> list[str]:
    """Returns lines that describe one profile."""
    median, least, most = profile.step_ms
    lines = [
        f"Profile {profile.path}: {profile.steps} steps on {profile.device}",
        f"  step        {median:.4g} ms (from {least:.4g} to {most:.4g})",
        f"  input       {profile.input_share:.1%} of the step is waiting for data",
        f"  bound by    {find_bottleneck(profile)}",
        "",
        f"  {'ms a step':>10}  {'share':>6}  {'where':6}  op",
    ]
    for op in profile.ops[:TOP]:
        lines.append(f"  {op.ms:10.3f}  {op.ms / median:6.1%}  {op.where:6}  {op.kind}  {op.name}")
    return lines


def compare_profiles(one: Profile, two: Profile) -> list[str]:
    """Returns lines that compare two profiles."""
    rows = [
        ("step, ms", one.step_ms[0], two.step_ms[0]),
        ("input wait, ms", one.input_share * one.step_ms[0], two.input_share * two.step_ms[0]),
    ]
    kinds = [_sum_by_kind(one), _sum_by_kind(two)]
    changed = sorted(
        set(kinds[0]) | set(kinds[1]),
        key=lambda kind: -abs(kinds[1].get(kind, 0.0) - kinds[0].get(kind, 0.0)),
    )
    rows += [(kind, kinds[0].get(kind, 0.0), kinds[1].get(kind, 0.0)) for kind in changed[:TOP]]
    lines = [
        f"A  {one.path}: {one.steps} steps on {one.device}, bound by {find_bottleneck(one)}",
        f"B  {two.path}: {two.steps} steps on {two.device}, bound by {find_bottleneck(two)}",
        "",
        f"  {'':36}{'A':>10}{'B':>10}{'B - A':>10}{'B / A':>8}",
    ]
    for name, a, b in rows:
        ratio = f"{b / a:8.2f}" if a else f"{'-':>8}"
        lines.append(f"  {name[:35]:36}{a:10.3f}{b:10.3f}{b - a:+10.3f}{ratio}")
    return [*lines, "", "  Below the first two rows: milliseconds a step by kind of op."]


def find_bottleneck(profile: Profile) -> str:
    """Returns a phrase that names what limits the speed of the step."""
    if profile.input_share > 0.2:
        return "the input pipeline: see tftpu data check"
    if profile.device == "CPU":
        return "the CPU, which is host and device at once"
    return "the device" if profile.device_share > 0.7 else "the host"


def _summarize_traces(path: str, traces: list[str]) -> Profile:
    overview = _convert_traces(traces, "overview_page")
    facts: dict[str, Any] = {}
    for table in overview:
        facts |= table.get("p", {})
    device = facts.get("device_type", "CPU")
    marked, waited = _read_marked_steps(traces)
    times = marked if device == "CPU" else _read_step_times(overview)
    if not times:
        raise UserError(f"The profile {path!r} holds no complete step: profile more steps.")
    step = statistics.median(times)
    on_device = float(facts.get("device_compute_time_ms_avg", 0.0))
    return Profile(
        path,
        device,
        len(times),
        (step, min(times), max(times)),
        min(1.0, waited / sum(times)),
        on_device / step,
        _list_ops(traces, len(times)),
    )


def _read_marked_steps(traces: list[str]) -> tuple[list[float], float]:
    """Returns the milliseconds of each step, from its markers, and the total wait for input.

    On a CPU, xprof itself computes no step times.
    """
    times, waited = [], 0.0
    for event in _convert_traces(traces, "trace_viewer")["traceEvents"]:
        facts = event.get("args", {})
        if event.get("name") == "train" and "step_num" in facts:
            times.append(event["dur"] / 1e3)
        elif event.get("name") == INPUT_WAIT:
            waited += float(facts["microseconds"]) / 1e3
    return times, waited


def _read_step_times(overview: list[dict]) -> list[float]:
    """Returns the milliseconds of each step, from the timelines of the devices."""
    for table in overview:
        columns = [column["id"] for column in table.get("cols", [])]
        if "stepTimeMs" in columns:
            place = columns.index("stepTimeMs")
            return [float(row["c"][place]["v"]) for row in table["rows"]]
    return []


def _list_ops(traces: list[str], steps: int) -> list[Op]:
    """Returns the operations, except those of the input pipeline, the costliest first."""
    table = _convert_traces(traces, "framework_op_stats")[0]
    columns = [column["id"] for column in table["cols"]]
    places = [
        columns.index(name) for name in ("host_or_device", "type", "operation", "total_self_time")
    ]
    ops = []
    for row in table["rows"]:
        where, kind, name, microseconds = (row["c"][place]["v"] for place in places)
        # Threads of the input pipeline are not part of the step.
        if kind not in ("IDLE", "Dataset"):
            ops.append(Op(where, kind, _shorten_name(name), microseconds / 1e3 / steps))
    return sorted(ops, key=lambda op: -op.ms)


def _sum_by_kind(profile: Profile) -> dict[str, float]:
    kinds: dict[str, float] = {}
    for op in profile.ops:
        kinds[op.kind] = kinds.get(op.kind, 0.0) + op.ms
    return kinds


def _shorten_name(name: str) -> str:
    """Returns an operation's name without the loops, conditions and gradient tapes around it."""
    outer = ("while", "body", "cond", "gradient_tape")
    return "/".join(p for p in name.split("/") if p not in outer and not p.startswith("_"))


def _convert_traces(traces: list[str], tool: str) -> Any:
    from xprof.convert import raw_to_tool_data

    with _quiet():
        data, _ = raw_to_tool_data.xspace_to_tool_data(traces, tool, {})
    if data is None:  # there is no trace, or it is damaged
        names = ", ".join(os.path.basename(trace) for trace in traces) or "no trace"
        raise UserError(
            f"The newest profile cannot be read (it holds {names}): was the run killed while "
            "writing it? Remove its folder, or profile again."
        )
    return json.loads(data)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hides everything that the process writes to stderr, including C++ code's output."""
    with open(os.devnull, "w") as nowhere:
        kept = os.dup(2)
        os.dup2(nowhere.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)
