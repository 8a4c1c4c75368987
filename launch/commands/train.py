"""Trains a config, or resumes its run from the last checkpoint.

A run lives in its workdir. The same command resumes it, after a crash, a preemption or with more
steps.

    tftpu train --config=digits_resnet
    tftpu train --config=digits_resnet --config.train.steps=500 --workdir=runs/short
"""

import contextlib
import dataclasses
import json
import sys
from typing import Any

from tftpu.config import Experiment, KerasObject, Train, to_plain
from tftpu.engines import backend
from tftpu.errors import UserError
from tftpu.launch import options as command_options
from tftpu.launch import startup
from tftpu.launch.diagnosis import quick
from tftpu.launch.diagnosis.machine import Machine
from tftpu.launch.options import RunOptions, flag
from tftpu.storage import files

# Fields that configure how the data is read, not which data.
_HOW = ("service", "cache_dir", "cache_gb", "download", "max_bad_records")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(RunOptions):
    """The config to train, the workdir, and the handling of crashes and hangs."""

    workdir: str | None = flag(
        None, "folder of the run, local or gs://", metavar="DIR", shown="runs/<config>"
    )
    restarts: int = flag(0, "how often a crashed run is restarted", minimum=0, metavar="N")
    watchdog: float | None = flag(
        None,
        "end a run that finishes no step for this long",
        minimum=1,
        metavar="SECONDS",
        shown="never",
    )


def run(options: Options) -> None:
    """Trains, or resumes from the last checkpoint of the workdir."""
    experiment = options.experiment()
    startup.require_tensorflow()
    backend.check_keras()
    quick.check(Machine())
    workdir = options.workdir or options.default_workdir
    if options.restarts:
        _supervise(options, workdir)
    if options.watchdog is not None:
        experiment.train.watchdog_seconds = options.watchdog
    from tftpu.runtime import hosts, preemption

    chief = hosts.task().chief
    if chief:
        print(
            f"tftpu train {options.name}: {_length(experiment.train)} steps of "
            f"{experiment.data.global_batch_size:,} examples, in {workdir}",
            flush=True,
        )
    claimed = files.claim(workdir) if chief else contextlib.nullcontext()
    with preemption.exit_on_notice(), claimed:
        _check_same_run(experiment, workdir)
        startup.import_tensorflow()
        from tftpu.launch import training

        training.train(experiment, workdir)


def _supervise(options: Options, workdir: str) -> None:
    """Runs the command in a separate process, which is restarted if it crashes; exits."""
    from tftpu.launch import supervise

    again = command_options.words_of(dataclasses.replace(options, restarts=0))
    command = [sys.executable, *_interpreter_flags(), "-m", "tftpu.launch.main", "train", *again]
    sys.exit(supervise.run(command, workdir, options.restarts))


def _interpreter_flags() -> list[str]:
    return ["-O"] * sys.flags.optimize


def _length(train: Train) -> str:
    return f"{train.steps:,}" if train.steps is not None else f"{train.epochs:,} epochs in"


def _check_same_run(experiment: Experiment, workdir: str) -> None:
    """Raises `UserError` if the workdir holds a run of another model, data set or objective."""
    path = files.join(workdir, "config.json")
    if not files.exists(path):
        return
    try:
        before = json.loads(files.read(path))
    except ValueError as error:
        raise UserError(f"config.json in {workdir!r} cannot be read: {error}.") from error
    for group in ("model", "data", "optimizer", "loss"):
        now = getattr(experiment, group)
        if _identity(before.get(group), now) != _identity(to_plain(now), now):
            raise UserError(
                f"The workdir {workdir!r} holds a run with another {group} configuration. Give "
                "this one its own workdir with --workdir=DIR, or remove that run."
            )


def _identity(plain: Any, now: Any) -> Any:
    """Returns a group of an experiment without the fields that change no number of the run.

    Args:
        plain: the group as JSON; a field that it lacks is newer than the run, and has its default.
        now: the group of the experiment that is to run.
    """
    if not isinstance(plain, dict) or not dataclasses.is_dataclass(now):
        return plain
    if isinstance(now, KerasObject):  # Keras numbers the names of objects within a process
        description = plain.get("description", {})
        config = {k: v for k, v in description.get("config", {}).items() if k != "name"}
        return {**description, "config": config}
    defaults = {
        field.name: to_plain(field.default)
        for field in dataclasses.fields(now)
        if field.default is not dataclasses.MISSING
    }
    return {name: part for name, part in (defaults | plain).items() if name not in _HOW}
