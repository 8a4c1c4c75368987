"""`tftpu launch tpu-vm`: a slice is rented, trains a config, and is given back.

The request is a dictionary in the words of the REST interface
(https://cloud.google.com/tpu/docs/reference/rest/v2/projects.locations.queuedResources).
"""

import dataclasses
import json
import shlex
import sys
from pathlib import Path

import yaml

from tftpu.config import Experiment
from tftpu.errors import UserError
from tftpu.launch.cloud import google_cloud, job, tpu_vm_client
from tftpu.tpu.slices import PRICE_SOURCE, Slice, parse_slice
from tftpu.version import __version__

# The image of each generation: https://cloud.google.com/tpu/docs/runtimes
RUNTIMES = {
    "v2": "tpu-ubuntu2204-base",
    "v3": "tpu-ubuntu2204-base",
    "v4": "tpu-ubuntu2204-base",
    "v5e": "v2-alpha-tpuv5-lite",
    "v5p": "v2-alpha-tpuv5",
    "v6e": "v2-alpha-tpuv6e",
}
_CHIPS_OF_A_HOST = {"v5e": 8, "v6e": 8}  # 4 for all others
_SCOPE = "https://www.googleapis.com/auth/cloud-platform"


@dataclasses.dataclass(frozen=True)
class Order:
    """What is to be rented, and what it is to run.

    Attributes:
        config: name of a config, or path of a user's own, which travels with the request.
        overrides: "--config.train.steps=500" and the like, handed on as they are.
        workdir: "gs://bucket/folder"; the run lies there.
        package: what pip installs on the machine, or a wheel in a bucket.
        queue_timeout: how long to wait for capacity, as "24h".
        spot: cheaper, may be preempted; the run then goes on, on another slice.
    """

    config: str
    overrides: list[str]
    slice: Slice
    project: str
    zone: str
    workdir: str
    package: str
    service_account: str | None = None
    labels: str = ""
    queue_timeout: str = "24h"
    spot: bool = False

    @property
    def parent(self) -> str:
        return f"projects/{self.project}/locations/{self.zone}"

    def folder(self, name: str) -> str:
        """Where the machine reports what it prints and how it ended."""
        return f"{self.workdir}/launch/{name}"

    def request(self, name: str) -> dict:
        """The QueuedResource that is asked for, as the REST interface writes it."""
        node = {
            "acceleratorType": self.slice.name.replace("v5e", "v5litepod"),
            "runtimeVersion": RUNTIMES[self.slice.generation.name],
            "networkConfig": {"enableExternalIps": True},
            "serviceAccount": {"scope": [_SCOPE]},
            "labels": job.labels(self.config, self.slice.name, self.labels),
            "metadata": {"startup-script": self.startup_script(name)},
        }
        if self.service_account:
            node["serviceAccount"]["email"] = self.service_account
        wanted = {
            "tpu": {"nodeSpec": [{"parent": self.parent, "nodeId": name, "node": node}]},
            "queueingPolicy": {"validUntilDuration": f"{job.seconds(self.queue_timeout)}s"},
        }
        if self.spot:
            wanted["spot"] = {}
        return wanted

    def startup_script(self, name: str) -> str:
        """What the machine runs; every value in it is quoted."""
        own = self.config.endswith(".py")
        arguments = [*self.overrides, f"--workdir={self.workdir}", "--tpu=local"]
        if not own:
            arguments = ["train", f"--config={self.config}", *arguments]
        values = {
            "name": job.name_of(self.config).replace("-", "_"),
            "folder": self.folder(name),
            "package": self.package,
            "config_text": Path(self.config).read_text() if own else "",
        }
        lines = [f"{key}={shlex.quote(value)}" for key, value in values.items()]
        lines.append(f"arguments=({shlex.join(arguments)})")
        body = (Path(__file__).parent / "startup.sh").read_text()
        return "\n".join(["#!/bin/bash", *lines, body])


