"""Rents a slice with Cloud TPU's own client, follows the run, and deletes the slice.

On any failure, a slice that may still exist is named, with the command that deletes it.
"""

import contextlib
import shlex
import time
from typing import TYPE_CHECKING

from tftpu.errors import ExitCode, UserError
from tftpu.launch.cloud import google_cloud, job, waiting
from tftpu.launch.cloud.google_cloud import ConnectionLost, NotFoundError
from tftpu.launch.cloud.tpu_vm.job import TpuVmJob
from tftpu.launch.cloud.tpu_vm.workers import Outcome, SliceWorkers

if TYPE_CHECKING:
    from google.cloud.tpu_v2 import TpuClient

CREATE_TIMEOUT_S = 60.0
DELETE_TIMEOUT_S = 600.0
# How long after the end of `--timeout` the exit code is waited for: it may have been lost.
OVERDUE_S = 3600.0
_GONE = ("FAILED", "SUSPENDING", "SUSPENDED", "DELETING")


class _Preempted(Exception):  # noqa: N818 (an outcome, not an error)
    """The slice was preempted."""


def create_client() -> "TpuClient":
    """Returns Cloud TPU's client."""
    from google.cloud import tpu_v2

    return google_cloud.connect(tpu_v2.TpuClient)


def train(client: "TpuClient", order: TpuVmJob) -> None:
    """Uploads what travels, rents a slice, waits for the end of the run, deletes the slice.

    A spot slice that is preempted is deleted and another one requested, on which the run resumes
    from its last checkpoint.

    Args:
        client: Cloud TPU's client.
        order: what to rent, and what to run on it.

    Raises:
        UserError: there was no slice, or the run failed.
    """
    order.ship()
    while True:
        name = job.make_unique_name(order.config)
        try:
            _train_once(client, order, name)
            return
        except ConnectionLost as lost:
            raise UserError(str(lost)) from lost
        except _Preempted:
            _delete(client, order, name)
            if not order.spot:
                raise UserError(
                    f"The slice {name} was preempted, or its run stopped. The same command resumes "
                    "from the last checkpoint."
                ) from None
            print("The slice was preempted: requesting another one.", flush=True)


def _train_once(client: "TpuClient", order: TpuVmJob, name: str) -> None:
    try:
        _create(client, order, name)
        print(
            f"Requested {order.slice.name} as {name}; {_explain_deletion(order, name)}", flush=True
        )
        _wait_for_capacity(client, order, name)
    except _NotCreated as error:
        raise UserError(str(error)) from error
    except _Preempted:
        raise
    except BaseException:
        _delete(client, order, name)  # nothing ran on it
        raise
    workers = SliceWorkers(order, name)
    try:
        outcome = _follow(client, order, name, workers)
    except _Preempted:
        raise
    except KeyboardInterrupt:
        print(
            "\nNo longer watching. The run continues, and incurs costs; "
            + _explain_deletion(order, name)
        )
        return
    except BaseException:
        print(f"The run may continue, and incur costs; {_explain_deletion(order, name)}")
        raise
    if order.keep:
        print(f"The slice {name} is kept, and incurs costs; {_explain_deletion(order, name)}")
    else:
        _delete(client, order, name)
    _report(order, name, workers, outcome)


def _report(order: TpuVmJob, name: str, workers: SliceWorkers, outcome: Outcome | None) -> None:
    """Raises `UserError` if the run failed; prints what is known of workers that did not report."""
    if outcome is None:
        raise UserError(
            f"No exit code came from {name} within --timeout={order.timeout}; "
            f"{order.resolve_log(name, 0)} has what it printed."
        )
    log = workers.explain(outcome)
    if outcome.code == ExitCode.HUNG:
        raise UserError(
            f"The run hung, or took longer than --timeout={order.timeout}: it was ended; {log} The "
            "same command resumes from the last checkpoint."
        )
    if outcome.code:
        if order.slice.hosts == 1:
            raise UserError(f"The run ended with code {outcome.code}; {log}")
        raise UserError(
            f"Worker {outcome.worker} ended with code {outcome.code}, and the run with it; {log}"
        )
    if outcome.missing:
        print(f"The run ended well; {log}")


