"""Lists the models of the zoo, with their parameters and the size of their weights.

The sizes are those of float32 weights. A config chooses a model by its name and may give fields
other values: tftpu.models.config("llama_8b", layers=16). With a NAME, its fields are listed.

    tftpu models
    tftpu models llama_8b
"""

import dataclasses

from tftpu import models
from tftpu.amounts import format_size
from tftpu.launch.settings.options import flag


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The model whose fields are listed; without one, all models are listed."""

    name: str | None = flag(None, "list the fields of this model", metavar="NAME", word=True)


def run(options: Options) -> None:
    """Prints name, family, parameters and size of each model, or the fields of one model.

    Raises:
        UserError: the zoo has no model of that name.
    """
    if options.name is None:
        _print_models()
    else:
        _print_fields(options.name)


def _print_models() -> None:
    width = max(map(len, models.names()))
    for name in models.names():
        count = models.parameters(name)
        family = type(models.config(name)).__name__
        print(f"{name:{width}}  {family:14}  {count:>13,} parameters  {format_size(4 * count):>9}")


def _print_fields(name: str) -> None:
    fields = dataclasses.asdict(models.config(name))
    width = max(map(len, fields))
    for field, value in fields.items():
        print(f"{field:{width}}  {value!r}")
