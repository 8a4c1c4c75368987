"""The platform that code is being traced for, which may not be the one that traces it.

Preflight traces for a TPU on a machine without one. An engine says in this context what it traces
for; kernels ask.
"""

import contextlib
import contextvars
from collections.abc import Iterator

_PLATFORM: contextvars.ContextVar[str | None] = contextvars.ContextVar("platform", default=None)


@contextlib.contextmanager
def compiling_for(platform: str | None) -> Iterator[None]:
    """Makes `platform` return the given one inside the block.

    Args:
        platform: "tpu", or None for any other.
    """
    token = _PLATFORM.set(platform)
    try:
        yield
    finally:
        _PLATFORM.reset(token)


def platform() -> str | None:
    """Returns "tpu" where a program for a TPU is being traced, else None."""
    return _PLATFORM.get()
