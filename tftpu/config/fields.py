"""Fields of a config that affect how a run executes, but not its results.

Metadata mark such a field as operational. Comparisons of two configs ignore operational fields:
they may change when a run resumes or a search continues, and between machines that prepare data.

    log_every: int = dataclasses.field(default=50, metadata=OPERATIONAL)
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

OPERATIONAL: Mapping[str, Any] = {"tftpu_operational": True}


def operational_fields(config: Any) -> list[str]:
    """Returns the paths of the operational fields of a config, such as "train.log_every"."""
    found = []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if OPERATIONAL.items() <= field.metadata.items():
            found.append(field.name)
        elif dataclasses.is_dataclass(value):
            found += [f"{field.name}.{inner}" for inner in operational_fields(value)]
    return found
