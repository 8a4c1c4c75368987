"""Rents a slice with Cloud TPU's own client, follows the run, and deletes the slice.

If a rental fails, a message names a slice that may still exist, and the command that deletes it.
"""

import contextlib
import shlex
import time
from typing import TYPE_CHECKING, NoReturn

from tftpu.amounts import format_period
from tftpu.errors import ExitCode, UserError
from tftpu.launch.cloud import google_cloud, job, waiting
from tftpu.launch.cloud.google_cloud import ConnectionLost, NotFoundError
from tftpu.launch.cloud.tpu_vm.job import TpuVmJob
from tftpu.launch.cloud.tpu_vm.rented import RentedSlice, format_resource, from_resource
from tftpu.launch.cloud.tpu_vm.workers import Outcome, SliceWorkers

if TYPE_CHECKING:
    from google.cloud.tpu_v2 import TpuClient

CREATE_TIMEOUT_S = 60.0
DELETE_TIMEOUT_S = 600.0
# Seconds to wait for an exit code beyond `--timeout`; after that, the code counts as lost.
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
    """Uploads the run's files, rents a slice, follows the run, and deletes the slice unless kept.

    A preempted spot slice is deleted and another one is requested, on which the run resumes from
    its last checkpoint.

    Args:
        client: Cloud TPU's client.
        order: the slice to rent, and the run on it.

    Raises:
        UserError: the request was rejected, no slice was available, a slice other than a spot
            slice was preempted, or the run failed.
    """
    order.ship()
    while True:
        rental = _Rental(client, order.describe_slice(job.make_unique_name(order.config)))
        try:
            rental.request(order)
            rental.follow()
            return
        except ConnectionLost as lost:
            raise UserError(str(lost)) from lost
        except _Preempted:
            rental.delete()
            if not order.spot:
                rental.raise_preempted()
            print("The slice was preempted: requesting another one.", flush=True)


def attach(client: "TpuClient", project: str, zone: str, name: str) -> None:
    """Follows the run on a slice that was requested before; deletes the slice unless it is kept.

    Args:
        client: Cloud TPU's client.
        project: project of Google Cloud.
        zone: zone of the slice.
        name: name of the slice.

    Raises:
        UserError: there is no such slice, no capacity for it, it was preempted, or the run failed.
    """
    get = client.get_queued_resource
    resource = format_resource(project, zone, name)
    try:
        found = google_cloud.call("looking for the slice", get, name=resource)
    except NotFoundError as error:
        raise UserError(
            f"There is no slice {name} in {zone} of the project {project}: a slice is deleted when "
            "its run ends. The output of the run is in launch/ in its workdir."
        ) from error
    except ConnectionLost as lost:
        raise UserError(str(lost)) from lost
    rental = _Rental(client, from_resource(found))
    try:
        rental.follow()
    except ConnectionLost as lost:
        raise UserError(str(lost)) from lost
    except _Preempted:
        rental.delete()
        rental.raise_preempted()


