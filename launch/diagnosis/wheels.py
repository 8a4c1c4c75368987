"""Examines the installed packages: TensorFlow's wheels, their files, and matching packages."""

import base64
import csv
import hashlib
import io
import re
from importlib.metadata import Distribution
from pathlib import Path

from tftpu import installation
from tftpu.errors import counted
from tftpu.launch.diagnosis.machine import Machine, Problem
from tftpu.tpu import environment
from tftpu.tpu.hardware import find_attached_tpu
from tftpu.tpu.slices import GENERATIONS

WHEELS = ("tensorflow", "tensorflow-cpu", "tensorflow-tpu")
PYTHONS = ((3, 11), (3, 13))
# By release of tensorflow-tpu: the first libtpu with which it runs, and the first that is too new.
# Release 2.20.0 requires ~=0.0.14, which allows versions from 0.0.46 on. These lack
# ConfigureDistributedTpuOp_DoWork, so the import aborts.
LIBTPU = {"2.19": ("0.0.10", "0.0.11"), "2.20": ("0.0.14", "0.0.46")}
_TPU_WHEELS = "'tensorflow-tpu==2.20.0' 'libtpu==0.0.14'"
_HASHED_FILES = 12


def describe(machine: Machine) -> dict[str, str]:
    """Returns the facts for the top of the report: the versions of Python and of packages."""
    facts = {"Python": ".".join(map(str, machine.python))}
    installed = _find_installed(machine)
    owner = _find_owner(installed) if len(installed) > 1 else None
    names = [
        f"{name} {dist.version}" + (" (its files are in place)" if name == owner else "")
        for name, dist in installed.items()
    ]
    facts["TensorFlow"] = ", ".join(names) or "not installed"
    for package in ("libtpu", "keras", "tensorboard", "jax", "jaxlib", "torch-xla"):
        version = machine.find_version(package)
        if version or package in ("libtpu", "keras"):
            facts[package] = version or "not installed"
    return facts


def find_problems(machine: Machine, has_tpu: bool) -> list[Problem]:
    """Finds problems with the installed packages.

    Args:
        machine: the machine to examine.
        has_tpu: whether the machine has a TPU, which needs the TPU wheel.
    """
    installed = _find_installed(machine)
    by_jax = jax_drives_tpus(machine)
    for_jax = _find_jax_only_problem(machine, installed, by_jax) if has_tpu else None
    found = [
        _find_python_problem(machine),
        for_jax,
        *_find_tensorflow_problems(installed, has_tpu and not for_jax, by_jax),
        _find_jaxlib_problem(machine),
    ]
    if "tensorflow-tpu" in installed:
        found.append(_find_libtpu_problem(machine, installed["tensorflow-tpu"].version))
    found += [
        _find_setuptools_problem(machine),
        _find_tensorboard_problem(machine, installed),
        _find_keras_problem(machine),
        _find_importlib_resources_problem(machine),
        _find_metadata_problem(machine),
        _find_gcs_plugin_problem(machine, installed),
    ]
    return [problem for problem in found if problem]


def _find_python_problem(machine: Machine) -> Problem | None:
    if PYTHONS[0] <= machine.python <= PYTHONS[1]:
        return None
    version = ".".join(map(str, machine.python))
    return Problem(
        "python-version",
        f"This is Python {version}; tftpu runs on 3.11, 3.12 and 3.13.",
        "TensorFlow 2.20, the version with a TPU wheel, has no wheel for another Python. Make a "
        "new environment, and install tftpu there.",
        "python3.12 -m venv .venv",
    )


def jax_drives_tpus(machine: Machine) -> bool:
    """Returns whether JAX can use a TPU with a machine's packages, but TensorFlow cannot."""
    return environment.can_jax_drive_tpus(lambda name: machine.find_version(name) is not None)


