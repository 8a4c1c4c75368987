"""Finds the TPU of this machine, the process that uses it, and wrong environment variables."""

import glob
import os
from pathlib import Path

from tftpu.errors import counted
from tftpu.launch.diagnosis.machine import Machine, Problem
from tftpu.tpu.environment import FROM_V5E, UP_TO_V4

LOCKFILE = "/tmp/libtpu_lockfile"
_VARIABLES = (
    *("TPU_NAME", "PJRT_DEVICE", "NEXT_PLUGGABLE_DEVICE_USE_C_API"),
    *("TF_PLUGGABLE_DEVICE_LIBRARY_PATH", "TPU_LIBRARY_PATH", "TPU_VISIBLE_CHIPS"),
    *("TPU_WORKER_ID", "TPU_WORKER_HOSTNAMES", "TPU_ACCELERATOR_TYPE", "TPU_TOPOLOGY"),
)


def list_devices(machine: Machine) -> list[str]:
    """Returns the device files of the TPU chips attached to the machine."""
    return [path for pattern in (UP_TO_V4, FROM_V5E) for path in machine.find_files(pattern)]


def describe(machine: Machine) -> dict[str, str]:
    """Returns the facts for the top of the report: TPU chips and environment variables."""
    chips = list_devices(machine)
    variables = [
        f"{name}={machine.environ[name]}" for name in _VARIABLES if name in machine.environ
    ]
    return {
        "TPU": f"{counted(len(chips), 'chip')} attached" if chips else "none attached",
        "TPU variables": ", ".join(variables) or "none set",
    }


def find_problems(machine: Machine) -> list[Problem]:
    """Finds what keeps TensorFlow from using the TPU, except for problems with packages."""
    if list_devices(machine):
        found = [
            _find_holder(machine) or _find_stale_lockfile(machine),
            _find_wrong_pjrt_device(machine),
        ]
    else:
        found = [_find_missing_tpu(machine)]
    found.append(_find_missing_library(machine))
    return [problem for problem in found if problem]


def _find_holder(machine: Machine) -> Problem | None:
    chips = {os.path.relpath(path, machine.root) for path in list_devices(machine)}
    for process in map(Path, machine.find_files("/proc/[0-9]*")):
        if process.name != str(os.getpid()) and chips & _open_files(process):
            words = _read(process / "cmdline").replace("\0", " ").strip()[:80]
            return Problem(
                "tpu-held",
                f"Process {process.name} ({words}){_describe_framework(process)} is using the TPU.",
                "Only one process at a time can use a TPU: others find no devices.",
                f"kill {process.name}",
            )
    return None


def _open_files(process: Path) -> set[str]:
    """Returns the files that a process has open, relative to the root; none without permission."""
    links = glob.glob(f"{process}/fd/*")
    return {_read_link(link).lstrip("/") for link in links}


def _read_link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:  # the process has closed the file meanwhile
        return ""


def _describe_framework(process: Path) -> str:
    maps = _read(process / "maps")
    for library, name in (("jaxlib", "JAX"), ("_XLAC", "torch_xla"), ("tensorflow", "TensorFlow")):
        if library in maps:
            return f", which runs {name},"
    return ""


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _find_stale_lockfile(machine: Machine) -> Problem | None:
    if not machine.resolve_path(LOCKFILE).exists():
        return None
    return Problem(
        "stale-lockfile",
        f"{LOCKFILE} exists, although no process of yours uses the TPU.",
        'A process that died left it; TensorFlow then fails with "No matching devices found for '
        "'/device:TPU_SYSTEM:0'\".",
        f"sudo rm {LOCKFILE}",
    )


def _find_wrong_pjrt_device(machine: Machine) -> Problem | None:
    device = machine.environ.get("PJRT_DEVICE", "TPU")
    if device.upper() == "TPU":
        return None
    return Problem(
        "pjrt-device",
        f"PJRT_DEVICE is {device!r}, and this machine has a TPU.",
        "The TPU is not used.",
        "export PJRT_DEVICE=TPU",
    )


def _find_missing_tpu(machine: Machine) -> Problem | None:
    means_here = {"TPU_NAME": "local", "PJRT_DEVICE": "TPU"}
    asked = [f"{name}={v}" for name, v in means_here.items() if machine.environ.get(name) == v]
    if not asked:
        return None
    return Problem(
        "no-tpu",
        f"{' and '.join(asked)} asks for the TPU of this machine, which has none attached.",
        'TensorFlow waits for seconds and fails with "No matching devices found for '
        "'/device:TPU_SYSTEM:0'\". On Colab and Kaggle the runtime type decides whether there is "
        "a TPU.",
        f"unset {' '.join(pair.partition('=')[0] for pair in asked)}",
    )


def _find_missing_library(machine: Machine) -> Problem | None:
    for name in ("TF_PLUGGABLE_DEVICE_LIBRARY_PATH", "TPU_LIBRARY_PATH"):
        path = machine.environ.get(name)
        if path and not machine.resolve_path(path).exists():
            return Problem(
                "library-path",
                f"{name} is {path}, which does not exist.",
                "TensorFlow loads no libtpu and finds no TPU.",
                f"unset {name}",
            )
    return None
