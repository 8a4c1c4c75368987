"""The kind of device that the code being traced is meant for.

A program for a TPU may be traced on a machine without one: preflight does so. Layers with a kernel
for one kind of device query this module, not the machine or a distribution strategy.

    with target.compiling_for("tpu"):
        ...  # trace
"""

import contextlib
import contextvars
from collections.abc import Iterator

_PLATFORM: contextvars.ContextVar[str | None] = contextvars.ContextVar("platform", default=None)


@contextlib.contextmanager
def compiling_for(platform: str | None) -> Iterator[None]:
    """Sets what `platform` returns while the block runs, in this thread only.

    Args:
        platform: "tpu", "gpu" or "cpu"; None: unknown.
    """
    token = _PLATFORM.set(platform)
    try:
        yield
    finally:
        _PLATFORM.reset(token)


def platform() -> str | None:
    """Returns the platform that is being traced for; None if nobody has set one."""
    return _PLATFORM.get()
