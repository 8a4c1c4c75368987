"""Watches the locks of other workers of a search, on this machine and on others.

Claiming a folder in a bucket means waiting for a heartbeat of its owner on another machine. A
worker checks many such folders repeatedly, so it remembers what it saw instead of waiting.
"""

import time

from tftpu.storage import buckets, files, lease, locks, owner
from tftpu.storage.owner import Owner


class LeaseWatch:
    """Remembers the leases that it saw, and since when each of them is unchanged."""

    def __init__(self) -> None:
        # The generation of each folder's lease, and when it was first seen.
        self._seen: dict[str, tuple[int, float]] = {}

    def is_free(self, folder: str) -> bool:
        """Returns without waiting whether nobody holds a folder, as far as this check can tell.

        An owner on another machine counts as gone once its lease was unchanged for `EXPIRES`
        seconds. Then the lease is removed, so that claiming the folder does not wait for it.
        """
        if not files.is_remote(folder):
            return locks.is_locked(folder) is not True
        uri = files.join(folder, lease.FILE)
        content, generation = buckets.read_newest(uri)
        known = Owner.parse(content)
        if not generation or (known is not None and known.released):
            return True
        if known is not None and known.is_near:
            return known.is_dead
        now = time.monotonic()
        seen, since = self._seen.get(folder, (0, now))
        if seen != generation:
            self._seen[folder] = generation, now
            return False
        if now - since < owner.EXPIRES:
            return False
        # Discards only the expired generation, not one that is renewed at this moment.
        buckets.discard(uri, generation)
        return True
