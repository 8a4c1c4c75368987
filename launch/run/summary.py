"""The summary that `tftpu train` prints at the end."""

from tftpu.amounts import format_clock, format_duration, format_metric, format_price
from tftpu.config import Experiment
from tftpu.launch.preflight import reports
from tftpu.launch.run import result, sample
from tftpu.runtime import goodput
from tftpu.training.trainer import Trainer


def format_summary(
    experiment: Experiment, trainer: Trainer, results: dict[str, float], workdir: str
) -> str:
    """Returns the summary of a run.

    Args:
        experiment: the experiment of the run.
        trainer: the trainer after `fit`.
        results: the metrics of the last evaluation.
        workdir: folder of the run.
    """
    text = sample.draw_text(experiment, trainer)
    lines = [f"\nA sample of what it writes:\n{text}"] if text else []
    lines.append(f"\nDone: {trainer.step:,} steps.")
    rows = _list_evaluation_rows(trainer.step, results, workdir)
    rows += _list_speed_rows(experiment, trainer, workdir)
    rows.append(("run", f"{workdir}  ({format_clock(trainer.account.clock.measure_wall())})"))
    usd = trainer.account.facts.usd
    if usd is not None:
        rows.append(("cost", f"{format_price(usd)} at list price, on demand"))
    restarts = trainer.account.restarts
    over = f", {restarts + 1} starts" if restarts else ""
    for index, row in enumerate(goodput.format_table(trainer.account.sum_seconds())):
        rows.append((f"time{over}" if index == 0 else "", row))
    rows.append(("try next", f"tensorboard --logdir={workdir}"))
    rows.append(("", f"tftpu evaluate {workdir}"))
    prompt = f"--prompt='{sample.PROMPT}'" if text else sample.suggest_flags(experiment, trainer)
    if prompt:
        rows.append(("", f"tftpu generate {workdir} {prompt}"))
    width = max(12, *(len(name) + 2 for name, _ in rows))
    return "\n".join([*lines, *(f"  {name:{width}}{value}" for name, value in rows)])


def _list_evaluation_rows(
    step: int, results: dict[str, float], workdir: str
) -> list[tuple[str, str]]:
    """Returns rows for the last evaluation and for the checkpoint marked best."""
    numbers = "  ".join(f"{name} {value:.4f}" for name, value in results.items())
    rows = [("eval, last", f"step {step:,}  {numbers}")]
    best = result.read_best(workdir)
    if best:
        text = f"step {best.step:,}  {best.metric} {best.value:.4f}"
        rows.append(("eval, best", f"{text}  (checkpoints/{best.step})"))
    return rows


def _list_speed_rows(
    experiment: Experiment, trainer: Trainer, workdir: str
) -> list[tuple[str, str]]:
    rate = trainer.account.clock.compute_rate()
    if not rate:
        return []
    text = f"{format_metric(rate)} examples/s, without compiling and evaluation"
    rows = [("speed", text)]
    predicted = reports.read_step_times(workdir, trainer.engine.data_shards)
    if predicted:
        measured = format_duration(experiment.data.global_batch_size / rate)
        rows.append(("step", f"{measured}; preflight predicted {predicted}"))
    return rows
