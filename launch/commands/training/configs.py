"""Lists the configs that come with tftpu.

tftpu configs
"""

import dataclasses

from tftpu.launch.settings import config_flags


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """No options."""


def run(options: Options) -> None:
    """Prints the name and the summary of every config."""
    del options
    names = config_flags.list_names()
    width = max(map(len, names))
    for name in names:
        print(f"{name:{width}}  {config_flags.read_summary(name)}")
