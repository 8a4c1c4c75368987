"""Warnings on the command line, in one format."""

import logging
import sys
from typing import TextIO


def set_up() -> None:
    """Sends the warnings of all loggers to stderr, as "tftpu: warning: …".

    Those of other packages carry their own name. Calling it again changes nothing.
    """
    root = logging.getLogger()
    if not any(isinstance(handler, _Handler) for handler in root.handlers):
        root.addHandler(_Handler(logging.WARNING))


class _Formatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        name = record.name.partition(".")[0]
        name = "tftpu" if name == "root" else name
        text = f"{name}: {record.levelname.lower()}: {record.getMessage()}"
        return f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info else text


class _Handler(logging.StreamHandler[TextIO]):
    """A handler that writes to the current `sys.stderr`, which a live line replaces."""

    def __init__(self, level: int):
        logging.Handler.__init__(self, level)
        self.setFormatter(_Formatter())

    @property
    def stream(self) -> TextIO:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The current standard error stream."""
        return sys.stderr
