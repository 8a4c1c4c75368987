"""`tftpu configs`: what there is, one line each."""

from tftpu.launch import config_flags


def run() -> None:
    """Prints the name and the first line of every config."""
    for name in config_flags.names():
        print(f"{name:18}{config_flags.summary(name)}")
