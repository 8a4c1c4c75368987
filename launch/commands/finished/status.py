"""Shows the state of runs: step, speed, time left, checkpoints, and where the time went.

It reads only the files of the workdir, and works during a run as well as after it.

    tftpu status runs/digits_resnet
"""

import dataclasses
import json
import os
import shlex
import time
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from tftpu.amounts import format_clock, format_metric, format_price
from tftpu.checkpoint import manifest
from tftpu.errors import UserError, counted
from tftpu.launch.correction import expand_folders, suggest_folder
from tftpu.launch.run import recorded_start
from tftpu.launch.settings import config_flags
from tftpu.launch.settings.options import flag, required
from tftpu.observe import writers
from tftpu.runtime import goodput
from tftpu.storage import files, locks, side_files
from tftpu.storage import lines as line_files

# Seconds without an update after which a run in a bucket counts as dead. A run writes every 10 s.
_SILENT = 120.0
_FIELDS, _LONG = 20, 120  # maximum lengths: fields in a list, characters of a value
_IN_WORDS = {
    "starting": "starting: the first step comes after compiling",
    "running": "running",
    "prepared": "ended before its first step: nothing was saved, and the same command starts over",
    "finished": "finished",
    "failed": "ended with an error",
}
_ACTIVITIES = {"compiling": "compiling", "evaluation": "evaluating", "checkpoint_wait": "saving"}
_RESUMABLE = {
    "stopped": "stopped by the user",
    "preempted": "preempted",
    "crashed": "crashed, was killed, or was stopped at once",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The runs to show, and the format."""

    workdirs: tuple[str, ...] = required(
        "RUN",
        "folder of a run, local or gs://, or of several runs",
        word=True,
        aliases=("workdir",),
    )
    json: bool = flag(False, "print JSON, for programs")


def run(options: Options) -> None:
    """Prints the state of each run.

    Raises:
        UserError: there is no run in one of the workdirs; the states of the others are printed.
    """
    found, missing = [], []
    for workdir in expand_folders(options.workdirs):
        try:
            found.append(read_status(workdir))
        except UserError as error:
            missing.append(error)
    if found and options.json:
        _print_json(found)
    elif found:
        print("\n\n".join("\n".join(format_status(record)) for record in found))
        for line in list_differences([record["workdir"] for record in found]):
            print(line)
    if missing:
        raise UserError(" ".join(map(str, missing)))


def list_differences(workdirs: Sequence[str]) -> list[str]:
    """Returns lines about the fields in which the configs of runs differ; [] if all are equal."""
    read = {w: side_files.read(files.join(w, "config.json")) for w in workdirs}
    records = {workdir: record for workdir, record in read.items() if record}
    differing = list(_find_differences(list(records.values()), ""))
    if not differing:
        return []
    shown = differing[:_FIELDS]
    width = max(len(name) for name, _ in shown)
    lines = ["", f"Their configs differ ({' | '.join(records)}):"]
    for name, values in shown:
        lines.append(f"  {name:{width}}  {' | '.join(_cut_values(values))}")
    return lines + ([f"  and {len(differing) - _FIELDS} others"] if differing[_FIELDS:] else [])


def _cut_values(values: Sequence[str]) -> list[str]:
    """Shortens values, if one is long, to the characters around their first difference."""
    if max(map(len, values)) <= _LONG:
        return [*values]
    same = os.path.commonprefix([*values])  # noqa: RUF071 (of characters, not of folders)
    begin = max(0, len(same) - _LONG // 2)
    parts = [(value[begin : begin + _LONG], value[begin + _LONG :]) for value in values]
    return [f"{'…' if begin else ''}{part}{'…' if rest else ''}" for part, rest in parts]


def _find_differences(values: list[Any], path: str) -> Iterator[tuple[str, list[str]]]:
    """Yields the paths of fields that differ, such as "model.width", and their values as text.

    Objects of different classes count as one difference, whatever their fields are.
    """
    if all(isinstance(value, dict) for value in values) and len(set(map(_name_class, values))) == 1:
        for name in dict.fromkeys(name for value in values for name in value):
            inner = [value.get(name, "-") for value in values]
            yield from _find_differences(inner, f"{path}.{name}".lstrip("."))
    elif any(value != values[0] for value in values):
        objects = [value for value in values if isinstance(value, dict)]
        same = _list_equal_fields(objects) if len(objects) > 1 else set()
        yield path, [_describe_value(value, same) for value in values]


def _list_equal_fields(objects: Sequence[dict[str, Any]]) -> set[str]:
    """Returns the names of fields, except the class, that all objects have with equal values."""
    first, *others = objects
    shared = set(first) - {"class"}
    return {n for n in shared if all(n in one and one[n] == first[n] for one in others)}


def _name_class(value: dict[str, Any]) -> str:
    return str(value.get("class", "")).rpartition(".")[2]


def _describe_value(value: Any, without: Collection[str] = ()) -> str:
    """Returns a value of a config.json as text, without the fields that `without` names."""
    if not isinstance(value, dict):
        return value if isinstance(value, str) else json.dumps(value)
    fields = ", ".join(
        f"{name}={_describe_value(held)}"
        for name, held in value.items()
        if name not in ("class", *without)
    )
    return f"{_name_class(value)}({fields})"


def read_status(workdir: str) -> dict[str, Any]:
    """Returns the state of a run: step, speed, time left, checkpoints, metrics and use of time.

    Raises:
        UserError: no run was started there, or the folder holds a search.
    """
    account, holder = goodput.read(workdir), locks.find_holder(workdir)
    if holder and (account is None or account.process != holder.process):
        process = f"{holder.process} on {holder.host}"
        known = {"process": process, "checkpoints": _find_checkpoints(workdir)}
        return {"workdir": workdir, "state": "starting", **known}
    if account is None and files.exists(files.join(workdir, "search.json")):
        raise UserError(
            f"{workdir!r} holds a search, whose runs are in trials/NNNN/run. To show it, run "
            f"`tftpu search --report --workdir={workdir}`."
        )
    if account is None and files.exists(files.join(workdir, "config.json")):
        return {"workdir": workdir, "state": "prepared", "checkpoints": _find_checkpoints(workdir)}
    if account is None:
        why = f"it has no {goodput.FILE}"
        if not files.exists(workdir):
            why = "there is no such folder. A run that is stopped at once leaves no folder"
        raise UserError(f"There is no run in {workdir!r}: {why}.{suggest_folder(workdir)}")
    state = account.state
    if state == goodput.RUNNING and not _is_alive(workdir, account):
        state = "crashed"
    facts = dataclasses.asdict(account.facts)
    del facts["global_batch_size"]
    metrics = _read_last_metrics(workdir)
    # Either may be newer: goodput.json is written every 10 s, and metrics.jsonl at every log line.
    logged = max((int(last["step"]) for last in metrics.values()), default=0)
    accounted = facts["step"] or 0
    facts["step"] = max(accounted, logged)
    if facts["eta_seconds"] and accounted < logged:
        left = max(0, facts["steps"] - logged) / max(1, facts["steps"] - accounted)
        facts["eta_seconds"] = round(left * facts["eta_seconds"], 1)
    return {
        "workdir": workdir,
        "config": _find_config(workdir),
        "command": recorded_start.read_command(workdir),
        **{name: value for name, value in facts.items() if value is not None},
        "restarts": account.restarts,
        "state": state,
        "activity": account.current if state == goodput.RUNNING else "",
        "process": f"{account.process} on {account.host}",
        "updated": account.updated,
        "checkpoints": _find_checkpoints(workdir),
        "metrics": metrics,
        "goodput": account.goodput,
        "wall_seconds": account.wall_seconds,
        "seconds": account.seconds,
        "seconds_step": accounted,
    }


def _find_config(workdir: str) -> str | None:
    """Returns the config that a run was trained with; None unless it is known for certain."""
    config = config_flags.find_config_of_run(workdir) or ""
    is_certain = config.endswith(".py") or config == os.path.basename(workdir.rstrip("/"))
    return config if is_certain else None


def format_status(record: dict[str, Any]) -> list[str]:
    """Formats the result of `read_status` as lines of text."""
    if record["state"] in ("starting", "prepared"):
        rows = [("state", _IN_WORDS[record["state"]])]
        rows += [("process", record["process"])] if "process" in record else []
        if saved := record.get("checkpoints", {}).get("steps"):
            if record["state"] == "prepared":  # goodput.json is missing, as in a copy of a run
                rows = [("state", "not running: the same command resumes it")]
            rows.append(("checkpoint", f"step {saved[-1]}, from which it resumes"))
        return [record["workdir"], *(f"  {name:12}{value}" for name, value in rows)]
    ago = format_clock(max(0.0, time.time() - record["updated"]))
    running = record["state"] == goodput.RUNNING
    state = _describe_state(record)
    activity = _ACTIVITIES.get(record["activity"])
    rows = [("state", f"{state}: {activity}" if activity else state)]
    # The process is shown only while it runs.
    rows.append(
        ("process", f"{record['process']}, last update {ago} ago")
        if running
        else ("updated", f"{ago} ago")
    )
    step, steps = record.get("step", 0), record.get("steps", 0)
    if steps:
        rows.append(("step", f"{step}/{steps} ({step / steps:.0%})"))
    if record.get("examples_per_sec"):
        speed = f"{format_metric(record['examples_per_sec'])} examples/s in the last steps"
        unit = "chip" if "usd" in record else "device"  # only TPUs have a price
        speed += f" on {counted(record['chips'], unit)}" if record.get("chips", 1) > 1 else ""
        rows.append(("speed", speed + (f", MFU {record['mfu']:.1%}" if "mfu" in record else "")))
    if running and "eta_seconds" in record and step < steps:
        rows.append(("time left", format_clock(record["eta_seconds"])))
    if "usd" in record:
        rows.append(("cost", f"{format_price(record['usd'])} so far, list price"))
    if record["restarts"]:
        rows.append(("resumed", counted(record["restarts"], "time")))
    checkpoints = record["checkpoints"]
    kept = "none yet"
    if checkpoints["steps"]:
        kept = f"step {checkpoints['steps'][-1]}"
        if checkpoints["best"]:
            best = checkpoints["best"]
            number = format_metric(best["value"])
            kept += f", best {best['metric']} {number} at step {best['step']}"
    rows.append(("checkpoint", kept))
    for split, metrics in record["metrics"].items():
        shown = {k: v for k, v in metrics.items() if k not in (*writers.CURVES_ONLY, "step")}
        numbers = "  ".join(f"{k} {format_metric(v)}" for k, v in shown.items())
        rows.append((split, f"step {metrics['step']}  {numbers}"))
    text = [record["workdir"], *(f"  {name:12}{value}" for name, value in rows)]
    for index, row in enumerate(goodput.format_table(record["seconds"])):
        text.append(f"  {'time' if index == 0 else '':12}{row}")
    if record["seconds_step"] < step:
        text.append(f"  {'':12}as last written, at step {record['seconds_step']}")
    return text


def _describe_state(record: dict[str, Any]) -> str:
    """Returns the state in words, and whether the same command resumes the run or starts over."""
    name: str = record["state"]
    if name not in _RESUMABLE:
        return _IN_WORDS.get(name, name)
    state = _RESUMABLE[name]
    if not record["checkpoints"]["steps"]:
        return f"{state}: nothing was saved, and the same command starts over"
    if record["command"]:
        return f"{state}: the same command resumes it ({record['command']})"
    if not record["config"]:
        return f"{state}: the same command resumes it"
    line = shlex.join(["tftpu", "train", record["config"], f"--workdir={record['workdir']}"])
    return f"{state}: the same command resumes it ({line}, with its other flags)"


def _is_alive(workdir: str, account: goodput.Record) -> bool:
    """Returns whether a process locks the workdir or, if unknown, wrote to it in the last 2 min."""
    held = locks.is_locked(workdir)
    return abs(time.time() - account.updated) < _SILENT if held is None else held


def _find_checkpoints(workdir: str) -> dict[str, Any]:
    """Returns the steps of the complete checkpoints, and the best one."""
    folder = files.join(workdir, "checkpoints")
    best = side_files.read(files.join(folder, "best"), step=int, metric=str, value=float)
    return {"steps": manifest.list_steps(folder), "best": best}


def _read_last_metrics(workdir: str) -> dict[str, dict[str, float]]:
    """Returns the last line of each split in `metrics.jsonl`."""
    last: dict[str, dict[str, float]] = {}
    for step, split, numbers in line_files.read(files.join(workdir, "metrics.jsonl")):
        last[split] = {"step": step, **numbers}
    return last


def _print_json(found: list[dict[str, Any]]) -> None:
    print(json.dumps(found if len(found) > 1 else found[0], indent=2))
