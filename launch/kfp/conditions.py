"""The condition of the gate, without Kubeflow Pipelines: steps copy its source."""


def unmet(condition: str, metrics: dict[str, float | None]) -> list[str]:
    """Returns why metrics do not meet a condition; nothing if they do.

    Args:
        condition: "METRIC>=NUMBER" or "METRIC<=NUMBER"; several with commas in between.
        metrics: values by name; None is one that is not finite.

    Raises:
        ValueError: the condition is not of that form.
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
