"""The result of one check of data."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        level: "ok", "warning" or "error".
        text: one line, or several that also name files.
    """

    level: str
    text: str
