"""Starts or resumes a run: checks what its workdir holds, claims it, and trains in this process.

The options are those of `tftpu train`. A trial of a search has the same options.
"""

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tftpu.checkpoint import manifest
from tftpu.config import Experiment, TrainConfig, operational_fields, renamed, to_plain
from tftpu.config.mesh import AUTO
from tftpu.engines import backend, selection
from tftpu.errors import UserError, counted
from tftpu.launch import failures, output, startup
from tftpu.launch.diagnosis import quick
from tftpu.launch.diagnosis.machine import Machine
from tftpu.launch.preflight import mesh_choice
from tftpu.launch.settings import parsing
from tftpu.launch.settings.options import TIME, RunOptions, flag
from tftpu.runtime import goodput
from tftpu.storage import files, locks, side_files

# The working directory is added last, so that a folder `tftpu` in it does not replace the package.
_MAIN = "import os, sys; from tftpu.launch.main import run; sys.path.append(os.getcwd()); run()"
_LONG = 200  # characters of two lists from which a message leaves their values out
_GROUPS = ("model", "data", "optimizer")  # a run resumes only if these are unchanged


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(RunOptions):
    """The config to train, the workdir, and the handling of crashes and hangs."""

    workdir: str | None = flag(
        None, "folder of the run, local or gs://", metavar="RUN", shown="runs/<config>"
    )
    restarts: int = flag(0, "how often a crashed run is restarted", minimum=0, metavar="N")
    watchdog: float | None = flag(
        None,
        "end a run that finishes no step for this long",
        minimum=1,
        metavar=TIME,
        shown="never",
    )


def run_training(options: Options, experiment: Experiment, callbacks: Sequence[Any] = ()) -> None:
    """Trains the experiment of the options, with further Keras callbacks."""
    if options.watchdog is not None:
        experiment.train.watchdog_seconds = options.watchdog
        experiment.train.validate()
    startup.require_tensorflow()
    backend.check_keras()
    quick.check(Machine())
    workdir = options.workdir or options.default_workdir
    if options.restarts:
        _supervise(options, workdir)
    from tftpu.runtime import preemption

    engine = selection.choose_backend(experiment.cluster)
    task = selection.find_task(experiment.cluster)
    if task.count > 1 and engine == "jax" and experiment.cluster.mesh == AUTO:
        raise UserError(
            f"cluster.mesh=auto works on one host only, but {task.count} hosts train together: "
            "set the mesh that `tftpu preflight` chooses for the slice, such as "
            "--config.cluster.mesh=fsdp:-1."
        )
    chief = task.chief
    if chief:
        print(
            f"tftpu train {options.name}: {_format_length(experiment.train)} of "
            f"{counted(experiment.data.global_batch_size, 'example')}, in {workdir}",
            flush=True,
        )
    claimed = locks.locked(workdir) if chief else contextlib.nullcontext()
    recorded = _recording_stop(workdir) if chief else contextlib.nullcontext()
    with explained_interruption(workdir), preemption.exit_on_notice(), claimed, recorded:
        _check_same_run(experiment, workdir, side_files.take if chief else side_files.read)
        argv = [f"--config={options.config}", *options.overrides]
        experiment.cluster.mesh = mesh_choice.choose_mesh(experiment.cluster, argv)
        with output.reporting_if_slow("Loading TensorFlow"):
            startup.import_tensorflow()
        from tftpu.launch.run import training

        training.train(experiment, workdir, callbacks=callbacks)


def load_experiment(options: Options) -> Experiment:
    """Loads the experiment of the options; a Ctrl-C meanwhile is recorded in a local workdir."""
    workdir = options.workdir or options.default_workdir
    if files.is_remote(workdir):  # which is not asked for what a few seconds took
        explained = recorded = contextlib.nullcontext()
    else:
        explained, recorded = explained_interruption(workdir), _recording_stop(workdir)
    with explained, recorded, output.reporting_if_slow(f"Loading {options.config}"):
        return options.load_experiment()


@contextlib.contextmanager
def explained_interruption(workdir: str) -> Iterator[None]:
    """Adds to a Ctrl-C that ends the block at once what the same command does next."""
    try:
        yield
    except BaseException as error:
        if failures.was_interrupted(error):
            steps = manifest.list_steps(files.join(workdir, "checkpoints"))
            error.add_note(
                f"The same command resumes from step {steps[-1]:,}."
                if steps
                else "No step was saved: the same command starts the run from the beginning."
            )
        raise


