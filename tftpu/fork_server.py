"""A process from which others fork, after it has imported what all of them need.

The import of TensorFlow takes longer than many small programs run. The server imports modules but
does not start TensorFlow, whose threads a fork would not copy.
"""

import contextlib
import multiprocessing
import signal
import threading
from collections.abc import Iterator, Sequence
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext


def start(modules: Sequence[str]) -> ForkServerContext:
    """Starts the server of this process, unless it runs already; returns the context to fork from.

    Args:
        modules: the modules that the server imports after TensorFlow and Keras; one that runs
            already keeps its own.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tftpu.fork_preload", *modules])
    with _interrupts_ignored():
        forkserver.ensure_running()
    return context


@contextlib.contextmanager
def _interrupts_ignored() -> Iterator[None]:
    """Ignores Ctrl-C within the block; a process that is started in it keeps ignoring it.

    Ctrl-C in a terminal also reaches the server, and would end it while it imports. Only the main
    thread can set what a signal does.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
