"""The summary that `tftpu train` prints at the end."""

import importlib.util
import math
import shlex

from tftpu.amounts import format_duration, format_metric, format_price
from tftpu.config import DataConfig, Experiment
from tftpu.errors import UserError
from tftpu.input_pipelines.formats import manifest
from tftpu.input_pipelines.sources import Images, StreamedImages
from tftpu.launch.preflight import reports
from tftpu.launch.run import result, sample
from tftpu.models.keras_hub.config import KerasHub
from tftpu.models.sizes import GPT, Llama
from tftpu.observe import writers
from tftpu.runtime import goodput
from tftpu.storage import files, lines
from tftpu.training.trainer import Trainer

_LARGE = 0.25  # share of evaluation in the run's time above which advice is printed
_SMALL = 0.1  # share of evaluation in the run's time that the advice aims at
_FEW = 4  # least number of evaluations that the advice leaves, to choose a checkpoint from


def format_summary(
    experiment: Experiment, trainer: Trainer, results: dict[str, float], workdir: str
) -> str:
    """Returns the summary of a run.

    Args:
        experiment: the experiment of the run.
        trainer: the trainer after `fit`.
        results: the metrics of the last evaluation; empty without one.
        workdir: folder of the run.
    """
    text = sample.draw_text(experiment, trainer)
    above = [f"\nA sample of what it writes:\n{text}"] if text else []
    above.append(f"\nDone: {trainer.step:,} steps.")
    rows = _list_evaluation_rows(trainer.step, results, workdir)
    if results:
        said = describe_same_split(experiment.data), _describe_few(experiment.data)
        rows += [("", text) for text in said if text]
    rows += _list_speed_rows(experiment, trainer, workdir)
    rows.append(("run", workdir))
    usd = trainer.account.facts.usd
    if usd is not None:
        rows.append(("cost", f"{format_price(usd)} at list price, on demand"))
    over = " in total" if trainer.account.continues else ""
    for index, row in enumerate(goodput.format_table(trainer.account.sum_seconds())):
        rows.append((f"time{over}" if index == 0 else "", row))
    prompt = f"--prompt='{sample.PROMPT}'" if text else sample.suggest_flags(experiment, trainer)
    for index, command in enumerate(
        _list_next_commands(experiment, workdir, prompt, bool(results))
    ):
        rows.append(("" if index else "try next", command))
    width = max(12, *(len(name) + 2 for name, _ in rows))
    return "\n".join([*above, *(f"  {name:{width}}{value}" for name, value in rows)])


def _list_evaluation_rows(
    step: int, results: dict[str, float], workdir: str
) -> list[tuple[str, str]]:
    """Returns rows (name, text) for the last evaluation and the best checkpoint, if any."""
    numbers = "  ".join(f"{name} {value:.4f}" for name, value in results.items())
    rows = [("eval, last", f"step {step:,}  {numbers}")] if results else []
    best = result.read_best(workdir)
    if best:
        known = _read_evaluation(workdir, best.step) | {best.metric: best.value}
        text = "  ".join(f"{name} {value:.4f}" for name, value in known.items())
        others = [name for name in results if name != "loss"] if best.metric == "loss" else []
        change = f"; to choose by {others[0]}, train with " if others else ""
        change += f"--config.train.best_metric={others[0]}" if others else ""
        place = f"by {best.metric}, in checkpoints/{best.step}{change}"
        rows.append(("eval, best", f"step {best.step:,}  {text}  ({place})"))
    return rows


def describe_same_split(data: DataConfig) -> str:
    """Returns a warning if the evaluation split is also the training split; otherwise ""."""
    trained, evaluated = (getattr(data, name, None) for name in ("train_split", "eval_split"))
    if not trained or trained != evaluated:
        return ""
    return (
        f"{trained} is both trained and evaluated on, which does not show how good the model is on "
        "other examples: set --config.data.train_split or --config.data.eval_split"
    )


def _describe_few(data: DataConfig) -> str:
    """Returns a warning if few evaluation images make the accuracy coarse; otherwise ""."""
    if not isinstance(data, StreamedImages):
        return ""
    from tftpu.input_pipelines.datasets import image_survey

    try:
        return image_survey.describe_few(data.eval_split, image_survey.count_evaluation(data))
    except (UserError, OSError):  # the data may have been removed since training
        return ""


def _read_evaluation(workdir: str, step: int) -> dict[str, float]:
    """Returns the metrics of the evaluation at a step from `metrics.jsonl`; {} if there is none."""
    found: dict[str, float] = {}
    for at, split, numbers in lines.read(files.join(workdir, "metrics.jsonl")):
        if (at, split) == (step, "eval"):
            found = numbers
    return {name: value for name, value in found.items() if name not in writers.CURVES_ONLY}


