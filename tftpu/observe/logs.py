"""Warnings on the command line, in one format."""

import logging
import os
import sys
import warnings
from typing import TextIO

import tftpu

_format_as_python = warnings.formatwarning


def set_up() -> None:
    """Sends the warnings of all loggers to stderr, as "tftpu: warning: …".

    Lines of other packages begin with the name of the package. Warnings from `warnings.warn` in
    tftpu have the same format. Calling it again changes nothing.
    """
    warnings.formatwarning = _format_warning
    root = logging.getLogger()
    if not any(isinstance(handler, _Handler) for handler in root.handlers):
        root.addHandler(_Handler(logging.WARNING))


def _format_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    line: str | None = None,
) -> str:
    if filename.startswith(os.path.dirname(tftpu.__file__) + os.sep):
        return f"tftpu: warning: {message}\n"
    return _format_as_python(message, category, filename, lineno, line)


class _Formatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        name = record.name.partition(".")[0]
        name = "tftpu" if name == "root" else name
        text = f"{name}: {record.levelname.lower()}: {record.getMessage()}"
        return f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info else text


class _Handler(logging.StreamHandler[TextIO]):
    """A handler that writes to the current `sys.stderr`, because a live line replaces it."""

    def __init__(self, level: int):
        logging.Handler.__init__(self, level)
        self.setFormatter(_Formatter())

    @property
    def stream(self) -> TextIO:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The current standard error stream."""
        return sys.stderr
