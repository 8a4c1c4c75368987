"""Names, labels, durations and commands of cloud jobs, for all launchers."""

import re
import secrets
import sys
import time
from pathlib import Path

import yaml

from tftpu.errors import UserError
from tftpu.launch.cloud.shipping.shipment import Shipment
from tftpu.version import __version__

_UNITS = {"m": 60, "h": 3600, "d": 86400}


def to_resource_name(config: str) -> str:
    """Converts a config's name to one for resources of Google Cloud: a-z, 0-9 and dashes."""
    stem = Path(config).name.removesuffix(".py").lower()
    name = re.sub(r"[^a-z0-9]+", "-", stem).strip("-")
    return name if name[:1].isalpha() else f"run-{name}".rstrip("-")


def make_unique_name(config: str) -> str:
    """Returns a unique name, by which a job is found if its creation request got no answer."""
    name = to_resource_name(config)[:24].rstrip("-")
    return f"{name}-{time.strftime('%m%d')}-{secrets.token_hex(3)}"


def build_container_command(
    shipment: Shipment, workdir: str, arguments: list[str], *, before: str = ""
) -> list[str]:
    """Returns the command of a container that installs what was shipped, and trains.

    Args:
        shipment: the files that travel to it.
        workdir: folder of the run in a bucket.
        arguments: further flags of `tftpu train`.
        before: lines of bash that run first, and may change the array `arguments`.
    """
    setup = build_container_setup(shipment, workdir, arguments)
    lines = [setup, *([before] if before else []), "receive\ninstall\ntrain"]
    return ["bash", "-c", "\n".join(lines)]


def build_container_setup(shipment: Shipment, workdir: str, arguments: list[str]) -> str:
    """Returns the shell functions of that command, and its values."""
    lines = [
        "set -eu",
        # As process 1 of a container, a shell ignores signals that it has no trap for.
        "trap 'exit 143' TERM",
        'home="${TFTPU_HOME:-/tmp/tftpu}"',
        # tftpu's image brings the TensorFlow for TPUs, which the JAX engine's would overwrite.
        *(["unset TFTPU_VENV"] if shipment.engine == "jax" else []),
        shipment.build_script(workdir, arguments),
    ]
    return "\n".join(lines)


def to_comments(text: str) -> str:
    """Returns lines as comments of YAML."""
    return "".join(f"# {line}".rstrip() + "\n" for line in text.splitlines())


def confirm(question: str, flag: str, declined: str) -> None:
    """Asks on the terminal.

    Args:
        question: such as "Rent it?".
        flag: that answers it beforehand.
        declined: message if the answer is no.

    Raises:
        UserError: the answer is no, or there is no terminal.
    """
    if not sys.stdin.isatty():
        raise UserError(f"There is no terminal to ask for confirmation: add {flag}.")
    if input(f"{question} [y/N] ").strip().lower() not in ("y", "yes"):
        raise UserError(declined)


def confirm_data(shipment: Shipment, send_data: bool) -> None:
    """Asks before data and exports in the config's folder are sent; raises as `confirm` does."""
    found = ", ".join(f"{name} ({size / 1e6:,.1f} MB)" for name, size in shipment.data.items())
    if found and not send_data:
        print(f"Data or exports are in the config's folder, and would travel: {found}.", flush=True)
        declined = "Not sent: name what should stay in .gitignore, or move it out of the folder."
        try:
            confirm("Send them, too?", "--send_data", declined)
        except UserError as error:
            raise UserError(f"Of {shipment.folder}, {found} would travel. {error}") from None


def check_bucket_folder(flag: str, path: str) -> None:
    """Raises `UserError` unless the path is in a bucket."""
    if any(sign in path for sign in "\"'\\"):  # it travels inside of JSON and of scripts
        raise UserError(f"--{flag}={path} has a quote or a backslash in it: choose another name.")
    if not re.fullmatch(r"gs://[^/\s]+(/\S*)?", path):
        raise UserError(
            f"--{flag}={path} is not in a bucket: write gs://BUCKET/FOLDER, because files on the "
            "machine are deleted with it."
        )


def parse_duration(flag: str, duration: str) -> int:
    """Converts "90m", "24h" or "7d" to seconds.

    Args:
        flag: name of the flag, for the error.
        duration: its value.

    Raises:
        UserError: the value is not of that form.
    """
    match = re.fullmatch(r"(\d+)([mhd])", duration)
    if not match or not int(match[1]):
        raise UserError(
            f"--{flag}={duration} is not a time: write a number of minutes, hours or days, as "
            "90m, 24h or 7d."
        )
    return int(match[1]) * _UNITS[match[2]]


def build_labels(config: str, slice_name: str, given: str) -> dict[str, str]:
    """Returns the labels of a job: tftpu's own, and those of `--labels=key=value,key=value`.

    Raises:
        UserError: a label that Google Cloud does not allow.
    """
    own = {
        "tftpu": __version__.replace(".", "-"),
        "config": to_resource_name(config)[:63].rstrip("-"),
        "slice": slice_name,
    }
    for item in filter(None, given.split(",")):
        key, equals, value = item.partition("=")
        # Kubernetes wants a letter or digit at both ends; Google Cloud allows the rest alike.
        if not equals or not re.fullmatch(r"[a-z]([a-z0-9_-]{0,61}[a-z0-9])?", key):
            raise UserError(
                f"--labels={given}: {item!r} is not key=value with a key of lower-case letters, "
                "digits, _ and - that begins with a letter and ends with no _ or -."
            )
        if not re.fullmatch(r"([a-z0-9]([a-z0-9_-]{0,61}[a-z0-9])?)?", value):
            raise UserError(
                f"--labels={given}: the value {value!r} may hold lower-case letters, digits, and "
                "between them _ and -, 63 at most."
            )
        if key in own:
            raise UserError(f"--labels={given}: tftpu itself sets the label {key!r}.")
        own[key] = value
    return own


class Dumper(yaml.SafeDumper):
    """A dumper of multi-line strings as blocks, so that the script is readable."""


Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar(
        "tag:yaml.org,2002:str", text, style="|" if "\n" in text else None
    ),
)