def _list_next_commands(
    experiment: Experiment, workdir: str, prompt: str, evaluates: bool
) -> list[str]:
    """Returns the commands that are suggested after a run, at most four.

    They plot its curves, show its predictions or text, serve it, and export it.

    Args:
        experiment: the config of the run.
        workdir: folder of the run.
        prompt: flags of `tftpu generate`; "" for a model that writes no text.
        evaluates: whether the data have an evaluation split, whose records can be predicted.
    """
    run = shlex.quote(workdir)
    curves = shlex.quote(files.join(workdir, "curves.png"))  # an older curves.png is replaced
    draws = importlib.util.find_spec("matplotlib")
    found = [f"tftpu plot {run} --output={curves}" if draws else f"tensorboard --logdir={run}"]
    if prompt:
        found.append(f"tftpu generate {run} {prompt}")
    elif evaluates:
        output = _choose_output(workdir, "predicted")
        fields = _list_kept_fields(experiment.data)
        keep = f" --keep={shlex.quote(','.join(fields))}" if fields else ""
        found.append(f"tftpu predict {run} --input=evaluation{keep} --output={output}")
    if importlib.util.find_spec("starlette"):
        found.append(f"tftpu serve {run}")
    if isinstance(experiment.model, KerasHub):
        output = _choose_output(workdir, "preset")
        return [*found, f"tftpu export {run} --format=preset --output={output}"]
    if experiment.model.lora and isinstance(experiment.model, GPT | Llama):
        output = _choose_output(workdir, "adapters")
        return [*found, f"tftpu export-weights {run} --adapters --output={output}"]
    return [*found, f"tftpu export {run} --output={_choose_output(workdir, 'exported')}"]


def _list_kept_fields(data: DataConfig) -> list[str]:
    """Returns the fields of evaluation images to show beside predictions; [] for other data."""
    files_of_images = isinstance(data, StreamedImages) and data.format in ("folder", "index")
    if isinstance(data, Images) or files_of_images:
        return ["label"]
    if not isinstance(data, StreamedImages) or data.format != "tfrecord":
        return []
    from tftpu import input_pipelines

    try:
        known = input_pipelines.prediction(data, "evaluation").names
    except UserError:  # the data may have been removed since training
        return []
    return [name for name in (data.label_feature, manifest.SOURCE) if name in known]


def _choose_output(workdir: str, name: str) -> str:
    """Returns an unused path in a run's folder for a command's output, quoted for the shell."""
    path = files.join(workdir, name)
    return shlex.quote(files.suggest_path(path) if files.exists(path) else path)


def _list_speed_rows(
    experiment: Experiment, trainer: Trainer, workdir: str
) -> list[tuple[str, str]]:
    rate = trainer.account.clock.compute_rate()
    if not rate:  # nothing was left to train
        return []
    rows = [("speed", f"{format_metric(rate)} examples/s in training, after the first steps")]
    seconds = trainer.account.sum_seconds()
    waited = seconds["input_wait"]
    training = waited + seconds["step"]
    whole = trainer.step * experiment.data.global_batch_size / training if training else rate
    if waited > training / 2 and whole < rate:  # unlike `rate`, `whole` counts the first steps
        rows.append(
            ("", f"{format_metric(whole)} examples/s with the first steps, which waited for input")
        )
    share, every = goodput.compute_share(seconds, "evaluation"), experiment.train.eval_every
    if share > _LARGE and every > 0:
        fewer = share / (1 - share) * (1 - _SMALL) / _SMALL
        longer = _divide_evenly(trainer.step, every, fewer * every)
        if longer > every:
            flag = f"--config.train.eval_every={longer}"
            less = f"{flag} evaluates less often, so there are fewer checkpoints to choose from"
            rows.append(("", f"evaluation took {share:.0%} of the run: {less}"))
    predicted = reports.read_step_times(workdir, trainer.engine.data_shards)
    if predicted:
        measured = format_duration(experiment.data.global_batch_size / rate)
        rows.append(("step", f"{measured}; preflight predicted {predicted}"))
    return rows


def _divide_evenly(steps: int, every: int, least: float) -> int:
    """Returns an interval between evaluations, in steps, that divides the run evenly.

    Args:
        steps: the steps of the run.
        every: the present interval in steps, such as an epoch. The result is a multiple of it.
        least: the shortest interval to advise, in steps, unless it leaves fewer than `_FEW`
            evaluations.
    """
    parts = max(_FEW, int(steps / least))
    longer = math.ceil(steps / parts / every) * every
    return longer if math.ceil(steps / longer) >= _FEW else max(every, longer - every)
