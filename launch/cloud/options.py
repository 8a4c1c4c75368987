"""The flags that all launchers share."""

import dataclasses
import os
import sys
from typing import Any

from tftpu.errors import UserError
from tftpu.launch.cloud import google_cloud, job
from tftpu.launch.cloud.shipping import shipment
from tftpu.launch.settings.options import TIME, ConfigOptions, flag
from tftpu.tpu.slices import Slice


def print_dry_run(request: str, **flags: str | None) -> None:
    """Prints the request of a dry run, and on stderr the required flags that are missing.

    Args:
        request: the request as YAML.
        flags: values of the required flags, by name; None if a flag is missing.
    """
    print(request, end="")
    missing = [f"--{name}" for name, value in flags.items() if not value]
    if missing:
        print(
            f"tftpu: this dry run lacks flags that are needed without it: {', '.join(missing)}. "
            "Placeholders stand for them.",
            file=sys.stderr,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProjectOptions:
    """The Google Cloud project that pays."""

    project: str | None = flag(
        None, "project of Google Cloud that pays", metavar="PROJECT", shown="GOOGLE_CLOUD_PROJECT"
    )

    def resolve_project(self, client: str, dry_run: bool) -> str:
        """Returns `--project`; by default GOOGLE_CLOUD_PROJECT, or in a dry run a placeholder.

        Args:
            client: the module of the client library that the request needs.
            dry_run: whether the request is only printed.

        Raises:
            UserError: there is no project, or the library is not installed.
        """
        if dry_run:
            return self.project or "PROJECT"
        google_cloud.require(client)
        found = self.project or os.environ.get("GOOGLE_CLOUD_PROJECT")
        if not found:
            raise UserError("No Google Cloud project is given: write --project=PROJECT.")
        return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobOptions(ConfigOptions):
    """The config to run, and the machines for it."""

    slice: str = flag("v3-8", "TPU slice, such as v5e-4", metavar="SLICE", aliases=("slices",))
    workdir: str | None = flag(None, "gs://BUCKET/FOLDER of the run (required)", metavar="DIR")
    package: str | None = flag(
        None,
        "wheel, local or in a bucket, or requirement that the machines install",
        metavar="PACKAGE",
        shown="the tftpu that is running",
    )
    service_account: str | None = flag(
        None, "e-mail address that the machine runs as", metavar="EMAIL", shown="the default one"
    )
    labels: str = flag("", "labels in addition to tftpu's own", metavar="KEY=VALUE,...")
    timeout: float = flag(604_800.0, "time limit of the run", metavar=TIME, minimum=60)
    spot: bool = flag(False, "use cheaper machines, which may be preempted")
    send_data: bool = flag(False, "send data in the folder of the config without asking")
    dry_run: bool = flag(False, "print the request, and send nothing")

    def build_fields(self, wanted: Slice, trained_by: str) -> dict[str, Any]:
        """Returns the fields of a `CloudJob`; a dry run uses a placeholder for a missing workdir.

        Args:
            wanted: the slice.
            trained_by: name of the engine.

        Raises:
            UserError: the workdir is missing or not in a bucket, or a file cannot be sent.
        """
        workdir = self.workdir or ""
        if self.dry_run:
            workdir = workdir or f"gs://BUCKET/{job.to_resource_name(self.config)}"
        job.check_bucket_folder("workdir", workdir)
        return {
            "config": self.config,
            "overrides": self.overrides,
            "slice": wanted,
            "workdir": workdir.rstrip("/"),
            "shipment": shipment.pack(self.config, self.package, trained_by),
            "service_account": self.service_account,
            "labels": self.labels,
            "timeout": int(self.timeout),
            "spot": self.spot,
        }
