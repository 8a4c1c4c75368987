"""The packages of a rented machine: tftpu's in the versions of this environment, and the config's.

tftpu's own requirements are pinned to the versions installed here. Other packages that a config
imports must be in `requirements.txt` beside it. A name is looked up in a package index only if the
user wrote it: the index may have a stranger's package with the name of a package that was installed
here from elsewhere.
"""

import functools
import json
import re
from collections.abc import Mapping
from importlib import metadata

from tftpu.errors import UserError
from tftpu.launch.cloud.shipping.code_imports import ExternalImport

# For each engine: the extra for TPUs, and the package in it that drives the TPU.
_TPU_EXTRAS = {"tensorflow": ("tpu", "tensorflow-tpu"), "jax": ("jax-tpu", "jax")}
# Not pinned: the extra for TPUs sets these versions, and TensorFlow sets TensorBoard's.
_OF_THE_TPU = ("tensorflow", "tensorflow-cpu", "tensorflow-tpu", "libtpu", "jax", "jaxlib")
_NOT_PINNED = (*_OF_THE_TPU, "tensorboard")
_MODULES_THERE = ("tftpu", "tensorflow", "jax", "jaxlib", "libtpu")
# Extras of tftpu that a run may use. The machine gets those that are installed completely here.
_EXTRAS = ("bigquery", "text")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def list_pins() -> list[str]:
    """Returns the sorted `name==version` of tftpu's requirements here, except `_NOT_PINNED`."""
    versions = {name: _find_version(name) for name in _list_requirements("tftpu")}
    return [
        f"{name}=={version}"
        for name, version in sorted(versions.items())
        # "+" marks a build that no index has
        if version and name not in _NOT_PINNED and "+" not in version
    ]


def list_extras(engine: str) -> list[str]:
    """Returns the extras of tftpu for the machine: the engine's, and those fully installed here."""
    complete = [
        e for e in _EXTRAS if all(_find_version(name) for name in _list_requirements("tftpu", e))
    ]
    return [_TPU_EXTRAS[engine][0], *complete]


def check(imports: list[ExternalImport], requirements: str, folder: str, engine: str) -> None:
    """Raises `UserError` if code imports a module that the machine will not have.

    Args:
        imports: the imports of the code, from outside its folder.
        requirements: content of the folder's requirements.txt, "" if there is none.
        folder: name of the folder, for the error.
        engine: the name of the engine that trains on the machine.
    """
    names = [m.group() for line in requirements.splitlines() if (m := _NAME.match(line.strip()))]
    there = _compute_closure(
        [*_list_requirements("tftpu"), *_OF_THE_TPU, *map(_normalize_name, names)]
    )
    for extra in list_extras(engine):
        there |= _compute_closure(_list_requirements("tftpu", extra))
    lines, elsewhere = [], []
    for found in imports:
        if found.module in _MODULES_THERE or _normalize_name(found.module) in there:
            continue
        packages = [_normalize_name(name) for name in _list_providers().get(found.module, ())]
        if there & {*packages}:
            continue
        place = f"{folder}/{found.file}, line {found.line}, imports {found.module}"
        wanted = [_format_requirement(name) for name in packages]
        if packages and not any(wanted):
            elsewhere.append(
                f"{place}, which is installed here from a folder: copy it to {folder}."
            )
        else:
            lines.append(f"{place}: {next(filter(None, wanted), 'its package')}")
    if lines:
        elsewhere.append(
            f"The machine would lack packages. Write them into {folder}/requirements.txt, which is "
            f"installed there: {'; '.join(lines)}."
        )
    if elsewhere:
        raise UserError(" ".join(elsewhere))


def describe_driver(engine: str) -> str:
    """Returns the requirement on the TPU's driver package, and installed versions that violate it.

    Args:
        engine: the name of the engine that trains on the machine.
    """
    from packaging.requirements import Requirement

    extra, name = _TPU_EXTRAS[engine]
    for text in metadata.requires("tftpu") or ():
        wanted = Requirement(text)
        if wanted.name == name and wanted.marker and wanted.marker.evaluate({"extra": extra}):
            break
    else:  # the installed tftpu is older than this extra
        return name
    packages = ("jax",) if engine == "jax" else _OF_THE_TPU[:3]
    here = {package: _find_version(package) for package in packages}
    others = [f"{n} {v}" for n, v in here.items() if v and not wanted.specifier.contains(v)]
    wanted.marker = None
    return f"{wanted} (here: {', '.join(others)})" if others else str(wanted)


def _format_requirement(name: str) -> str:
    """Returns a package's line of requirements.txt; "" if not installed, or from a local file."""
    try:
        installed = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return ""
    origin = json.loads(installed.read_text("direct_url.json") or "{}")
    if "vcs_info" in origin:
        vcs = origin["vcs_info"]
        return f"{name} @ {vcs['vcs']}+{origin['url']}@{vcs['commit_id']}"
    if origin.get("url", "").startswith("file:"):
        return ""
    return f"{name}=={installed.version.partition('+')[0]}"


@functools.cache
def _list_providers() -> Mapping[str, list[str]]:
    """Returns the packages that provide each top-level module; reads all metadata, once."""
    return metadata.packages_distributions()


def _list_requirements(name: str, extra: str = "") -> list[str]:
    """Returns the packages that a package requires; with an extra, only those of the extra."""
    from packaging.requirements import Requirement

    try:
        texts = metadata.requires(name) or ()
    except metadata.PackageNotFoundError:
        return []
    found = []
    for requirement in map(Requirement, texts):
        marker = requirement.marker
        plain = marker is None or marker.evaluate({"extra": ""})
        if plain != bool(extra) and (marker is None or marker.evaluate({"extra": extra})):
            found.append(_normalize_name(requirement.name))
    return found


def _compute_closure(names: list[str]) -> set[str]:
    """Returns packages and all their direct and indirect requirements, if installed here."""
    found, waiting = set(), list(names)
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += _list_requirements(name)
    return found


def _find_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _normalize_name(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
