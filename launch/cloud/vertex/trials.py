"""The trials of a hyper-parameter tuning job of Vertex AI: their results, and the best ones."""

import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tftpu.errors import UserError, counted
from tftpu.launch.settings.parsing import OVERRIDE

if TYPE_CHECKING:
    from google.cloud.aiplatform_v1 import HyperparameterTuningJob, Trial

CONFIG = "TFTPU_CONFIG"  # environment variable with the name of the config, read by `report`
_ROWS = 5  # maximum number of trials shown, the best first
_ENDED = ("SUCCEEDED", "INFEASIBLE")
# The command that trains the best trial again omits this flag, which only the search needs.
_WRITERS = f"--{OVERRIDE}train.writers="


def format_ended(job: "HyperparameterTuningJob") -> dict[str, str]:
    """Returns a line of text for each trial that has ended, by the trial's number as a string."""
    return {trial.id: _format_row(trial) for trial in job.trials if trial.state.name in _ENDED}


def report(job: "HyperparameterTuningJob") -> str:
    """Returns a text with the best trials, and the command that trains the best one again.

    Args:
        job: the job as the service describes it.

    Raises:
        UserError: the job was not started by `tftpu launch vertex-search`.
    """
    done = [trial for trial in job.trials if trial.final_measurement.metrics]
    if not done:
        return "\nNo trial has a result."
    lines = [f"\n{counted(len(done), 'trial')} of {job.max_trial_count} with a result:"]
    lowest = job.study_spec.metrics[0].goal.name == "MINIMIZE"
    done.sort(key=lambda trial: trial.final_measurement.metrics[0].value, reverse=not lowest)
    lines += [_format_row(trial) for trial in done[:_ROWS]]
    container = job.trial_job_spec.worker_pool_specs[0].container_spec
    configs = [one.value for one in container.env if one.name == CONFIG]
    if not configs:
        raise UserError(f"{job.name} is not a search that `tftpu launch vertex-search` started.")
    overrides = [*_select_overrides(container.args), *list_overrides(done[0])]
    lines.append("\nThe best one again:")
    lines.append(f"  {shlex.join(['tftpu', 'train', f'--config={configs[0]}', *overrides])}")
    return "\n".join(lines)


def list_overrides(trial: "Trial") -> list[str]:
    """Returns the parameters of a trial as arguments of a command line."""
    return [f"--{one.parameter_id}={_format_value(one.value)}" for one in trial.parameters]


def _select_overrides(arguments: Sequence[str]) -> list[str]:
    """Returns the overrides among the arguments that all trials share, except `train.writers`."""
    overrides = [text for text in arguments if text.startswith(f"--{OVERRIDE}")]
    return [text for text in overrides if not text.startswith(_WRITERS)]


def _format_value(value: Any) -> str:
    """Returns the text of a parameter's value, which is a string or a float."""
    if isinstance(value, str):
        return value
    return str(int(value)) if float(value).is_integer() else repr(float(value))


def _format_row(trial: "Trial") -> str:
    metrics = trial.final_measurement.metrics
    found = f"{metrics[0].metric_id} {metrics[0].value:.4f}" if metrics else "no result"
    shown = "  ".join(word.removeprefix(f"--{OVERRIDE}") for word in list_overrides(trial))
    return f"  trial {trial.id:<4} {found}  {shown}"
