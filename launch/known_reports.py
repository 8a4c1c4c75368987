"""Reports of `tftpu preflight` that a repeated command gives again, without TensorFlow.

A report is kept with everything that it follows from: the experiment and the slices, all code of
tftpu, the installed packages, the environment, and each file and folder that Python read on the
way, such as a user's own modules. If the content of any of it differs, the step is lowered again.
So it is if something cannot be compared, such as what another program or a server answered.
"""

import contextlib
import dataclasses
import hashlib
import importlib
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import platform
import shutil
import sys
import sysconfig
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tftpu.config import Data, Experiment, to_json
from tftpu.engines import selection
from tftpu.errors import UserError
from tftpu.input_pipelines import sources
from tftpu.launch import keras_objects, own_code
from tftpu.preflight.compiler import cache_folder
from tftpu.storage import files

if TYPE_CHECKING:
    from tftpu.preflight import Report

_PARTS = ("tftpu", "tftpu.models", "tftpu.input_pipelines", "tftpu.launch")
# Differ between terminals, and decide nothing.
_UNRELATED = {"_", "COLUMNS", "LINES", "OLDPWD", "PWD", "SHLVL"}
_SYSTEM = ("/dev/", "/proc/", "/sys/")
_IMPORTABLE = (".py", ".so", ".dist-info", ".egg-info")


@dataclasses.dataclass
class Inputs:
    """Files and folders that Python read, with digests of their contents and of their names.

    Attributes:
        code: digest of tftpu's own code and of the installed packages, at the start.
        digests: by kind and path, such as "file:/home/ada/model.py".
        complete: whether that is all; False if something was read that has no digest.
    """

    code: str
    digests: dict[str, str] = dataclasses.field(default_factory=dict)
    complete: bool = True

    def add(self, kind: str, path: str) -> None:
        """Adds a file ("file"), all names in a folder ("names"), or what Python imports of them."""
        what, digest = f"{kind}:{path}", _digest(kind, path)
        changed = self.digests.setdefault(what, digest) != digest
        if changed or (kind == "file" and path.endswith(".py") and _reads_unseen(path)):
            self.complete = False


@contextlib.contextmanager
def recorded() -> Iterator[Inputs]:
    """Yields what Python reads within the block, outside tftpu and the installed packages."""
    inputs, ended, busy = Inputs(_code()), threading.Event(), threading.local()
    skipped = _skipped()

    def see(event: str, arguments: tuple) -> None:
        if event not in _EVENTS or ended.is_set() or getattr(busy, "now", False):
            return
        busy.now = True  # computing a digest reads the file, too
        try:
            found = _EVENTS[event](arguments)
            if found is None:
                inputs.complete = False
            elif found[1] and not f"{found[1]}/".startswith(skipped):
                inputs.add(*found)
        finally:
            busy.now = False

    sys.addaudithook(see)
    try:
        yield inputs
    finally:
        ended.set()  # a hook cannot be removed


def key(
    experiment: Experiment, slices: list[str], prices: dict[str, float], inputs: Inputs
) -> str | None:
    """Returns the name under which a report is kept; None if the experiment has none.

    Args:
        experiment: as it was loaded.
        slices: their names.
        prices: US dollars per chip-hour that replace the list prices.
        inputs: what was read for the experiment.
    """
    data, train = experiment.data, experiment.train
    remote = isinstance(data, sources.Records) and files.is_remote(data.data_dir or "")
    if train.epochs is not None or remote or isinstance(data, sources.BigQuery):
        return None  # its length or its batches are read from the data themselves
    if type(data).batch_spec is Data.batch_spec:
        return None
    try:
        plain = to_json(keras_objects.recorded(experiment))
    except UserError:
        return None
    environment = {k: v for k, v in os.environ.items() if k not in _UNRELATED}
    parts = (
        *(plain, slices, sorted(prices.items()), selection.engine_for(experiment.cluster)),
        *(environment, os.getcwd(), sys.path, sys.version, platform.machine(), inputs.code),
    )
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def find(name: str | None) -> "Report | None":
    """Returns the report that was kept under a name, if all its inputs are unchanged."""
    if name is None:
        return None
    try:
        kept = json.loads((_folder() / f"{name}.json").read_text())
        same = all(_digest(*what.split(":", 1)) == old for what, old in kept["inputs"].items())
        return _report(kept["report"]) if same else None
    except (OSError, ValueError, KeyError, TypeError):
        return None  # there is none, or it is damaged


def keep(name: str | None, report: "Report", inputs: Inputs) -> None:
    """Keeps a report, if it depends on nothing else, as that of a failed compiler does.

    Args:
        name: of the experiment, see `key`.
        report: the report.
        inputs: what was read for it.
    """
    if name is None or not inputs.complete or inputs.code != _code():  # it changed meanwhile
        return
    if any(f"file:{path}" not in inputs.digests for path in _users_modules()):
        return  # one that was imported earlier, or in a way that no event tells
    if all(item.fits for item in report.slices):
        kept = {"inputs": inputs.digests, "report": dataclasses.asdict(report)}
        with contextlib.suppress(OSError):  # a full disk is no reason to fail
            files.make_folder(_folder())
            files.write_whole(_folder() / f"{name}.json", json.dumps(kept).encode())


