"""The owner of a lock: a process, and its count of heartbeats, which shows that it is alive.

Also the errors for a lock that another process holds.
"""

import dataclasses
import functools
import json
import logging
import os
import socket
import time
import typing
import uuid
from collections.abc import Callable
from typing import Any

from tftpu.errors import UserError

_log = logging.getLogger(__name__)

BEAT = 10.0  # seconds between two renewals of a lock
EXPIRES = 60.0  # seconds without a renewal after which another process may take over a lock


class LockedError(UserError):
    """Another process uses the workdir."""


class LockLostError(UserError):
    """The workdir was deleted, or another process uses it now."""


@dataclasses.dataclass(frozen=True)
class Owner:
    """The content of a lock that a process holds.

    Attributes:
        key: a unique id of the owner.
        process: the process id.
        host: the name of the process's machine.
        space: an id of the machine's boot and of the process id namespace; "" if unknown.
        born: the start time of the process, in the kernel's clock ticks since boot.
        since: the local time at which it acquired the lock, for messages.
        exclusive: whether the kernel releases the lock when the process ends.
        released: whether the process has released the lock.
        beat: the number of heartbeats so far.
    """

    key: str
    process: int
    host: str
    space: str
    born: int
    since: str
    exclusive: bool
    released: bool = False
    beat: int = 0

    @classmethod
    def from_this_process(cls, *, exclusive: bool) -> "Owner":
        """Returns a new owner: this process."""
        return cls(
            key=uuid.uuid4().hex,
            process=os.getpid(),
            host=socket.gethostname(),
            space=_identify_space(),
            born=_read_start_time(os.getpid()),
            since=time.strftime("%Y-%m-%d %H:%M:%S"),
            exclusive=exclusive,
        )

    @classmethod
    def parse(cls, content: bytes) -> "Owner | None":
        """Returns the owner that the content of a lock describes; None if it is not valid."""
        try:
            record = json.loads(content.decode())
            kinds = typing.get_type_hints(cls)
            if record.keys() != kinds.keys():
                return None
            if any(type(record[name]) is not kind for name, kind in kinds.items()):
                return None
            return cls(**record)
        except (ValueError, AttributeError, RecursionError):
            return None

    def encode(self) -> bytes:
        """Returns this owner as the content of a lock: one line of JSON."""
        return json.dumps(dataclasses.asdict(self)).encode() + b"\n"

    def count_beat(self) -> "Owner":
        """Returns a copy of the owner with one more heartbeat."""
        return dataclasses.replace(self, beat=self.beat + 1)

    @property
    def is_near(self) -> bool:
        """True if the owner belongs to this boot of this machine and this process id namespace."""
        return bool(self.space) and self.space == _identify_space()

    @property
    def is_dead(self) -> bool:
        """True if the owner was a process of this machine that has ended."""
        return self.is_near and _read_start_time(self.process) != self.born

    def __str__(self) -> str:
        return f"process {self.process} on {self.host}, since {self.since}"


def is_alive(look: Callable[[], bytes | None], say: Callable[[str], None]) -> bool:
    """Returns whether the owner of a lock is alive.

    Waits up to `EXPIRES` seconds for a heartbeat of a process that this machine cannot look up.

    Args:
        look: a function that returns the content of the lock, or None once the lock is gone.
        say: a function that is called with the reason why the call takes time.
    """
    first = look()
    if first is None:
        return False
    owner = Owner.parse(first)
    if owner is not None and (owner.released or owner.is_near):
        return not owner.released and not owner.is_dead
    end = time.monotonic() + EXPIRES
    say(f"held by {owner or 'an unknown process'}; waiting up to {EXPIRES:.0f} s for a heartbeat")
    while time.monotonic() < end:
        time.sleep(min(1.0, BEAT / 4))
        now = look()
        if now is None:
            return False
        if now != first:
            after = Owner.parse(now)
            return after is None or not after.released
    return False


def warn_of(workdir: Any) -> Callable[[str], None]:
    """Returns the `say` argument of `is_alive`: a function that logs who holds a workdir."""
    return lambda text: _log.warning("%s is %s.", workdir, text)


def build_locked_error(workdir: Any, known: Owner | None) -> LockedError:
    """Returns the error for a workdir that another process has locked; `known`: its owner."""
    return LockedError(
        f"The folder '{workdir}' is held by {known or 'another process'}: wait for that process, "
        "or choose another folder."
    )


def build_lost_error(workdir: Any, what: str) -> LockLostError:
    """Returns the error for a workdir whose lock this process lost; `what`: how it was lost."""
    return LockLostError(
        f"The folder '{workdir}' {what} while this run was writing to it. The run ends here, so "
        "that it does not mix its files with those of another run."
    )


@functools.cache
def _identify_space() -> str:
    """Returns an id of the machine's boot and the process id namespace; "" if it is unknown."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _read_start_time(process: int) -> int:
    """Returns the start time of a process, in clock ticks since boot; -1 if it has ended."""
    try:
        with open(f"/proc/{process}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return -1
    return -1 if fields[0] in (b"Z", b"X") else int(fields[19])
