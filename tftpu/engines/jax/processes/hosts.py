"""The processes of the JAX engine, one on each host."""

import collections
import contextlib
from typing import Any

import numpy as np
from jax.experimental import multihost_utils

from tftpu.engines.jax.processes.watch import Watch


class OneHost:
    """The only process of a run; see `tftpu.engines.engine.Hosts`."""

    index = 0
    count = 1
    chief = True
    exchange = None

    def any(self, *flags: bool) -> list[bool]:
        """Returns the flags of the only host unchanged."""
        return list(flags)

    def from_chief(self, step: int | None) -> int | None:
        """Returns the step unchanged, because the only host is the chief."""
        return step

    def together(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context without effect."""
        return contextlib.nullcontext()


class JaxHosts:
    """The processes of a run on several hosts; see `tftpu.engines.engine.Hosts`.

    Args:
        watch: the watch of the other hosts.
    """

    def __init__(self, watch: Watch):
        self._watch = watch
        self.index, self.count = watch.index, watch.count
        self.chief = self.index == 0
        self.exchange = StoreExchange(watch)

    def any(self, *flags: bool) -> list[bool]:
        """Returns, for each flag, whether it is set on any host."""
        found: Any = multihost_utils.process_allgather(np.array(flags, np.int32))
        return [bool(flag) for flag in found.reshape(self.count, -1).any(axis=0)]

    def from_chief(self, step: int | None) -> int | None:
        """Returns the step, or None, that the chief passes, on all hosts (a barrier)."""
        mine = np.array(-1 if step is None else step, np.int32)
        found = int(multihost_utils.broadcast_one_to_all(mine))
        return found if found >= 0 else None

    def together(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context in which a host that ends counts as lost."""
        return self._watch.together()


class StoreExchange:
    """Exchanges texts through a store on the first host; see `tftpu.engines.engine.Exchange`.

    Args:
        watch: the watch of the other hosts, whose store this uses.
    """

    def __init__(self, watch: Watch):
        self.index, self._count = watch.index, watch.count
        self._store = watch.store
        self._uses: collections.Counter[str] = collections.Counter()

    def collect(self, name: str, text: str) -> list[str]:
        """Returns, on the chief, all hosts' texts in the order of the hosts; [] on other hosts."""
        key = self._build_key(f"{name}/collected")
        if self.index:
            self._store.put(f"{key}/{self.index}", text)
            return []
        others = [self._store.wait_for(f"{key}/{index}") for index in range(1, self._count)]
        self._store.remove(f"{key}/")
        return [text, *others]

    def announce(self, name: str, text: str) -> str:
        """Returns, on every host, the text that the chief passes."""
        key = self._build_key(f"{name}/announced")
        if self.index:
            return self._store.wait_for(key)
        self._store.put(key, text)
        return text

    def _build_key(self, name: str) -> str:
        """Returns a key that is unique for each use of a name, and the same on all hosts."""
        self._uses[name] += 1
        return f"{name}/{self._uses[name]}"