class _Rental:
    """A request for a slice, from its creation to the slice's deletion."""

    def __init__(self, client: "TpuClient", rented: RentedSlice):
        self._client = client
        self._rented = rented
        self._states = waiting.StateLog()
        self._ending = f"this deletes it: {shlex.join(rented.build_delete_command())}"

    def request(self, order: TpuVmJob) -> None:
        """Requests the slice and waits until it is ready.

        Raises:
            UserError: the request was rejected, or no slice was available.
            _Preempted: the slice was preempted.
        """
        try:
            self._create(order)
            name = self._rented.name
            print(f"Requested {self._rented.slice.name} as {name}; {self._ending}", flush=True)
            self._wait_for_capacity()
        except (_NotCreatedError, _Preempted):
            raise
        except BaseException:
            self.delete()  # no run is lost, because none has started
            raise

    def follow(self) -> None:
        """Follows the run, then deletes the slice unless it is kept.

        Raises:
            UserError: no slice was available, or the run failed.
            _Preempted: the slice was preempted.
        """
        workers = SliceWorkers(self._rented)
        try:
            self._wait_for_capacity()  # returns at once if the slice is ready
            outcome = self._follow(workers)
        except _Preempted:
            raise
        except KeyboardInterrupt:
            print(
                f"\nNo longer watching. The run continues, and incurs costs; {self._ending}\n"
                f"This follows it again: {self._rented.format_attach_command()}"
            )
            return
        except BaseException:
            print(f"The run may continue, and incur costs; {self._ending}")
            raise
        if self._rented.keep:
            print(f"The slice {self._rented.name} is kept, and incurs costs; {self._ending}")
        else:
            self.delete()
        self._report(workers, outcome)

    def raise_preempted(self) -> NoReturn:
        """Raises `UserError` with the command that resumes the run."""
        raise UserError(
            f"The slice {self._rented.name} was preempted, or its run stopped. The same "
            "`tftpu launch tpu-vm` command resumes from the last checkpoint."
        ) from None

    def delete(self) -> None:
        """Deletes the slice, or prints that it could not be deleted; Ctrl-C ends the command."""
        from google.cloud import tpu_v2

        request = tpu_v2.DeleteQueuedResourceRequest(name=self._rented.resource, force=True)
        delete = self._client.delete_queued_resource
        try:
            operation = waiting.retry(
                lambda: google_cloud.call("deleting the slice", delete, request=request)
            )
            operation.result(timeout=DELETE_TIMEOUT_S)
            print(f"Deleted the slice {self._rented.name}.", flush=True)
        except NotFoundError:
            print(f"There is no slice {self._rented.name}: nothing to delete.", flush=True)
        except (Exception, KeyboardInterrupt) as error:
            reason = str(error) or type(error).__name__
            print(
                f"The slice {self._rented.name} could not be deleted ({reason}), and may incur "
                f"costs; {self._ending}",
                flush=True,
            )
            if isinstance(error, KeyboardInterrupt):
                raise

    def _create(self, order: TpuVmJob) -> None:
        from google.cloud import tpu_v2

        what = "requesting the slice"
        wanted = order.build_request(self._rented.name)
        try:
            operation = google_cloud.call(
                what,
                self._client.create_queued_resource,
                parent=order.parent,
                queued_resource_id=self._rented.name,
                queued_resource=google_cloud.to_message(tpu_v2.QueuedResource, wanted),
            )
        except UserError as error:
            raise _NotCreatedError(str(error)) from error
        except ConnectionLost:  # the TPU VM may have been created: polling its state shows it
            print(f"No answer to the request for {self._rented.name}: looking for it.", flush=True)
            return
        # Google Cloud may report only now that a quota is exceeded.
        with contextlib.suppress(ConnectionLost, TimeoutError):
            google_cloud.call(what, operation.result, timeout=CREATE_TIMEOUT_S)

    def _wait_for_capacity(self) -> None:
        for state, detail in waiting.poll(self._read_state):
            self._states.print(state.lower().replace("_", " "))
            if state == "ACTIVE":
                return
            if state == "FAILED":
                raise UserError(
                    f"There is no capacity for {self._rented.slice.name} in {self._rented.zone}: "
                    f"{detail} Try another zone or slice, or a longer --queue_timeout."
                )
            if state in _GONE:
                raise _Preempted

    def _follow(self, workers: SliceWorkers) -> Outcome | None:
        """Prints the run's output until it ends; returns its outcome, None if no exit code came."""
        overdue = time.monotonic() + self._rented.timeout + OVERDUE_S
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
            found = google_cloud.call("watching the slice", get, name=self._rented.resource).state
        except NotFoundError as error:
            raise UserError(
                f"There is no slice {self._rented.name}: the request never arrived, or the slice "
                f"was deleted. If it appears later, {self._ending}"
            ) from error
        detail = found.failed_data.error.message
        return found.state.name, f"{detail.rstrip('.')}." if detail else "No reason was given."

    def _report(self, workers: SliceWorkers, outcome: Outcome | None) -> None:
        """Raises `UserError` if the run failed; otherwise names workers that sent no exit code."""
        rented = self._rented
        if outcome is None:
            raise UserError(
                f"No exit code came from {rented.name} within "
                f"--timeout={format_period(rented.timeout)}. Its output is in "
                f"{rented.resolve_log(0)}."
            )
        log = workers.explain(outcome)
        if outcome.code == ExitCode.HUNG:
            raise UserError(
                "The run was ended, because it hung or took longer than "
                f"--timeout={format_period(rented.timeout)}; {log} The same "
                "`tftpu launch tpu-vm` command resumes from the last checkpoint."
            )
        if outcome.code:
            one = "The run" if rented.slice.hosts == 1 else f"Worker {outcome.worker}"
            rest = "" if rented.slice.hosts == 1 else ", and the run with it"
            raise UserError(f"{one} ended with code {outcome.code}{rest}; {log}")
        if outcome.missing:
            print(f"The run ended well; {log}")
