"""Names of variables, without what Keras counts up within a process."""

import re


def without_counters(name: str) -> str:
    """Returns a variable's name without Keras's automatic counters: "dense_7" becomes "dense"."""
    return re.sub(r"_\d+(?=_|/|:|$)", "", name)
