"""`tftpu train`: from a config to a trained model, and the closing block."""

import contextlib
import dataclasses
import sys
from typing import Any

from tftpu.config import Experiment, from_json, to_json
from tftpu.errors import UserError
from tftpu.runtime import goodput, hosts
from tftpu.runtime.preemption import exit_on_notice
from tftpu.storage import files

# Of the data: how they are read, not which.
_HOW = ("service", "cache_dir", "cache_gb", "download", "max_bad_records")


def run(
    experiment: Experiment,
    config: str,
    workdir: str | None,
    tpu: str,
    virtual_devices: int | None,
    watchdog: float | None = None,
) -> None:
    """Trains, or goes on where the workdir's last checkpoint is."""
    workdir = workdir or default_workdir(config)
    claimed = files.claim(workdir) if hosts.task().chief else contextlib.nullcontext()
    with exit_on_notice(), claimed:
        _check_same_run(experiment, workdir)
        _train(experiment, config, workdir, watchdog)


def default_workdir(config: str) -> str:
    """Where a run of a config lives if no workdir is given."""
    return files.join("runs", config)


def _train(experiment: Experiment, config: str, workdir: str, watchdog: float | None) -> None:
    import tftpu
    from tftpu import input_pipelines
    from tftpu.launch import experiment as build

    experiment.train.watchdog_seconds = watchdog
    engine = tftpu.connect(experiment.cluster.tpu, experiment.cluster.virtual_devices)
    experiment.validate(engine.data_shares)
    precision = tftpu.set_precision(experiment.train.precision)
    chief = hosts.task().chief
    print(
        f"tftpu train {config}: {engine.data_shares} replica(s), {precision}, "
        f"{experiment.train.steps} steps of {experiment.data.global_batch_size} examples, in {workdir}",
        flush=True,
    )
    data = build.training_data(experiment)
    test = input_pipelines.evaluation(experiment.data)
    with engine.scope():
        trainer = build.build_trainer(experiment, workdir)
        loaded = build.initialise(experiment, trainer)
    clock = trainer.account.clock
    clock.started_earlier(goodput.process_age() - clock.wall())
    if loaded:
        print(loaded, flush=True)
    # Only now: a run that was refused must not claim the workdir for its configuration.
    if chief:
        files.write_whole(files.join(workdir, "config.json"), to_json(experiment).encode())
    history = trainer.fit(
        data,
        experiment.train.steps,
        validation_data=test,
        eval_every=experiment.train.eval_every or None,
    )
    results = {
        name.removeprefix("val_"): values[-1]
        for name, values in sorted(history.history.items(), key=lambda item: item[0] != "val_loss")
        if name.startswith("val_")
    }
    if chief:
        _closing_block(experiment, trainer, results, workdir)


def _check_same_run(experiment: Experiment, workdir: str) -> None:
    """A workdir belongs to one model on one data set; the rest may change between restarts."""
    path = files.join(workdir, "config.json")
    if not files.exists(path):
        return
    before = from_json(files.read(path).decode())
    for group in ("model", "data", "optimizer"):
        if _what(getattr(before, group)) != _what(getattr(experiment, group)):
            raise UserError(
                f"The workdir {workdir!r} holds a run with another {group} configuration. Give "
                "this one a workdir of its own with --workdir=DIR, or remove that one."
            )


def _what(config: Any) -> tuple:
    """A group of an experiment, without the fields that change no number of the run."""
    fields = dataclasses.asdict(config)
    return type(config), {name: value for name, value in fields.items() if name not in _HOW}


def _closing_block(experiment: Experiment, trainer, results: dict, workdir: str) -> None:
    from tftpu.launch import sample
    from tftpu.launch.commands import preflight
    from tftpu.observe.writers import format_number

    text = sample.of(experiment, trainer)
    if text:
        print(f"\nA sample of what it writes:\n{text}")
    numbers = "  ".join(f"{name} {value:.4f}" for name, value in results.items())
    steps = trainer.step
    print(f"\nDone: {steps} steps.")
    print(f"  test        {numbers}")
    rate = trainer.account.clock.rate()
    if rate:
        print(f"  speed       {format_number(rate)} examples/s, without compiling and evaluation")
    predicted = preflight.prediction(workdir, trainer.engine.data_shares)
    if rate and predicted:
        measured = 1e3 * experiment.data.global_batch_size / rate
        print(f"  step        {format_number(measured)} ms; preflight predicted {predicted}")
    print(f"  run         {workdir}  ({trainer.account.clock.wall():.0f} s)")
    usd = trainer.account.facts.usd
    if usd is not None:
        print(f"  cost        ${usd:,.2f} at list price, on demand")
    restarts = trainer.account.restarts
    over = f", over {restarts + 1} starts" if restarts else ""
    for index, row in enumerate(goodput.table(trainer.account.seconds())):
        print(f"  {f'time{over}' if index == 0 else '':12}{row}")
    print(f"  try next    tensorboard --logdir={workdir}")
    print(f"              tftpu evaluate --workdir={workdir}")
    sys.stdout.flush()
