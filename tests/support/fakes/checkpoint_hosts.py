"""Hosts that write one checkpoint together, as threads that share a store in memory."""

import types
from collections.abc import Callable
from pathlib import Path

import numpy as np

from tests.support.fakes.host_texts import Texts
from tftpu.checkpoint.store import Best, Checkpoints
from tftpu.engines.jax.processes.hosts import StoreExchange
from tftpu.engines.leaf import Leaf

COUNT = 3
SHAPE = (6, 4)


class Host:
    """A host that holds two rows of a kernel, and with the others a replicated bias."""

    def __init__(self, workdir: str | Path, index: int, store: Texts, value: float = 0.0):
        rows = ((2 * index, 2 * index + 2), (0, SHAPE[1]))
        whole = ((0, 3),)
        self.kernel = np.full((2, 4), value + index, np.float32)
        self.bias = np.full(3, value, np.float32)

        def set_kernel(values):
            self.kernel = values[rows]

        def set_bias(values):
            self.bias = values[whole]

        kernel = Leaf(
            "kernel", SHAPE, "float32", (rows,), (rows,), lambda _: self.kernel, set_kernel
        )
        written = (whole,) if index == 0 else ()
        bias = Leaf("bias", (3,), "float32", (whole,), written, lambda _: self.bias, set_bias)
        self.leaves = {"model": [kernel], "ema": [bias]}
        place = types.SimpleNamespace(store=store, index=index, count=COUNT)
        hosts = types.SimpleNamespace(exchange=StoreExchange(place), index=index)
        self.checkpoints = Checkpoints(str(workdir), hosts=hosts)


def hosts_of(workdir: str | Path, value: float = 0.0) -> list[Host]:
    """Returns hosts whose values begin at a number, for a workdir that all see."""
    store = Texts()
    return [Host(workdir, index, store, value) for index in range(COUNT)]


def save(
    hosts: list[Host], step: int, best: Best | None = None, first: Callable = lambda: None
) -> list[str | None]:
    """Saves on all hosts; returns why it failed on each, None where it did not."""
    for host in hosts:
        host.checkpoints.save(step, host.leaves, {"step": step}, best, first)
    for host in hosts:
        host.checkpoints.wait()
    failures = [host.checkpoints.take_failure() for host in hosts]
    return [failure.reason if failure else None for failure in failures]