def _report(plain: dict[str, Any]) -> "Report":
    from tftpu.preflight.cost import LargeTensor
    from tftpu.preflight.report import Report
    from tftpu.preflight.slice_report import SliceReport, Spent

    parts = {"largest_tensors": LargeTensor, "by_layer": Spent, "by_kind": Spent}
    parts["top_instructions"] = Spent
    items = []
    for item in plain["slices"]:
        made = {name: [make(**part) for part in item[name]] for name, make in parts.items()}
        items.append(SliceReport(**{**item, **made}))
    return Report(**{**plain, "slices": items})


def _folder() -> Path:
    return cache_folder() / "reports"


def _code() -> str:
    """Returns the digest of tftpu's own code, and of the installed packages' lists of files."""
    own = sorted(path for folder in _own() for path in folder.rglob("*.py"))
    lists = sorted(p for folder in _installed() for p in Path(folder).glob("*.dist-info/RECORD"))
    digests = [[str(path), _digest("file", str(path))] for path in (*own, *lists)]
    return hashlib.sha256(json.dumps(digests).encode()).hexdigest()


def _users_modules() -> list[str]:
    """Returns the files of all modules that are neither tftpu's nor installed."""
    files_of = [getattr(module, "__file__", None) for module in [*sys.modules.values()]]
    found = {_absolute(path) for path in files_of if path}
    return [path for path in found if not path.startswith(_skipped())]


def _skipped() -> tuple[str, ...]:
    """Returns the folders that are no inputs, or have a digest of their own."""
    scripts = sysconfig.get_path("scripts")
    return (*_SYSTEM, *_installed(), *(f"{f}/" for f in (*_own(), cache_folder(), scripts)))


def _own() -> list[Path]:
    """Returns the folders of tftpu's own code."""
    return [Path(importlib.import_module(part).__path__[0]) for part in _PARTS]


def _installed() -> list[str]:
    """Returns the folders of Python and of installed packages; lists there have digests."""
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    return [f"{folder}/" for folder in {sysconfig.get_path(name) for name in names}]


def _digest(kind: str, path: str) -> str:
    """Returns the digest of an input, see `Inputs.add`; "" if it does not exist."""
    try:
        if kind == "file":
            return hashlib.sha256(Path(path).read_bytes()).hexdigest()
        names = sorted(
            name for name in os.listdir(path) if kind == "names" or _is_module(path, name)
        )
    except OSError:
        return ""
    return hashlib.sha256("\0".join(names).encode()).hexdigest()


def _reads_unseen(path: str) -> bool:
    """Returns whether a user's module may read files through TensorFlow, which no event tells."""
    text = Path(path).read_bytes() if os.path.exists(path) else b""
    return b"tf.io" in text or b"gfile" in text


def _is_module(folder: str, name: str) -> bool:
    """Returns whether a name in a folder can be imported; other folders come and go with runs."""
    return name.endswith(_IMPORTABLE) or any(
        inner.endswith(_IMPORTABLE) for inner in _names_in(os.path.join(folder, name))
    )


def _names_in(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


# What an event of Python's auditing says was read: kind and path, "" for nothing, None for more
# than files can tell. https://docs.python.org/3/library/audit_events.html


def _opened(arguments: tuple) -> tuple[str, str] | None:
    path, mode, flags = arguments
    written = flags & os.O_ACCMODE != os.O_RDONLY if mode is None else not {*mode} <= {*"rbtU"}
    if isinstance(path, int) or written or os.path.isdir(path):
        return "file", ""
    path = _absolute(path)
    if f"{os.sep}__pycache__{os.sep}" in path and path.endswith(".pyc"):
        path = importlib.util.source_from_cache(path)
    return "file", path


def _listed(arguments: tuple) -> tuple[str, str] | None:
    path = arguments[0]
    if isinstance(path, int):  # a descriptor; shutil deletes folders so
        return ("names", "") if sys._getframe(2).f_code.co_filename == shutil.__file__ else None
    return "modules" if _importing() else "names", _absolute(path or ".")


def _importing() -> bool:
    """Returns whether it is modules and packages that are looked for, and not a user's data."""
    frame = sys._getframe(3)  # of the event
    while frame.f_back is not None and frame.f_code.co_filename == pathlib.__file__:
        frame = frame.f_back
    looking = ("<frozen importlib", importlib.metadata.__file__, own_code.__file__)
    return frame.f_code.co_filename.startswith(looking)


def _absolute(path: Any) -> str:
    return "/" + os.path.abspath(os.fsdecode(path)).lstrip("/")  # POSIX allows two at the start


def _ran(arguments: tuple) -> tuple[str, str] | None:
    program, words = arguments[:2]
    ours = program == "uname" or "tftpu.preflight.compiler" in words
    return ("file", "") if ours else None


def _unknown(_: tuple) -> None:
    return None


_EVENTS = {
    "open": _opened,
    "os.listdir": _listed,
    "os.scandir": _listed,
    "subprocess.Popen": _ran,
    "os.system": _unknown,
    "socket.connect": _unknown,
}