class _NotCreated(Exception):  # noqa: N818 (an outcome, not an error)
    """The request was refused: there is no slice to delete."""


def _create(client: "TpuClient", order: TpuVmJob, name: str) -> None:
    from google.cloud import tpu_v2

    what = "requesting the slice"
    try:
        operation = google_cloud.call(
            what,
            client.create_queued_resource,
            parent=order.parent,
            queued_resource_id=name,
            queued_resource=google_cloud.to_message(
                tpu_v2.QueuedResource, order.build_request(name)
            ),
        )
    except UserError as error:
        raise _NotCreated(str(error)) from error
    except ConnectionLost:  # it may have been created: polling its state shows
        print(f"No answer to the request for {name}: looking for it.", flush=True)
        return
    # A quota may be found exceeded only now.
    with contextlib.suppress(ConnectionLost, TimeoutError):
        google_cloud.call(what, operation.result, timeout=CREATE_TIMEOUT_S)


def _wait_for_capacity(client: "TpuClient", order: TpuVmJob, name: str) -> None:
    states = waiting.StateLog()
    for state, detail in waiting.poll(lambda: _read_state(client, order, name)):
        states.print(state.lower().replace("_", " "))
        if state == "ACTIVE":
            return
        if state == "FAILED":
            raise UserError(
                f"There is no capacity for {order.slice.name} in {order.zone}: {detail} Try "
                "another zone or slice, or a longer --queue_timeout."
            )
        if state in _GONE:
            raise _Preempted


def _follow(
    client: "TpuClient", order: TpuVmJob, name: str, workers: SliceWorkers
) -> Outcome | None:
    """Prints the output of the run until it ends; returns how, None if no exit code came."""
    overdue = time.monotonic() + order.limit + OVERDUE_S
    others = workers.describe_other_logs()
    if others:
        print(others, flush=True)

    def look() -> tuple[Outcome | None, str]:
        outcome = workers.poll()
        return outcome, "" if outcome else _read_state(client, order, name)[0]

    for outcome, state in waiting.poll(look):
        if state in _GONE or (outcome and outcome.code == ExitCode.PREEMPTED):
            raise _Preempted
        if outcome or time.monotonic() > overdue:
            return outcome
    return None


def _read_state(client: "TpuClient", order: TpuVmJob, name: str) -> tuple[str, str]:
    """Returns the state of the request, such as "ACTIVE", and the reason of a failure."""
    try:
        found = google_cloud.call(
            "watching the slice",
            client.get_queued_resource,
            name=f"{order.parent}/queuedResources/{name}",
        )
    except NotFoundError as error:
        raise UserError(
            f"There is no slice {name}: the request never arrived, or the slice was deleted. If it "
            f"appears, {_explain_deletion(order, name)}"
        ) from error
    detail = found.state.failed_data.error.message
    return found.state.state.name, f"{detail.rstrip('.')}." if detail else "No reason was given."


def _delete(client: "TpuClient", order: TpuVmJob, name: str) -> None:
    """Deletes the slice, or prints that it could not be deleted."""
    from google.cloud import tpu_v2

    resource = f"{order.parent}/queuedResources/{name}"
    request = tpu_v2.DeleteQueuedResourceRequest(name=resource, force=True)
    try:
        operation = waiting.retry(
            lambda: google_cloud.call(
                "deleting the slice", client.delete_queued_resource, request=request
            )
        )
        operation.result(timeout=DELETE_TIMEOUT_S)
        print(f"Deleted the slice {name}.", flush=True)
    except NotFoundError:
        print(f"There is no slice {name}: nothing to delete.", flush=True)
    except (Exception, KeyboardInterrupt) as error:
        print(
            f"The slice {name} could not be deleted ({error}), and may incur costs; "
            f"{_explain_deletion(order, name)}",
            flush=True,
        )


def _explain_deletion(order: TpuVmJob, name: str) -> str:
    return f"this deletes it: {shlex.join(order.build_delete_command(name))}"
