"""`tftpu configs`: what there is, one line each."""

from tftpu.launch import config_flags


def run() -> None:
    """Prints the name and the first line of every config."""
    names = config_flags.names()
    width = max(map(len, names))
    for name in names:
        print(f"{name:{width}}  {config_flags.summary(name)}")
