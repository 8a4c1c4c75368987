"""A run on rented machines: the fields, names, labels and commands that all launchers share."""

import dataclasses
import re
import secrets
import sys
import time
from pathlib import Path
from typing import Any

import yaml

from tftpu.errors import UserError
from tftpu.launch.cloud.shipping.shipment import Shipment
from tftpu.launch.diagnosis import cloud
from tftpu.launch.diagnosis.machine import Machine
from tftpu.tpu.slices import Slice
from tftpu.version import __version__

VERSION_LABEL = {"tftpu": __version__.replace(".", "-")}


@dataclasses.dataclass(frozen=True, kw_only=True)
class CloudJob:
    """A run on rented machines.

    Attributes:
        config: name of a config, or path of a user's config file.
        overrides: overrides of the config, such as "--config.train.steps=500".
        slice: the slice, or several slices. Every host runs the same command.
        workdir: "gs://bucket/folder" of the run.
        shipment: the files that are sent to the machines.
        service_account: account that the machines run as; None means the default one.
        labels: "key=value,key=value", in addition to tftpu's own.
        timeout: longest time of the run on these machines, in seconds.
        spot: whether the machines are cheaper, but may be preempted; the run then resumes.
    """

    config: str
    overrides: tuple[str, ...] = ()
    slice: Slice
    workdir: str
    shipment: Shipment
    service_account: str | None = None
    labels: str = ""
    timeout: int = 604_800
    spot: bool = False

    def build_labels(self) -> dict[str, str]:
        """Returns the labels of a job: those that tftpu sets, and those in the field `labels`.

        Raises:
            UserError: Google Cloud does not allow a label, or tftpu itself sets it.
        """
        own = {
            **VERSION_LABEL,
            "config": to_resource_name(self.config)[:63].rstrip("-"),
            "slice": self.slice.name,
        }
        for item in filter(None, self.labels.split(",")):
            key, equals, value = item.partition("=")
            # Only Kubernetes requires a letter or a digit at both ends; the other rules are Google
            # Cloud's as well.
            if not equals or not re.fullmatch(r"[a-z]([a-z0-9_-]{0,61}[a-z0-9])?", key):
                raise UserError(
                    f"--labels={self.labels}: {item!r} is not key=value. A key has lower-case "
                    "letters, digits, _ and -; it begins with a letter, and ends with a letter "
                    "or a digit."
                )
            if not re.fullmatch(r"([a-z0-9]([a-z0-9_-]{0,61}[a-z0-9])?)?", value):
                raise UserError(
                    f"--labels={self.labels}: the value {value!r} must have at most 63 lower-case "
                    "letters, digits, _ and -, and begin and end with a letter or a digit."
                )
            if key in own:
                raise UserError(
                    f"--labels={self.labels}: tftpu itself sets the label {key!r}. Leave it out."
                )
            own[key] = value
        return own

    def build_arguments(self, workdir: str) -> list[str]:
        """Returns the flags of `tftpu train` on the machines, besides the config."""
        return [*self.overrides, f"--workdir={workdir}", "--tpu=local"]

    def format_request(self, command: str, request: dict[str, Any]) -> str:
        """Formats a request as YAML, with its command and the list of files to send in comments.

        Args:
            command: the shell command that reads the YAML from FILE, or another first line.
            request: content of the YAML.
        """
        return format_yaml(f"{command}\n\n{self.shipment.describe(self.workdir)}", request)

    def ship(self) -> None:
        """Uploads the run's files; raises `UserError` if the bucket cannot be written."""
        bucket = self.workdir.removeprefix("gs://").partition("/")[0]
        for problem in cloud.find_problems(Machine(), [bucket]):
            raise UserError(f"{problem.what} {problem.why} Fix it with `{problem.command}`.")
        self.shipment.upload(self.workdir)

    def confirm_shipment(self, send_data: bool) -> None:
        """Prints what is sent, and asks before data are sent; raises `UserError` if refused."""
        print(self.shipment.describe(self.workdir))
        confirm_data(self.shipment, send_data)


