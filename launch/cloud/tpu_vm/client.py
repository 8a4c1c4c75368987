"""Rents a slice with Cloud TPU's own client, follows the run, and deletes the slice.

After any failure, a message names a slice that may still exist, with the command that deletes it.
"""

import contextlib
import shlex
import time
from typing import TYPE_CHECKING

from tftpu.amounts import format_period
from tftpu.errors import ExitCode, UserError
from tftpu.launch.cloud import google_cloud, job, waiting
from tftpu.launch.cloud.google_cloud import ConnectionLost, NotFoundError
from tftpu.launch.cloud.tpu_vm.job import TpuVmJob
from tftpu.launch.cloud.tpu_vm.workers import Outcome, SliceWorkers

if TYPE_CHECKING:
    from google.cloud.tpu_v2 import TpuClient

CREATE_TIMEOUT_S = 60.0
DELETE_TIMEOUT_S = 600.0
# Seconds after the end of `--timeout` for which the exit code is awaited: it may have been lost.
OVERDUE_S = 3600.0
_GONE = ("FAILED", "SUSPENDING", "SUSPENDED", "DELETING")


class _Preempted(Exception):  # noqa: N818 (an outcome, not an error)
    """The slice was preempted."""


class _NotCreatedError(UserError):
    """The request was rejected, so there is no slice to delete."""


def create_client() -> "TpuClient":
    """Returns Cloud TPU's client."""
    from google.cloud import tpu_v2

    return google_cloud.connect(tpu_v2.TpuClient)


def train(client: "TpuClient", order: TpuVmJob) -> None:
    """Uploads the run's files, rents a slice, waits for the end of the run, and deletes the slice.

    A preempted spot slice is deleted and another one is requested, on which the run resumes from
    its last checkpoint.

    Args:
        client: Cloud TPU's client.
        order: what to rent, and what to run on it.

    Raises:
        UserError: there was no slice, or the run failed.
    """
    order.ship()
    while True:
        rented = _RentedSlice(client, order)
        try:
            rented.train()
            return
        except ConnectionLost as lost:
            raise UserError(str(lost)) from lost
        except _Preempted:
            rented.delete()
            if not order.spot:
                raise UserError(
                    f"The slice {rented.name} was preempted, or its run stopped. The same command "
                    "resumes from the last checkpoint."
                ) from None
            print("The slice was preempted: requesting another one.", flush=True)


