"""Fields of a config that affect how a run executes, but not its results.

A field declares it by its metadata, and every comparison of two configs leaves such fields out: a
run resumes, a search continues, and another machine prepares the data, whatever their values are.

    log_every: int = dataclasses.field(default=50, metadata=OPERATIONAL)
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

OPERATIONAL: Mapping[str, Any] = {"tftpu_operational": True}


def operational_fields(config: Any) -> list[str]:
    """Returns the paths of such fields of a dataclass and of those in it, as "train.log_every"."""
    found = []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if OPERATIONAL.items() <= field.metadata.items():
            found.append(field.name)
        elif dataclasses.is_dataclass(value):
            found += [f"{field.name}.{inner}" for inner in operational_fields(value)]
    return found
