"""JAX's profiler, as a `tftpu.engines.engine.Tracer`."""

import contextlib
from typing import Any

import jax


class JaxTracer:
    """A tracer for TensorBoard that uses `jax.profiler`; see `tftpu.engines.engine.Tracer`."""

    def start(self, logdir: str) -> bool:
        """Starts a trace; returns False if another one is running in this process."""
        try:
            jax.profiler.start_trace(logdir)
        except RuntimeError:
            return False
        return True

    def stop(self) -> None:
        """Ends the trace and writes it. Raises `OSError` if it cannot be written."""
        try:
            jax.profiler.stop_trace()
        except RuntimeError as error:
            raise OSError(str(error)) from error

    def marker(self, step: int) -> contextlib.AbstractContextManager[Any]:
        """Returns a context that marks a step in the trace."""
        return jax.profiler.StepTraceAnnotation("train", step_num=step)

    def note(self, name: str, **numbers: int) -> None:
        """Writes an event with a name and integer values into the trace."""
        with jax.profiler.TraceAnnotation(name, **numbers):
            pass
