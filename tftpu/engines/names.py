"""Names of variables, without Keras's automatic counters."""

import re


def remove_counters(name: str) -> str:
    """Returns a variable's name without Keras's automatic counters: "dense_7" becomes "dense"."""
    return re.sub(r"_\d+(?=_|/|:|$)", "", name)
