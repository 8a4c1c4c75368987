"""The request of `tftpu launch tpu-vm`: a slice, and the script that each of its machines runs.

The request is a dictionary with the field names of the REST interface
(https://cloud.google.com/tpu/docs/reference/rest/v2/projects.locations.queuedResources).
"""

import dataclasses
import json
import shlex
from pathlib import Path
from typing import Any

from tftpu.errors import UserError
from tftpu.launch.cloud import job
from tftpu.launch.cloud.launchers import RUNTIMES, suggest_launcher
from tftpu.launch.cloud.tpu_vm.rented import RentedSlice
from tftpu.tpu.slices import PRICE_SOURCE, Slice

_SCOPE = "https://www.googleapis.com/auth/cloud-platform"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TpuVmJob(job.CloudJob):
    """A slice to rent, and the run on it. The machine stops a run that exceeds the timeout.

    Attributes:
        project: project of Google Cloud that pays.
        zone: zone of the slice.
        queue_timeout: how long to wait for capacity, in seconds.
        keep: whether the slice stays after the run. Otherwise the launcher deletes it; if the
            launcher was ended, the slice deletes itself some minutes after the run.
    """

    project: str
    zone: str
    queue_timeout: int = 86_400
    keep: bool = False

    @property
    def parent(self) -> str:
        """The resource name of the location in which the request is made."""
        return f"projects/{self.project}/locations/{self.zone}"

    def describe_slice(self, name: str) -> RentedSlice:
        """Returns the slice that a request of the given name rents."""
        return RentedSlice(
            name=name,
            project=self.project,
            zone=self.zone,
            slice=self.slice,
            folder=f"{self.workdir}/launch/{name}",
            timeout=self.timeout,
            keep=self.keep,
        )

    def build_request(self, name: str) -> dict[str, Any]:
        """Returns the QueuedResource to create, with the field names of the REST interface."""
        node: dict[str, Any] = {
            "acceleratorType": self.slice.single.name.replace("v5e", "v5litepod"),
            "runtimeVersion": RUNTIMES[self.slice.generation.name],
            "networkConfig": {"enableExternalIps": True},
            "serviceAccount": {"scope": [_SCOPE]},
            "labels": self.build_labels(),
            "metadata": {"startup-script": self.build_startup_script(name)},
        }
        if self.service_account:
            node["serviceAccount"]["email"] = self.service_account
        wanted: dict[str, Any] = {
            "tpu": {
                "nodeSpec": [{"parent": self.parent, **self._build_node_names(name), "node": node}]
            },
            "queueingPolicy": {"validUntilDuration": f"{self.queue_timeout}s"},
        }
        if self.spot:
            wanted["spot"] = {}
        return wanted

    def _build_node_names(self, name: str) -> dict[str, Any]:
        """Returns the fields that name the slices of the request."""
        if self.slice.slices == 1:
            return {"nodeId": name}
        return {"multisliceParams": {"nodeCount": self.slice.slices, "nodeIdPrefix": name}}

    def build_startup_script(self, name: str) -> str:
        """Returns the script that each worker runs; every value in it is quoted."""
        rented = self.describe_slice(name)
        lines = [
            "#!/bin/bash",
            "set -u",
            "export HOME=/root",
            'home="${TFTPU_HOME:-/opt/tftpu}"',
            f"folder={shlex.quote(rented.folder)}",
            f"slices={self.slice.slices}",
            f"hosts={self.slice.single.hosts}",
            f"limit={self.timeout}",
            f"delete=({shlex.join([] if self.keep else rented.build_delete_command())})",
            self.shipment.build_script(self.workdir, self.build_arguments(self.workdir)),
            (Path(__file__).parent / "startup.sh").read_text(),
        ]
        return "\n".join(lines)


def check_slice(wanted: Slice) -> None:
    """Raises `UserError` for a slice that Cloud TPU does not rent as TPU VMs."""
    if wanted.generation.name not in RUNTIMES:
        raise UserError(
            f"{wanted.name} is rented by GKE, not as a TPU VM of Cloud TPU, which has slices of "
            f"{', '.join(RUNTIMES)}. {suggest_launcher(wanted)}"
        )


def as_yaml(order: TpuVmJob) -> str:
    """Formats the request as a flags file of `gcloud`, with the command for it in a comment."""
    name = job.make_unique_name(order.config)
    request = order.build_request(name)
    node = request["tpu"]["nodeSpec"][0]["node"]
    names: dict[str, Any] = {"--node-id": name}
    if order.slice.slices > 1:
        names = {"--node-count": order.slice.slices, "--node-prefix": name}
    flags = {
        "--project": order.project,
        "--zone": order.zone,
        **names,
        "--accelerator-type": node["acceleratorType"],
        "--runtime-version": node["runtimeVersion"],
        "--valid-until-duration": request["queueingPolicy"]["validUntilDuration"],
        "--scopes": node["serviceAccount"]["scope"],
        "--labels": node["labels"],
        "--metadata": node["metadata"],
    }
    if order.service_account:
        flags["--service-account"] = order.service_account
    if order.spot:
        flags["--spot"] = None
    command = f"gcloud compute tpus queued-resources create {name} --flags-file=FILE"
    return order.format_request(command, flags)


def describe_price(wanted: Slice, steps: int | None, preflight: str | None, spot: bool) -> str:
    """Returns a line with a slice's price per hour, and with `preflight` the price of the steps.

    Args:
        wanted: the slice.
        steps: number of steps of the run; None if it is unknown.
        preflight: path of the JSON that `tftpu preflight` wrote; None if there is none.
        spot: whether the slice is rented at the lower, changing spot price.

    Raises:
        UserError: the file has no price for the slice, or the step does not run on it.
    """
    hourly = wanted.chips * wanted.generation.usd_hour
    less = "; less as a spot slice, whose price changes" if spot else ""
    text = f"{wanted.name} costs {hourly:.2f} USD an hour ({PRICE_SOURCE}{less})."
    if preflight is None:
        return (
            f"{text} `tftpu preflight --slices={wanted.name} --json=FILE` estimates the time, and "
            "--preflight=FILE then shows the total."
        )
    try:
        found = json.loads(Path(preflight).read_text())["slices"]
        item = next(item for item in found if item["slice"] == wanted.name)
        if not item.get("fits", True):
            raise UserError(
                f"--preflight={preflight}: by that report, the step is not known to run on "
                f"{wanted.name}. `tftpu preflight --report={preflight}` shows why."
            )
        total = max(item["usd_per_1000_steps"] * (steps or 1000) / 1000, 0.01)
    except (OSError, ValueError, KeyError, TypeError, StopIteration) as error:
        raise UserError(
            f"--preflight={preflight} has no price for {wanted.name}: make the report with `tftpu "
            f"preflight --slices={wanted.name} --json={preflight}`."
        ) from error
    estimate = f"steps are estimated at {total:.2f} USD, without start-up and evaluation."
    if steps is None:
        return (
            f"{text} 1,000 {estimate} The number of steps of the run is not known here, because "
            "its length is given in epochs and the number of examples of the data is unknown."
        )
    return f"{text} {steps:,} {estimate}"
