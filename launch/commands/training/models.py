"""Lists the models of the zoo, with their parameters and the size of their weights.

The sizes are those of float32 weights. A config chooses a model by name: tftpu.models.config(NAME).

    tftpu models
"""

import dataclasses

from tftpu import models
from tftpu.amounts import format_size


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """No options."""


def run(options: Options) -> None:
    """Prints the name, the family, the parameters and the size of each model."""
    del options
    width = max(map(len, models.names()))
    for name in models.names():
        count = models.parameters(name)
        family = type(models.config(name)).__name__
        print(f"{name:{width}}  {family:14}  {count:>13,} parameters  {format_size(4 * count):>9}")
