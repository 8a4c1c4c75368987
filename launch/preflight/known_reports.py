"""Cached reports of `tftpu preflight`, which a repeated command prints without TensorFlow.

Reports are cached only for configs that come with tftpu (with any overrides), and for data whose
batches follow from the config alone. It is unknown what a user's code reads while it builds a
model, so that code always runs; only the compiled program comes from a cache.
"""

import contextlib
import hashlib
import importlib
import json
import os
import platform
import sys
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING

from tftpu.config import Experiment, to_json
from tftpu.engines import selection
from tftpu.errors import UserError
from tftpu.input_pipelines import sources
from tftpu.installation import find_cache_folder
from tftpu.launch.settings import config_flags, keras_objects
from tftpu.storage import files

if TYPE_CHECKING:
    from tftpu.preflight import Report

_PARTS = ("tftpu", "tftpu.models", "tftpu.input_pipelines", "tftpu.launch")
_DATA = (sources.Images, sources.Text, sources.StreamedImages, sources.Tokens)
# Variables that differ between terminals and do not change the report.
_UNRELATED = {"_", "COLUMNS", "LINES", "OLDPWD", "PWD", "SHLVL"}


def compute_key(
    config: str, experiment: Experiment, slices: list[str], prices: dict[str, float]
) -> str | None:
    """Returns the name under which a report is cached; None if it cannot be cached.

    Args:
        config: name of the config, or its path.
        experiment: the experiment as it was loaded.
        slices: the names of the slices.
        prices: US dollars per chip-hour that replace the list prices.
    """
    plain_data = type(experiment.data) in _DATA and experiment.train.epochs is None
    if config not in config_flags.list_names() or not plain_data or _has_own_code():
        return None
    try:
        plain = to_json(keras_objects.describe_callbacks(experiment))
    except UserError:  # the config contains a value that JSON cannot represent
        return None
    environment = {name: value for name, value in os.environ.items() if name not in _UNRELATED}
    parts = (
        *(plain, slices, sorted(prices.items()), selection.choose_engine(experiment.cluster)),
        *(environment, sys.path, sys.version, platform.machine(), hash_code()),
    )
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def find(name: str | None) -> "Report | None":
    """Returns the report that was cached under a name; None if there is none."""
    path = _locate_report(name) if name else ""
    if not name or not files.exists(path):
        return None
    from tftpu.preflight.saved import read_report

    try:
        return read_report(path)
    except UserError:  # a full disk may have truncated the file
        return None


def keep(name: str | None, report: "Report") -> None:
    """Caches a report if the step fits on all of its slices, as a failure may be temporary.

    Args:
        name: the result of `compute_key`.
        report: the report.
    """
    if name and all(item.fits for item in report.slices):
        with contextlib.suppress(OSError):  # a full disk is not a reason to fail
            os.makedirs(find_cache_folder("preflight"), exist_ok=True)
            files.write_whole(_locate_report(name), report.to_json().encode())


def _locate_report(name: str) -> str:
    return os.path.join(find_cache_folder("preflight"), f"report-{name}.json")


def hash_code() -> str:
    """Returns the digest of tftpu's own code and of the installed packages' file lists."""
    own = [path for folder in _list_own_folders() for path in Path(folder).rglob("*.py")]
    lists = [
        path
        for folder in _list_installed_folders()
        for path in Path(folder).glob("*.dist-info/RECORD")
    ]
    digest = hashlib.sha256()
    for path in sorted((*own, *lists)):
        digest.update(f"{path} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()


def _has_own_code() -> bool:
    return bool(list_own_code())


def list_own_code() -> list[str]:
    """Returns the files of loaded modules that are neither tftpu's nor installed."""
    known = (*_list_own_folders(), *_list_installed_folders(), f"{sysconfig.get_path('scripts')}/")
    loaded = (getattr(module, "__file__", None) for module in [*sys.modules.values()])
    found = {os.path.abspath(path) for path in loaded if path}
    traced = "__autograph_generated_file"  # in the names of AutoGraph's temporary files
    return sorted(path for path in found if not path.startswith(known) and traced not in path)


def _list_own_folders() -> list[str]:
    """Returns the folders of tftpu's own code."""
    return [f"{Path(importlib.import_module(part).__path__[0])}/" for part in _PARTS]


def _list_installed_folders() -> list[str]:
    """Returns the folders of Python and of installed packages."""
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    return [f"{folder}/" for folder in {sysconfig.get_path(name) for name in names}]
