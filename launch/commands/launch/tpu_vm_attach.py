"""Follows a run that `tftpu launch tpu-vm` started, after its terminal was closed.

At the end of the run the slice is deleted, unless it was requested with --keep.

    tftpu launch tpu-vm-attach gpt-1122-14d641 --zone=us-west4-a
"""

import dataclasses

from tftpu.launch.cloud.options import ProjectOptions
from tftpu.launch.settings.options import required


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(ProjectOptions):
    """The slice whose run is followed."""

    name: str = required(
        "NAME", "name of the slice, as `tftpu launch tpu-vm` printed it", word=True
    )
    zone: str = required("ZONE", "zone of the slice, such as us-west4-a")


def run(options: Options) -> None:
    """Prints the output of the run's first worker until its end; deletes the slice unless kept.

    A preempted slice is always deleted. After Ctrl-C, or if following fails, none is deleted.

    Raises:
        UserError: there is no such slice, no capacity for it, it was preempted, or the run failed.
    """
    project = options.resolve_project("google.cloud.tpu_v2", dry_run=False)
    from tftpu.launch.cloud.tpu_vm import client

    client.attach(client.create_client(), project, options.zone, options.name)
