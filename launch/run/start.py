"""Starts or resumes a run: locks its workdir, checks the config against it, and trains.

The options are those of `tftpu train`. A trial of a search has the same options.
"""

import contextlib
import dataclasses
import shlex
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from tftpu.checkpoint import manifest
from tftpu.config import Experiment, TrainConfig, operational_fields, renamed, to_plain
from tftpu.config.mesh import AUTO
from tftpu.engines import backend, selection
from tftpu.errors import UserError, counted
from tftpu.launch import interrupts, startup
from tftpu.launch.diagnosis import quick
from tftpu.launch.diagnosis.machine import Machine
from tftpu.launch.preflight import mesh_choice
from tftpu.launch.run import another_run, recorded_start, result
from tftpu.launch.settings import config_flags, parsing
from tftpu.launch.settings.options import TIME, RunOptions, flag
from tftpu.runtime import goodput, slow
from tftpu.storage import files, locks, side_files

_LONG = 200  # characters; longer lists and flags are not quoted in messages
_MOST = 5  # largest number of fields that a message names
_GROUPS = ("model", "data", "optimizer")  # a run resumes only if these and its loss are unchanged


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


class _Difference(NamedTuple):
    """A field whose value in the config is not the one that the run began with.

    Attributes:
        place: the path of the field, such as "model.width".
        was: the value that the run began with, as in JSON; None if none was recorded.
        text: a description of the change, such as "was 8 and is 16".
    """

    place: str
    was: Any
    text: str


def run_training(options: Options, experiment: Experiment, callbacks: Sequence[Any] = ()) -> None:
    """Trains an experiment; with `options.restarts`, does so in a child process and then exits."""
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
        read = side_files.take if chief else side_files.read
        _check_same_run(experiment, workdir, read, options)
        if chief:
            recorded_start.warn_of_folder(workdir, experiment)
        said = _describe_end(workdir, experiment.train.steps) if chief else ""
        if said:
            print(said, flush=True)
        argv = [f"--config={options.config}", *options.overrides]
        experiment.cluster.mesh = mesh_choice.choose_mesh(experiment.cluster, argv)
        with slow.reporting_if_slow("Loading TensorFlow"):
            startup.import_tensorflow()
        from tftpu.launch.run import training

        training.train(experiment, workdir, callbacks=callbacks, flags=parsing.to_argv(options))


def load_experiment(options: Options) -> Experiment:
    """Loads the experiment of the options; a Ctrl-C meanwhile is recorded in a local workdir."""
    workdir = options.workdir or options.default_workdir
    if files.is_remote(workdir):  # a few seconds of loading are not worth requests to a bucket
        explained = recorded = contextlib.nullcontext()
    else:
        explained, recorded = explained_interruption(workdir), _recording_stop(workdir)
    with explained, recorded, slow.reporting_if_slow(f"Loading {options.config}"):
        return options.load_experiment()


@contextlib.contextmanager
def explained_interruption(workdir: str) -> Iterator[None]:
    """Adds a note to a Ctrl-C in the `with` block, with the step at which its command resumes."""
    try:
        yield
    except BaseException as error:
        if interrupts.was_interrupted(error):
            steps = manifest.list_steps(files.join(workdir, "checkpoints"))
            error.add_note(
                f"The same command resumes from step {steps[-1]:,}."
                if steps
                else "No step was saved: the same command starts the run from the beginning."
            )
        raise


@contextlib.contextmanager
def _recording_stop(workdir: str) -> Iterator[None]:
    """Records in the workdir if a Ctrl-C in the `with` block stops a run before it trains."""
    try:
        yield
    except BaseException as error:
        if interrupts.was_interrupted(error):
            # Another process may use the workdir, and this one may be unable to write there.
            with contextlib.suppress(UserError), locks.locked(workdir):
                goodput.record_stop(workdir)
        raise


def _supervise(options: Options, workdir: str) -> None:
    """Runs the command in a separate process, restarts it if it crashes, and exits."""
    from tftpu.launch.run import supervise

    again = parsing.to_argv(dataclasses.replace(options, restarts=0))
    command = startup.build_command(["train", *again])
    sys.exit(supervise.run(command, workdir, options.restarts))


def _format_length(train: TrainConfig) -> str:
    if train.steps is not None:
        return counted(train.steps, "step")
    return f"{counted(train.epochs or 0, 'epoch')} in steps"


def _check_same_run(
    experiment: Experiment,
    workdir: str,
    read: Callable[..., dict[str, Any] | None] = side_files.read,
    options: Options | None = None,
) -> None:
    """Raises `UserError` if the workdir holds checkpoints of a run with other settings.

    Args:
        experiment: the experiment to train.
        workdir: the workdir of the run.
        read: `side_files.read`, or `side_files.take` in a process that writes to the workdir.
        options: the options of the command, for the full command that the error suggests; None:
            it suggests none.
    """
    if not manifest.list_steps(files.join(workdir, "checkpoints")):
        return  # nothing to resume; for example, the run diverged at once
    before = read(files.join(workdir, "config.json"), **dict.fromkeys(_GROUPS, object))
    if before is None:  # without config.json, the checkpoint itself rejects another model
        return
    differing: dict[str, list[_Difference]] = {}
    for group in (*_GROUPS, "loss"):  # older runs recorded no loss in their configs
        now = getattr(experiment, group)
        recorded = _extract_fields(renamed.update_classes(before.get(group)))
        fields = _extract_fields(to_plain(now))
        defaults = _list_defaults(now) if dataclasses.is_dataclass(now) else {}
        # Fields that did not exist when the run began had their defaults.
        unset = defaults.keys() - recorded
        recorded = defaults | recorded
        for name in operational_fields(now) if dataclasses.is_dataclass(now) else ():
            recorded.pop(name, None)
            fields.pop(name, None)
        # Base weights are compared by a digest, not by their path.
        if group == "model" and experiment.model.lora:
            elsewhere = dict.fromkeys(experiment.model.base_fields, "")
            recorded, fields = recorded | elsewhere, fields | elsewhere
        if found := _list_differences(group, recorded, fields, unset):
            differing[group] = found
    if differing:
        raise _build_refusal(experiment, workdir, differing, options)