def run(
    experiment: Experiment,
    config: str,
    overrides: list[str],
    slice: str,
    zone: str | None,
    workdir: str | None,
    package: str | None,
    project: str | None,
    service_account: str | None,
    labels: str,
    queue_timeout: str,
    preflight: str | None,
    spot: bool,
    keep: bool,
    yes: bool,
    dry_run: bool,
) -> None:
    """Prints the request, or rents the slice, trains on it and gives it back.

    Raises:
        UserError: a value that Cloud TPU would refuse, something that it needs and that was not
            given, no capacity or quota, or the run's own failure.
    """
    wanted = _one_host(parse_slice(slice))
    experiment.validate(replicas=wanted.replicas)
    if dry_run:  # prints placeholders for what is not given
        project, zone = project or "PROJECT", zone or "ZONE"
        workdir = workdir or f"gs://BUCKET/{job.name_of(config)}"
    else:
        google_cloud.require("google.cloud.tpu_v2")
        project = google_cloud.project(project)
    if not zone:
        raise UserError("In which zone? Write --zone=ZONE, as --zone=us-west4-a.")
    job.check_bucket_folder("workdir", workdir or "")
    order = Order(
        config,
        overrides,
        wanted,
        project,
        zone,
        workdir.rstrip("/"),
        package or f"tftpu[tpu]=={__version__}",
        service_account,
        labels,
        queue_timeout,
        spot,
    )
    if dry_run:
        print(as_yaml(order), end="")
        return
    order.request(job.unique_name(order.config))  # a mistake in it is found before the question
    print(price(wanted, experiment.train.steps, preflight, spot))
    if not yes:
        _ask()
    tpu_vm_client.train(tpu_vm_client.tpu_client(), order, keep)


def as_yaml(order: Order) -> str:
    """The request as a file of flags for `gcloud`, under the command that takes it."""
    name = job.unique_name(order.config)
    request = order.request(name)
    node = request["tpu"]["nodeSpec"][0]["node"]
    flags = {
        "--project": order.project,
        "--zone": order.zone,
        "--node-id": name,
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
    command = f"# gcloud compute tpus queued-resources create {name} --flags-file=FILE\n"
    return command + yaml.dump(flags, Dumper=_Dumper, sort_keys=False)


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines as such, so that the script can be read."""


_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar(
        "tag:yaml.org,2002:str", text, style="|" if "\n" in text else None
    ),
)


def price(wanted: Slice, steps: int, preflight: str | None, spot: bool) -> str:
    """What the slice costs by the hour, and the run as a whole if preflight has looked at it.

    Args:
        wanted: the slice.
        steps: of the run.
        preflight: path of the JSON that `tftpu preflight` wrote.
        spot: whether it is rented at the lower, changing price.

    Raises:
        UserError: the file has nothing about the slice.
    """
    hourly = wanted.chips * wanted.generation.usd_hour
    less = "; as a spot slice less, by the day's price" if spot else ""
    text = f"{wanted.name} costs {hourly:.2f} USD an hour ({PRICE_SOURCE}{less})."
    if preflight is None:
        return (
            f"{text} `tftpu preflight --slices={wanted.name} --json=FILE` estimates the time, and "
            "--preflight=FILE then shows the total."
        )
    try:
        found = json.loads(Path(preflight).read_text())["slices"]
        usd = next(s["usd_per_1000_steps"] for s in found if s["slice"] == wanted.name)
        total = max(usd * steps / 1000, 0.01)
    except (OSError, ValueError, KeyError, TypeError, StopIteration) as error:
        raise UserError(
            f"--preflight={preflight} says no price for {wanted.name}: make it with `tftpu "
            f"preflight --slices={wanted.name} --json={preflight}`."
        ) from error
    return (
        f"{text} {steps} steps are estimated at {total:.2f} USD, without starting and evaluation."
    )


def _ask() -> None:
    if not sys.stdin.isatty():
        raise UserError("Nobody is there to be asked whether to rent it: add --yes.")
    if input("Rent it? [y/N] ").strip().lower() not in ("y", "yes"):
        raise UserError("Not rented.")


def _one_host(wanted: Slice) -> Slice:
    generation = wanted.generation.name
    chips = _CHIPS_OF_A_HOST.get(generation, 4)
    if wanted.chips <= chips:
        return wanted
    largest = chips * wanted.generation.counted
    raise UserError(
        f"{wanted.name} has several hosts, and tftpu drives one: TensorFlow reaches the TPUs of "
        "other hosts through a server that only Google's older TensorFlow images run. The largest "
        f"slice of one host is {generation}-{largest}."
    )
