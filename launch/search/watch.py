"""Signs of life of those who hold locks: other workers of a search, here or on other machines.

To claim a folder in a bucket whose owner is on another machine is to wait for a beat of it. A
worker looks at many such folders, again and again, and remembers what it saw instead.
"""

import time

from tftpu.storage import buckets, files, lease, locks, owner
from tftpu.storage.owner import Owner


class LeaseWatch:
    """Remembers which leases it saw, and since when each of them is the same."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[int, float]] = {}  # by folder: the generation, and when

    def is_free(self, folder: str) -> bool:
        """Returns whether nobody holds a folder, as far as one look tells, without waiting.

        An owner on another machine is gone once its lease has been seen unchanged for `EXPIRES`
        seconds. Its lease is removed then, so that nobody who claims the folder waits for it.
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
        buckets.discard(uri, generation)  # not one that it renews at this moment
        return True