def _find_jax_only_problem(
    machine: Machine, installed: dict[str, Distribution], by_jax: bool
) -> Problem | None:
    """Returns the problem of a TPU that only JAX supports, if JAX's packages for it are missing."""
    name = find_attached_tpu(str(machine.root), machine.environ)
    generation = GENERATIONS.get(name or "")
    if by_jax or generation is None or generation.supports_tensorflow:
        return None
    removed = "pip uninstall -y tensorflow-tpu && " if "tensorflow-tpu" in installed else ""
    return Problem(
        "jax-only-tpu",
        f"This machine has a {generation.name}, which TensorFlow does not support.",
        "The JAX engine trains on it, with jax, libtpu and a TensorFlow without TPU kernels, which "
        "reads the data.",
        removed + installation.command("jax-tpu"),
    )


def _find_tensorflow_problems(
    installed: dict[str, Distribution], has_tpu: bool, by_jax: bool
) -> list[Problem]:
    if not installed:
        extra = "tpu" if has_tpu else "cpu"
        return [
            Problem(
                "no-tensorflow",
                "No TensorFlow is installed.",
                "tftpu installs none by itself, because the wheels overwrite one another: an "
                "extra chooses one.",
                installation.command(extra),
            )
        ]
    if len(installed) > 1:
        return [_describe_several_wheels(installed, has_tpu)]
    ((name, distribution),) = installed.items()
    damaged = _find_damaged(distribution)
    if damaged:
        return [
            Problem(
                "damaged-wheel",
                f"{damaged[0]} and {counted(len(damaged) - 1, 'other file')} of {name} "
                f"{distribution.version} are missing or changed.",
                "Removing one TensorFlow wheel also deletes the files that it shares with another.",
                f"pip install --force-reinstall --no-deps '{name}=={distribution.version}'",
            )
        ]
    if has_tpu and name != "tensorflow-tpu" and not by_jax:
        return [
            Problem(
                "no-tpu-wheel",
                f"This machine has a TPU, and its TensorFlow is {name}, which cannot use it.",
                "It fails with \"No OpKernel was registered to support Op 'ConfigureDistributedTPU"
                "'\". The JAX engine can, with jax and libtpu from the extra jax-tpu.",
                f"pip uninstall -y {name} && pip install {_TPU_WHEELS}",
            )
        ]
    return []


def _describe_several_wheels(installed: dict[str, Distribution], has_tpu: bool) -> Problem:
    owner = _find_owner(installed)
    names = " and ".join(installed)
    loaded = f"the files in place are {owner}'s" if owner else "their files are mixed"
    wants_tpu = has_tpu or "tensorflow-tpu" in installed
    if wants_tpu and owner != "tensorflow-tpu":
        name = "clobbered-wheel"
        why = (
            "All of them own the folder tensorflow/ and the one installed last wins (often a "
            'dependency of tensorflow-text or keras-hub). A TPU then fails with "No OpKernel was '
            "registered to support Op 'ConfigureDistributedTPU'\"."
        )
    else:
        name = "several-wheels"
        why = (
            "All of them own the folder tensorflow/: the next install or uninstall of any of them "
            "breaks the others."
        )
    wheels = _TPU_WHEELS if wants_tpu else f"'{owner or 'tensorflow-cpu'}==2.20.*'"
    return Problem(
        name,
        f"{names} are installed together, and {loaded}.",
        why,
        f"pip uninstall -y {' '.join(installed)} && pip install {wheels}",
    )


def _find_libtpu_problem(machine: Machine, tensorflow: str) -> Problem | None:
    bounds = LIBTPU.get(".".join(tensorflow.split(".")[:2]))
    if bounds is None:
        return None
    low, high = bounds
    command = f"pip install 'libtpu=={low}'"
    libtpu = machine.find_version("libtpu")
    if libtpu is None:
        return Problem(
            "no-libtpu",
            f"tensorflow-tpu {tensorflow} is installed without libtpu.",
            "libtpu is the driver of the TPU: without it TensorFlow finds no TPU.",
            command,
        )
    if _parse_version(low) <= _parse_version(libtpu) < _parse_version(high):
        return None
    return Problem(
        "libtpu-version",
        f"libtpu {libtpu} does not match tensorflow-tpu {tensorflow}, which needs {low} or later, "
        f"but older than {high}.",
        "libtpu removes symbols without notice: with one that is too new, "
        "`import tensorflow` aborts (ConfigureDistributedTpuOp_DoWork not available in this "
        "library). jax and the preflight extra install such a version.",
        command,
    )