@contextlib.contextmanager
def _recording_stop(workdir: str) -> Iterator[None]:
    """Records a Ctrl-C that ends the block before training has an account."""
    try:
        yield
    except BaseException as error:
        if failures.was_interrupted(error):
            # Another process may use the workdir, and this one may be unable to write there.
            with contextlib.suppress(UserError), locks.locked(workdir):
                goodput.record_stop(workdir)
        raise


def _supervise(options: Options, workdir: str) -> None:
    """Runs the command in a separate process, restarts it if it crashes, and exits."""
    from tftpu.launch.run import supervise

    again = parsing.to_argv(dataclasses.replace(options, restarts=0))
    command = [sys.executable, *_list_interpreter_flags(), "-c", _MAIN, "train", *again]
    sys.exit(supervise.run(command, workdir, options.restarts))


def _list_interpreter_flags() -> list[str]:
    """Returns this interpreter's flags and -P, because `_MAIN` adds the working directory."""
    return ["-P", *["-O"] * sys.flags.optimize]


def _format_length(train: TrainConfig) -> str:
    if train.steps is not None:
        return counted(train.steps, "step")
    return f"{counted(train.epochs or 0, 'epoch')} in steps"


def _check_same_run(
    experiment: Experiment,
    workdir: str,
    read: Callable[..., dict[str, Any] | None] = side_files.read,
) -> None:
    """Raises `UserError` if the workdir holds checkpoints of another model, data or objective.

    Args:
        experiment: the experiment to train.
        workdir: the workdir of the run.
        read: `side_files.read`, or `side_files.take` in a process that writes to the workdir.
    """
    if not manifest.list_steps(files.join(workdir, "checkpoints")):
        return  # nothing to resume; for example, the run diverged at once
    before = read(files.join(workdir, "config.json"), **dict.fromkeys(_GROUPS, object))
    if before is None:  # without config.json, the checkpoint itself rejects another model
        return
    for group in (*_GROUPS, "loss"):  # older runs recorded no loss in their configs
        now = getattr(experiment, group)
        recorded = _extract_fields(renamed.update_classes(before.get(group)))
        fields = _extract_fields(to_plain(now))
        if dataclasses.is_dataclass(now):
            # The run is older than some of the fields, which had their defaults.
            recorded = _list_defaults(now) | recorded
            for name in operational_fields(now):
                recorded.pop(name, None)
                fields.pop(name, None)
        # A digest of these weights is compared instead of their path.
        if group == "model" and experiment.model.lora:
            elsewhere = dict.fromkeys(experiment.model.base_fields, "")
            recorded, fields = recorded | elsewhere, fields | elsewhere
        differing = _list_differences(group, recorded, fields)
        if differing:
            shown = ", ".join(differing[:5]) + (", …" if differing[5:] else "")
            raise UserError(
                f"The workdir {workdir!r} holds a run with another {group} configuration: "
                f"{shown}. Leave that as it was to resume the run, or give another workdir, such "
                f"as --workdir={files.suggest_path(workdir)}."
            )


def _extract_fields(plain: Any) -> dict[str, Any]:
    """Returns the fields of a config's group as JSON; a group without fields has the name ""."""
    if not isinstance(plain, dict) or "class" not in plain:
        return {"": plain}
    description = plain.get("description")
    # A Keras object; Keras numbers the names of its objects within a process.
    if isinstance(description, dict):
        settings = description.get("config")
        settings = settings if isinstance(settings, dict) else {}
        settings = {name: value for name, value in settings.items() if name != "name"}
        return {"": description.get("class_name"), **settings}
    return plain


def _list_differences(group: str, before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Returns fields that change a run's results and differ: "model.width was 8 and is 16"."""
    found: list[str] = []
    for name in now | before:
        was, is_now = before.get(name), now.get(name)
        place = f"{group}.{name}".rstrip(".")
        if isinstance(was, dict) and isinstance(is_now, dict):
            found += _list_differences(place, was, is_now)
        elif was != is_now:
            found.append(f"{place} {_describe_change(was, is_now)}")
    return found


def _describe_change(was: Any, now: Any) -> str:
    if not (isinstance(was, list) and isinstance(now, list)) or len(f"{was}{now}") < _LONG:
        return f"was {was!r} and is {now!r}"
    same = [one == other for one, other in zip(was, now)]
    first = same.index(False) if False in same else len(same)
    return (
        f"had {len(was):,} values and has {len(now):,}, which differ from number {first + 1:,} on"
    )


def _list_defaults(config: Any) -> dict[str, Any]:
    """Returns the defaults of a dataclass in the form that JSON gives them."""
    fields = dataclasses.fields(config)
    return {f.name: to_plain(f.default) for f in fields if f.default is not dataclasses.MISSING}
