"""The lock of a workdir in a bucket: an object with the owner's heartbeats."""

import time

from tftpu.storage import buckets, files, owner
from tftpu.storage.owner import LockLostError, Owner, build_locked_error, build_lost_error, warn_of

FILE = ".lease"


class Lease:
    """A lock in a bucket: an object that is replaced only if its generation has not changed."""

    def __init__(self, workdir: str):
        self._workdir = workdir
        self._uri = files.join(workdir, FILE)
        self._owner = Owner.from_this_process(exclusive=False)
        seen = b"", 0

        def look() -> bytes | None:
            nonlocal seen
            seen = buckets.read_newest(self._uri)
            return seen[0] if seen[1] else None

        if owner.is_alive(look, warn_of(workdir)):
            raise build_locked_error(workdir, Owner.parse(seen[0]))
        try:  # replaces only the lease that was seen, so that one of several processes succeeds
            self._generation = buckets.publish(self._uri, self._owner.encode(), seen[1])
        except buckets.ChangedError as error:
            winner = Owner.parse(buckets.read_newest(self._uri)[0])
            raise build_locked_error(workdir, winner) from error
        self._renewed_at = time.monotonic()
        self._lost: LockLostError | None = None

    def check(self) -> None:
        if self._lost is not None:
            raise self._lost
        silent = time.monotonic() - self._renewed_at
        if silent > owner.EXPIRES:
            raise OSError(f"its lease could not be renewed for {silent:.0f} s")

    def renew(self) -> None:
        began, renewed = time.monotonic(), self._owner.count_beat()
        try:
            generation = buckets.publish(self._uri, renewed.encode(), self._generation)
        except buckets.ChangedError:
            found = Owner.parse(buckets.read_newest(self._uri)[0])
            by = f"was taken over by {found}" if found else f"or its object {FILE} was deleted"
            self._lost = build_lost_error(self._workdir, by)
            raise self._lost from None
        self._owner, self._generation, self._renewed_at = renewed, generation, began

    def release(self) -> None:
        buckets.discard(self._uri, self._generation)