def _find_jaxlib_problem(machine: Machine) -> Problem | None:
    jax, jaxlib = machine.find_version("jax"), machine.find_version("jaxlib")
    if jax is None or (jaxlib is not None and _parse_version(jaxlib) <= _parse_version(jax)):
        return None
    found = f"with jaxlib {jaxlib}, which is newer" if jaxlib else "without jaxlib"
    return Problem(
        "jaxlib-version",
        f"jax {jax} is installed {found}.",
        "jaxlib holds JAX's compiled code, and `import jax` refuses one that does not match: "
        "neither the JAX engine nor preflight runs.",
        f"pip install 'jaxlib=={jax}'",
    )


def _find_setuptools_problem(machine: Machine) -> Problem | None:
    version = machine.find_version("setuptools")
    tensorboard = machine.find_version("tensorboard")
    if not (version and tensorboard) or _parse_version(version) < (82,):
        return None
    return Problem(
        "setuptools-version",
        f"setuptools {version} has no pkg_resources, which TensorBoard {tensorboard} imports.",
        "TensorBoard does not start.",
        "pip install 'setuptools<82'",
    )


def _find_tensorboard_problem(
    machine: Machine, installed: dict[str, Distribution]
) -> Problem | None:
    if not installed:
        return None
    tensorflow = next(iter(installed.values())).version
    tensorboard = machine.find_version("tensorboard")
    if tensorboard is None:
        return Problem(
            "no-tensorboard",
            "TensorBoard is not installed.",
            "tf.summary raises TBNotInstalledError when a run writes its first event. TensorFlow "
            "2.21 no longer installs it.",
            "pip install 'tensorboard>=2.20,<2.22'",
        )
    if _parse_version(tensorflow)[:2] == (2, 20) and _parse_version(tensorboard)[:2] != (2, 20):
        return Problem(
            "tensorboard-version",
            f"TensorBoard {tensorboard} does not match TensorFlow {tensorflow}, which needs 2.20.",
            "pip allows this when only one of them is upgraded.",
            "pip install 'tensorboard==2.20.*'",
        )
    return None


def _find_keras_problem(machine: Machine) -> Problem | None:
    version = machine.find_version("keras")
    if version and (3, 14) <= _parse_version(version) < (3, 16):
        return None
    return Problem(
        "keras-version",
        f"Keras {version} was not tested with tftpu." if version else "Keras is missing.",
        "tftpu uses internal interfaces of Keras 3.14 to 3.15.",
        "pip install 'keras>=3.14,<3.16'",
    )


def _find_importlib_resources_problem(machine: Machine) -> Problem | None:
    if machine.find_version("importlib_resources") or not machine.find_version(
        "tensorflow-datasets"
    ):
        return None
    return Problem(
        "no-importlib-resources",
        "tensorflow-datasets is installed without importlib_resources.",
        "It needs that package without declaring it: preparing a data set fails.",
        "pip install importlib_resources",
    )


def _find_metadata_problem(machine: Machine) -> Problem | None:
    metadata, protobuf = (
        machine.find_version("tensorflow-metadata"),
        machine.find_version("protobuf"),
    )
    if not (metadata and protobuf):
        return None
    if _parse_version(metadata) < (1, 21) or _parse_version(protobuf) >= (6, 31):
        return None
    return Problem(
        "tensorflow-metadata-version",
        f"tensorflow-metadata {metadata} needs protobuf 6.31 or later, and this is {protobuf}.",
        "Importing tensorflow-datasets fails with a VersionError of protobuf. TensorFlow 2.19 "
        "requires protobuf below 6.",
        "pip install 'tensorflow-metadata<1.18'",
    )