def _build_refusal(
    experiment: Experiment,
    workdir: str,
    by_group: Mapping[str, Sequence[_Difference]],
    options: Options | None,
) -> UserError:
    """Returns the error for a run that would resume with a changed config."""
    differing = [one for group in by_group.values() for one in group]
    shown = ", ".join(f"{d.place} {d.text}" for d in differing[:_MOST])
    shown += ", …" if differing[_MOST:] else ""
    flags = [_find_flag(experiment, one) for one in differing]
    change = "restore them"
    typed = options.overrides if options else ()
    data = by_group.get("data", ())
    from_file = data and not any(_sets(word, one.place) for word in typed for one in data)
    if from_file:
        change = "restore them (a config may read a field from a file, which has changed then)"
    new = another_run.suggest_run(
        experiment, workdir, with_weights=bool(from_file) and "model" not in by_group
    )
    has_ended = bool(_describe_end(workdir, experiment.train.steps))
    advice = (
        f"This run has ended: begin another one, such as {new}."
        if has_ended
        else "That changes what a run computes, so it resumes only with its first values: "
        f"{change}, or begin another run, such as {new}."
    )
    error = UserError(
        f"The workdir {workdir!r} holds a run with another {' and '.join(by_group)} configuration: "
        f"{shown}. {advice}"
    )
    if options and has_ended:  # with its old config, nothing would be left to train
        again = parsing.to_argv(dataclasses.replace(options, workdir=files.suggest_path(workdir)))
        error.add_note(f"Type: tftpu train {shlex.join(again)}")
    elif options and all(flags) and len(flags) <= _MOST:
        kept = [w for w in typed if not any(_sets(w, one.place) for one in differing)]
        again = parsing.to_argv(dataclasses.replace(options, overrides=(*kept, *flags)))
        error.add_note(f"Type: tftpu train {shlex.join(again)}")
    return error


def _find_flag(experiment: Experiment, difference: _Difference) -> str:
    """Returns the flag that sets a field to what it was; "" if none can, or it is too long."""
    was = difference.was
    text = ",".join(map(str, was)) if isinstance(was, list) else str(was)
    flag = f"--config.{difference.place}={text.lower() if isinstance(was, bool) else text}"
    with contextlib.suppress(UserError):
        if len(flag) < _LONG and to_plain(config_flags.parse_override(experiment, flag)) == was:
            return flag
    return ""


def _sets(override: str, place: str) -> bool:
    return override.startswith((f"--config.{place}=", f"--config.{place}."))


def _describe_end(workdir: str, steps: int | None) -> str:
    """Returns a message with the step at which a run ended, to print before TensorFlow loads.

    Args:
        workdir: the workdir of the run.
        steps: the requested number of steps; None: the length is given in epochs.

    Returns:
        "" if the run has not ended, has saved a later step since, or more steps are requested.
    """
    ended = result.read(workdir)
    newest = max(manifest.list_steps(files.join(workdir, "checkpoints")), default=0)
    if ended is None or ended["steps"] != newest or (steps or 0) > newest:
        return ""
    return f"This run ended at step {newest:,}; it resumes if the config asks for more steps."


def _extract_fields(plain: Any) -> dict[str, Any]:
    """Returns a config group's fields as JSON; "" names a Keras class or a value without fields."""
    if not isinstance(plain, dict) or "class" not in plain:
        return {"": plain}
    description = plain.get("description")
    # Keras numbers the names of its objects within a process, so names are not compared.
    if isinstance(description, dict):
        settings = description.get("config")
        settings = settings if isinstance(settings, dict) else {}
        settings = {name: value for name, value in settings.items() if name != "name"}
        return {"": description.get("class_name"), **settings}
    return plain


def _list_differences(
    group: str, before: dict[str, Any], now: dict[str, Any], unset: Collection[str]
) -> list[_Difference]:
    """Returns the fields whose values differ between a run and an experiment, nested ones too.

    Args:
        group: the path of the group that has the fields.
        before, now: the values of the run and of the experiment, by field name.
        unset: the fields that the run's config.json lacks; their value before is the default.
    """
    found: list[_Difference] = []
    for name in now | before:
        was, is_now = before.get(name), now.get(name)
        place = f"{group}.{name}".rstrip(".")
        if isinstance(was, dict) and isinstance(is_now, dict):
            found += _list_differences(place, was, is_now, ())
        elif was != is_now:
            text = _describe_change(was, is_now, name in unset)
            found.append(_Difference(place, was, text))
    return found


def _describe_change(was: Any, now: Any, is_default: bool) -> str:
    if not (isinstance(was, list) and isinstance(now, list)) or len(f"{was}{now}") < _LONG:
        return f"was {was!r}{' by default' if is_default else ''} and is {now!r}"
    same = [one == other for one, other in zip(was, now)]
    first = same.index(False) if False in same else len(same)
    return (
        f"had {len(was):,} values and has {len(now):,}, which differ from number {first + 1:,} on"
    )


def _list_defaults(config: Any) -> dict[str, Any]:
    """Returns the defaults of a dataclass's fields as JSON values, by field name."""
    fields = dataclasses.fields(config)
    return {f.name: to_plain(f.default) for f in fields if f.default is not dataclasses.MISSING}
