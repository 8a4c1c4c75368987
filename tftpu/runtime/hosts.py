"""The rank of this process among the processes that train together, one on each host.

TF_CONFIG describes them on both engines, as for TensorFlow's own multi-worker strategy:
https://www.tensorflow.org/guide/distributed_training. The TensorFlow engine drives all hosts of a
TPU slice from one process.
"""

import contextlib
import faulthandler
import json
import logging
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NoReturn

from tftpu.errors import ExitCode, UserError
from tftpu.runtime import leaving, slow

logger = logging.getLogger(__name__)

_LONG = 5.0  # seconds of waiting after which a message is logged
ARRIVE = 300  # seconds in which all hosts of a run have to connect
_SHAPE = '{"cluster": {"worker": ["HOST:PORT", …]}, "task": {"type": "worker", "index": 0}}'


@dataclass(frozen=True)
class Task:
    """The rank of this process among the processes that train together.

    Attributes:
        index: 0 is the chief, which writes the files shared by all.
        count: the number of processes.
        coordinator: "HOST:PORT" of the chief, where the processes meet; "" for a single process.
    """

    index: int = 0
    count: int = 1
    coordinator: str = field(default="", compare=False)

    @property
    def chief(self) -> bool:
        """True for the process that writes files shared by all."""
        return self.index == 0


def read_task() -> Task:
    """Reads this process's task from TF_CONFIG; if it is not set, the process trains alone.

    Raises:
        UserError: TF_CONFIG cannot be parsed, names tasks other than a chief and workers, or has
            an address without a port.
    """
    text = os.environ.get("TF_CONFIG")
    if not text:
        return Task()
    try:
        config = json.loads(text)
        cluster = {kind: list(hosts) for kind, hosts in config.get("cluster", {}).items()}
        chiefs, workers = (cluster.pop(kind, []) for kind in ("chief", "worker"))
        count = len(chiefs) + len(workers)
        if count < 2 and not cluster:  # cloud services set TF_CONFIG for a single machine as well
            return Task()
        kind, index = config["task"]["type"], int(config["task"]["index"])
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(f"TF_CONFIG cannot be read ({error!r}): it must be {_SHAPE}.") from error
    known = {"chief": chiefs, "worker": workers}
    if cluster or index not in range(len(known.get(kind, ()))):
        other = ", ".join([*cluster, f"the task {kind} {index}"])
        raise UserError(
            f"TF_CONFIG has {other}, but every process must train, as the chief or as a worker of "
            f"the cluster. It must be {_SHAPE}."
        )
    for address in (*chiefs, *workers):
        if not isinstance(address, str) or not _is_address(address):
            raise UserError(
                f"TF_CONFIG has the address {address!r}, which is not HOST:PORT. It must be "
                f"{_SHAPE}."
            )
    return Task(index + (len(chiefs) if kind == "worker" else 0), count, [*chiefs, *workers][0])


def _is_address(text: str) -> bool:
    found = re.fullmatch(r"(?:\[[0-9a-fA-F:.%]+\]|[^\s:/\[\]]+):([0-9]{1,5})", text)
    return found is not None and 0 < int(found[1]) < 1 << 16


def report_waiting(place: Task, seconds: float) -> None:
    """Logs a warning that this process waits up to `seconds` for the other hosts."""
    logger.warning(
        "Host %d of %d waits for the other hosts to connect to %s, for at most %.0f s.",
        *(place.index, place.count, place.coordinator, seconds),
    )


def reported_if_long(place: Task, seconds: float) -> contextlib.AbstractContextManager[None]:
    """Logs that this process waits, for up to `seconds`, if the `with` block takes over 5 s."""
    return slow.reporting_after(_LONG, report_waiting, place, seconds)


@contextlib.contextmanager
def ended_if_alone(place: Task, seconds: float) -> Iterator[None]:
    """Ends this process, with exit code 1, if the `with` block takes longer than `seconds`.

    For a wait for other hosts in which no Python thread can run: it is reported before it begins,
    and a thread of `faulthandler`, which needs no interpreter, ends the process.
    """
    report_waiting(place, seconds)
    with open(os.devnull, "w") as nowhere:
        faulthandler.dump_traceback_later(seconds, exit=True, file=nowhere)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()


def exit_as_lost(what: str) -> NoReturn:
    """Ends this process, from any thread, because another host is lost.

    Args:
        what: a sentence about the lost host.
    """
    with contextlib.suppress(OSError, ValueError):
        print(
            f"tftpu: {what} Run the same command again on all hosts to resume from the last "
            "checkpoint.",
            file=sys.stderr,
            flush=True,
        )
    leaving.exit_at_once(ExitCode.HOST_LOST)
