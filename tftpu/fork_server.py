"""A server that imports TensorFlow and Keras once, and from which other processes fork.

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
    """Starts the fork server unless it is running; returns the context to create processes with.

    Args:
        modules: names of modules that the server imports after TensorFlow and Keras; a running
            server ignores them.
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
    thread can set signal handlers; other threads run the block without a change.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
