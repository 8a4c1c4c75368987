"""Conditions on metrics, such as the gate that a model must pass before it is used.

Steps of Kubeflow Pipelines copy the source of `find_unmet`, so it imports what it needs itself.
"""

from tftpu.config import DataConfig, Experiment, ModelConfig
from tftpu.errors import UserError, did_you_mean
from tftpu.models.keras_hub.config import KerasHub


def find_unmet(condition: str, metrics: dict[str, float | None]) -> list[str]:
    """Returns the reasons why metrics do not meet a condition; [] if they do.

    Args:
        condition: "METRIC>=NUMBER" or "METRIC<=NUMBER", or several of these with commas in between.
        metrics: the values of the metrics by name; None stands for a value that is not finite.

    Raises:
        ValueError: the condition has another form.
    """
    import re

    number = r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?|[+-]?inf"
    reasons = []
    for part in condition.split(","):
        found = re.fullmatch(rf"\s*([^<>=\s]+)\s*(>=|<=)\s*({number})\s*", part)
        if not found:
            raise ValueError(f"{part!r} is not METRIC>=NUMBER or METRIC<=NUMBER")
        name, sign, bound = found[1], found[2], float(found[3])
        if name not in metrics:
            reasons.append(f"there is no metric {name}, only {', '.join(metrics)}")
            continue
        value = metrics[name]
        if value is None:
            reasons.append(f"{name} is not a finite number")
        elif sign == ">=" and not value >= bound:
            reasons.append(f"{name} is {value:g}, less than {bound:g}")
        elif sign == "<=" and not value <= bound:
            reasons.append(f"{name} is {value:g}, more than {bound:g}")
    return reasons


def check(flag: str, condition: str, experiment: Experiment) -> None:
    """Raises `UserError` for a condition that cannot be parsed or that names an unknown metric.

    Args:
        flag: the flag that gives the condition, for the error.
        condition: see `find_unmet`.
        experiment: the experiment whose evaluation computes the metrics.
    """
    check_form(flag, condition)
    for part in condition.split(","):
        check_metric(flag, part.partition("=")[0].rstrip("<> ").strip(), experiment)


def check_form(flag: str, condition: str) -> None:
    """Raises `UserError` for a condition that cannot be parsed."""
    try:
        find_unmet(condition, {})
    except ValueError as error:
        raise UserError(
            f"{flag}={condition}: {error}. Write, for example, {flag}='accuracy>=0.95', in quotes."
        ) from error


def check_metric(flag: str, metric: str, experiment: Experiment) -> None:
    """Raises `UserError` for a metric that the evaluation of a config does not compute.

    The names of a config's own metrics are only known after its model is built, so they are not
    checked.
    """
    data = type(experiment.data)
    if data.evaluation is DataConfig.evaluation:
        raise UserError(
            f"{flag} needs evaluation data, but {data.__name__} has none: add a method "
            "evaluation(self, context)."
        )
    given = (experiment.loss, experiment.metrics, experiment.weighted_metrics)
    own = any(one not in (None, (), []) for one in given)
    own = own or (isinstance(experiment.model, KerasHub) and bool(experiment.model.task))
    if own or type(experiment.model).objectives is not ModelConfig.objectives:
        return
    known = ["loss", "accuracy", *(["bits_per_token"] if experiment.data.per_token else [])]
    if metric not in known:
        raise UserError(
            f"{flag}={metric}: the evaluation of {data.__name__} has only "
            f"{', '.join(known)}.{did_you_mean(metric, known)}"
        )
