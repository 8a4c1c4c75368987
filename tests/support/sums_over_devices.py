"""The collectives by which a compiled program adds up arrays over devices."""

import re


def sums(text: str) -> list[tuple[str, str]]:
    """Returns the kind and the shape of each, from the HLO text of a program for TPUs.

    The kind is "all-reduce", "reduce-scatter", or "fused all-reduce-scatter", in which each device
    keeps one part of the sum as well.
    """
    found, fused = [], False
    for line in text.splitlines():
        if line.endswith("{"):
            fused = line.lstrip().startswith("%all-reduce-scatter")
        match = re.search(r" = \(?(\w+\[[\d,]*\]).* (all-reduce|reduce-scatter)(-start)?\(", line)
        if match:
            found.append(("fused all-reduce-scatter" if fused else match[2], match[1]))
    return found
