"""The direction of metrics."""

# Metrics for which lower is better, by a part of their name.
_SMALLER_IS_BETTER = (
    *("loss", "error", "perplexity", "bits", "entropy", "mse", "mae", "mape", "msle"),
    *("divergence", "hinge", "poisson", "logcosh", "false_"),
)


def smaller_is_better(metric: str) -> bool:
    """Returns whether lower values of a metric are better, by its name."""
    return any(part in metric for part in _SMALLER_IS_BETTER)
