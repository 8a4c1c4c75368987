"""A rented slice: its name, and the folder in a bucket to which its run reports."""

import dataclasses
import re
import shlex
from typing import TYPE_CHECKING

from tftpu.errors import UserError
from tftpu.tpu.slices import Slice, parse_slice

if TYPE_CHECKING:
    from google.cloud.tpu_v2 import QueuedResource


@dataclasses.dataclass(frozen=True, kw_only=True)
class RentedSlice:
    """A slice that was requested under a unique name, and the run on it.

    Attributes:
        name: name of the request.
        project: project of Google Cloud that pays.
        zone: zone of the slice.
        slice: the slice, or several.
        folder: "gs://" folder to which worker 0 writes its log and exit code. The other workers
            write to the folders `worker-1`, `worker-2`, … in it.
        timeout: longest time of the run, in seconds.
        keep: whether the slice stays after the run.
    """

    name: str
    project: str
    zone: str
    slice: Slice
    folder: str
    timeout: int
    keep: bool

    @property
    def resource(self) -> str:
        """The resource name of the request."""
        return format_resource(self.project, self.zone, self.name)

    def build_delete_command(self) -> list[str]:
        """Returns the command that deletes the slice."""
        command = ["gcloud", "compute", "tpus", "queued-resources", "delete", self.name, "--force"]
        return [*command, "--quiet", f"--project={self.project}", f"--zone={self.zone}"]

    def format_attach_command(self) -> str:
        """Returns the command that follows the run again."""
        place = [f"--zone={self.zone}", f"--project={self.project}"]
        return shlex.join(["tftpu", "launch", "tpu-vm-attach", self.name, *place])

    def resolve_log(self, worker: int) -> str:
        """Returns the address of the file with the output of a worker."""
        return f"{self.folder}/{name_log(worker)}"


def name_log(worker: int) -> str:
    """Returns the path, in `RentedSlice.folder`, of the file with the output of a worker."""
    return f"{f'worker-{worker}/' if worker else ''}log.txt"


def format_resource(project: str, zone: str, name: str) -> str:
    """Returns the resource name of a request."""
    return f"projects/{project}/locations/{zone}/queuedResources/{name}"


def from_resource(found: "QueuedResource") -> RentedSlice:
    """Returns the slice of a request, with the values that are in the request's startup script.

    Raises:
        UserError: the slice was not requested by `tftpu launch tpu-vm`.
    """
    _, project, _, zone, _, name = found.name.split("/")
    specs = list(found.tpu.node_spec)
    script = specs[0].node.metadata.get("startup-script", "") if specs else ""
    values = {
        key: shlex.split(text.strip("()"))
        for key, text in re.findall(r"^(folder|limit|delete)=(.+)$", script, re.M)
    }
    if values.keys() != {"folder", "limit", "delete"}:
        raise UserError(f"{name} in {zone} is not a slice that `tftpu launch tpu-vm` requested.")
    count = specs[0].multislice_params.node_count
    single = specs[0].node.accelerator_type.replace("v5litepod", "v5e")
    return RentedSlice(
        name=name,
        project=project,
        zone=zone,
        slice=parse_slice(f"{count}x{single}" if count > 1 else single),
        folder=values["folder"][0],
        timeout=int(values["limit"][0]),
        keep=not values["delete"],
    )