class _RentedSlice:
    """One request for a slice, under a unique name. The arguments are those of `train`."""

    def __init__(self, client: "TpuClient", order: TpuVmJob):
        self.name = job.make_unique_name(order.config)
        self._client = client
        self._order = order
        self._resource = f"{order.parent}/queuedResources/{self.name}"
        self._ending = f"this deletes it: {shlex.join(order.build_delete_command(self.name))}"

    def train(self) -> None:
        """Rents the slice, follows the run and deletes the slice. The caller handles a preemption.

        Raises:
            UserError: there was no slice, or the run failed.
        """
        try:
            self._create()
            print(f"Requested {self._order.slice.name} as {self.name}; {self._ending}", flush=True)
            self._wait_for_capacity()
        except (_NotCreatedError, _Preempted):
            raise
        except BaseException:
            self.delete()  # nothing has run on the machine yet
            raise
        workers = SliceWorkers(self._order, self.name)
        try:
            outcome = self._follow(workers)
        except _Preempted:
            raise
        except KeyboardInterrupt:
            print(f"\nNo longer watching. The run continues, and incurs costs; {self._ending}")
            return
        except BaseException:
            print(f"The run may continue, and incur costs; {self._ending}")
            raise
        if self._order.keep:
            print(f"The slice {self.name} is kept, and incurs costs; {self._ending}")
        else:
            self.delete()
        self._report(workers, outcome)

    def delete(self) -> None:
        """Deletes the slice, or prints that it could not be deleted."""
        from google.cloud import tpu_v2

        request = tpu_v2.DeleteQueuedResourceRequest(name=self._resource, force=True)
        delete = self._client.delete_queued_resource
        try:
            operation = waiting.retry(
                lambda: google_cloud.call("deleting the slice", delete, request=request)
            )
            operation.result(timeout=DELETE_TIMEOUT_S)
            print(f"Deleted the slice {self.name}.", flush=True)
        except NotFoundError:
            print(f"There is no slice {self.name}: nothing to delete.", flush=True)
        except (Exception, KeyboardInterrupt) as error:
            print(
                f"The slice {self.name} could not be deleted ({error}), and may incur costs; "
                f"{self._ending}",
                flush=True,
            )

    def _create(self) -> None:
        from google.cloud import tpu_v2

        what = "requesting the slice"
        wanted = self._order.build_request(self.name)
        try:
            operation = google_cloud.call(
                what,
                self._client.create_queued_resource,
                parent=self._order.parent,
                queued_resource_id=self.name,
                queued_resource=google_cloud.to_message(tpu_v2.QueuedResource, wanted),
            )
        except UserError as error:
            raise _NotCreatedError(str(error)) from error
        except ConnectionLost:  # the TPU VM may have been created: polling its state shows it
            print(f"No answer to the request for {self.name}: looking for it.", flush=True)
            return
        # Google Cloud may report only now that a quota is exceeded.
        with contextlib.suppress(ConnectionLost, TimeoutError):
            google_cloud.call(what, operation.result, timeout=CREATE_TIMEOUT_S)

    def _wait_for_capacity(self) -> None:
        states = waiting.StateLog()
        for state, detail in waiting.poll(self._read_state):
            states.print(state.lower().replace("_", " "))
            if state == "ACTIVE":
                return
            if state == "FAILED":
                raise UserError(
                    f"There is no capacity for {self._order.slice.name} in {self._order.zone}: "
                    f"{detail} Try another zone or slice, or a longer --queue_timeout."
                )
            if state in _GONE:
                raise _Preempted

    def _follow(self, workers: SliceWorkers) -> Outcome | None:
        """Prints the run's output until it ends; returns its outcome, None without an exit code."""
        overdue = time.monotonic() + self._order.timeout + OVERDUE_S
        others = workers.describe_other_logs()
        if others:
            print(others, flush=True)

        def look() -> tuple[Outcome | None, str]:
            outcome = workers.poll()
            return outcome, "" if outcome else self._read_state()[0]

        for outcome, state in waiting.poll(look):
            if state in _GONE or (outcome and outcome.code == ExitCode.PREEMPTED):
                raise _Preempted
            if outcome or time.monotonic() > overdue:
                return outcome
        return None

    def _read_state(self) -> tuple[str, str]:
        """Returns the state of the request, such as "ACTIVE", and the reason for a failure."""
        get = self._client.get_queued_resource
        try:
            found = google_cloud.call("watching the slice", get, name=self._resource).state
        except NotFoundError as error:
            raise UserError(
                f"There is no slice {self.name}: the request never arrived, or the slice was "
                f"deleted. If it appears later, {self._ending}"
            ) from error
        detail = found.failed_data.error.message
        return found.state.name, f"{detail.rstrip('.')}." if detail else "No reason was given."

    def _report(self, workers: SliceWorkers, outcome: Outcome | None) -> None:
        """Raises `UserError` if the run failed; prints what is known of silent workers."""
        order = self._order
        if outcome is None:
            raise UserError(
                f"No exit code came from {self.name} within "
                f"--timeout={format_period(order.timeout)}. Its output is in "
                f"{order.resolve_log(self.name, 0)}."
            )
        log = workers.explain(outcome)
        if outcome.code == ExitCode.HUNG:
            raise UserError(
                "The run was ended, because it hung or took longer than "
                f"--timeout={format_period(order.timeout)}; {log} The same command resumes from "
                "the last checkpoint."
            )
        if outcome.code:
            one = "The run" if order.slice.hosts == 1 else f"Worker {outcome.worker}"
            rest = "" if order.slice.hosts == 1 else ", and the run with it"
            raise UserError(f"{one} ended with code {outcome.code}{rest}; {log}")
        if outcome.missing:
            print(f"The run ended well; {log}")