def to_resource_name(config: str) -> str:
    """Converts a config's name to a name for Google Cloud resources: a-z, 0-9 and dashes."""
    stem = Path(config).name.removesuffix(".py").lower()
    name = re.sub(r"[^a-z0-9]+", "-", stem).strip("-")
    return name if name[:1].isalpha() else f"run-{name}".rstrip("-")


def make_unique_name(config: str) -> str:
    """Returns a unique name; a job is found by it if the request that creates it got no answer."""
    name = to_resource_name(config)[:24].rstrip("-")
    return f"{name}-{time.strftime('%m%d')}-{secrets.token_hex(3)}"


def build_container_command(
    shipment: Shipment, workdir: str, arguments: list[str], *, before: str = ""
) -> list[str]:
    """Returns the command of a container that installs the files that were sent, and trains.

    Args:
        shipment: the files that are sent to it.
        workdir: folder of the run in a bucket.
        arguments: further flags of `tftpu train`.
        before: lines of bash that run first, and may change the array `arguments`.
    """
    setup = build_container_setup(shipment, workdir, arguments)
    lines = [setup, *([before] if before else []), "receive\ninstall\ntrain"]
    return ["bash", "-c", "\n".join(lines)]


def build_container_setup(shipment: Shipment, workdir: str, arguments: list[str]) -> str:
    """Returns the shell functions and variables with which a container's command begins."""
    lines = [
        "set -eu",
        # A shell that is process 1 of a container ignores every signal that it does not trap.
        "trap 'exit 143' TERM",
        'home="${TFTPU_HOME:-/tmp/tftpu}"',
        # Otherwise JAX's packages would overwrite TensorFlow for TPUs in the image's environment.
        *(["unset TFTPU_VENV"] if shipment.engine == "jax" else []),
        shipment.build_script(workdir, arguments),
    ]
    return "\n".join(lines)


def format_yaml(comment: str, content: Any) -> str:
    """Formats content as YAML that begins with a comment."""
    head = "".join(f"# {line}".rstrip() + "\n" for line in comment.splitlines())
    return head + yaml.dump(content, Dumper=_Dumper, sort_keys=False)


def confirm(question: str, flag: str, declined: str) -> None:
    """Asks for confirmation on the terminal.

    Args:
        question: the question, such as "Rent it?".
        flag: the flag that answers the question beforehand.
        declined: the message if the answer is no.

    Raises:
        UserError: the answer is no, or there is no terminal.
    """
    if not sys.stdin.isatty():
        raise UserError(f"There is no terminal to ask for confirmation: add {flag}.")
    if input(f"{question} [y/N] ").strip().lower() not in ("y", "yes"):
        raise UserError(declined)


def confirm_data(shipment: Shipment, send_data: bool) -> None:
    """Asks before data in the config's folder are sent; raises `UserError` if not confirmed."""
    found = ", ".join(f"{name} ({size / 1e6:,.1f} MB)" for name, size in shipment.data.items())
    if found and not send_data:
        print(
            f"The config's folder contains data or exports, which would be sent: {found}.",
            flush=True,
        )
        declined = (
            "Nothing is sent: list what should stay here in .gitignore, or move it elsewhere."
        )
        try:
            confirm("Send them, too?", "--send_data", declined)
        except UserError as error:
            raise UserError(f"{found} in {shipment.folder} would be sent. {error}") from None


def check_bucket_folder(flag: str, path: str) -> None:
    """Raises `UserError` unless a flag's path is in a bucket and has no quotes or backslashes."""
    # The path is written into JSON and into shell scripts.
    if any(sign in path for sign in "\"'\\"):
        raise UserError(f"--{flag}={path} contains a quote or a backslash: choose another name.")
    if not re.fullmatch(r"gs://[^/\s]+(/\S*)?", path):
        problem = f"--{flag}={path} is not in a bucket" if path else f"--{flag}=DIR is needed"
        raise UserError(
            f"{problem}: write gs://BUCKET/FOLDER, because files on the "
            "machine are deleted with it."
        )


class _Dumper(yaml.SafeDumper):
    """A YAML dumper that writes multi-line strings as blocks, so that scripts are readable."""


_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar(
        "tag:yaml.org,2002:str", text, style="|" if "\n" in text else None
    ),
)