def _find_gcs_plugin_problem(
    machine: Machine, installed: dict[str, Distribution]
) -> Problem | None:
    name = "tensorflow-io-gcs-filesystem"
    # TensorFlow 2.19 needs tensorflow-io-gcs-filesystem; since 2.20 it has gs:// built in.
    older = any(_parse_version(dist.version) < (2, 20) for dist in installed.values())
    if not machine.find_version(name) or older:
        return None
    return Problem(
        "gcs-filesystem-plugin",
        f"{name} is installed.",
        "It replaces TensorFlow's own gs:// and crashes at the first write to a bucket.",
        f"pip uninstall -y {name}",
    )


def _find_installed(machine: Machine) -> dict[str, Distribution]:
    found = {name: machine.find_distribution(name) for name in WHEELS}
    return {name: distribution for name, distribution in found.items() if distribution}


def _find_owner(installed: dict[str, Distribution]) -> str | None:
    """Returns the wheel whose recorded hashes match the files; None if they are of several wheels.

    Only the smallest files on which the records disagree are hashed, because the libraries are a
    gigabyte in size.
    """
    records = {name: _read_record(distribution) for name, distribution in installed.items()}
    paths = {path for record in records.values() for path in record if _is_tensorflow(path)}
    telling = [p for p in paths if len({record.get(p) for record in records.values()}) > 1]
    shared = [p for p in telling if all(p in record for record in records.values())]
    sizes = {p: min(record[p][1] for record in records.values() if p in record) for p in telling}
    chosen = sorted(shared or telling, key=lambda p: (sizes[p], p))[:_HASHED_FILES]
    for name, distribution in installed.items():
        record, folder = records[name], _locate_folder(distribution)
        if all(p in record and _is_as_recorded(folder / p, *record[p]) for p in chosen):
            return name
    return None


def _find_damaged(distribution: Distribution) -> list[str]:
    """Returns a wheel's files that are missing or resized or, in a sample of .py files, changed."""
    record, folder = _read_record(distribution), _locate_folder(distribution)
    files = {path: entry for path, entry in record.items() if _is_tensorflow(path)}
    wrong = [path for path, entry in files.items() if not _has_size(folder / path, entry[1])]
    sources = sorted(path for path in files if path.endswith(".py") and path not in wrong)
    step = max(1, len(sources) // _HASHED_FILES)
    changed = [p for p in sources[::step] if not _is_as_recorded(folder / p, *files[p])]
    return sorted(wrong + changed)


def _read_record(distribution: Distribution) -> dict[str, tuple[str, int]]:
    """Maps the path of each file of a wheel to its recorded (hash, size)."""
    rows = csv.reader(io.StringIO(distribution.read_text("RECORD") or ""))
    return {row[0]: (row[1], int(row[2])) for row in rows if len(row) == 3 and row[1] and row[2]}


def _locate_folder(distribution: Distribution) -> Path:
    return Path(str(distribution.locate_file("")))


def _is_tensorflow(path: str) -> bool:
    return path.startswith("tensorflow/")


def _has_size(path: Path, size: int) -> bool:
    return path.is_file() and path.stat().st_size == size


def _is_as_recorded(path: Path, digest: str, size: int) -> bool:
    if not _has_size(path, size):
        return False
    algorithm, _, expected = digest.partition("=")
    actual = hashlib.new(algorithm, path.read_bytes()).digest()
    return base64.urlsafe_b64encode(actual).rstrip(b"=").decode() == expected


def _parse_version(version: str) -> tuple[int, ...]:
    """Converts "0.0.43.2" to comparable numbers; a suffix such as "rc1" is ignored."""
    return tuple(int(part) for part in re.findall(r"^[\d.]*", version)[0].split(".") if part)
