"""A user's own code: the folder of a config file, and the module name of that file.

The folder of `--config=path/to/flowers.py` is put first on `sys.path`, and the file is imported as
`flowers`, so it imports its neighbours as plain modules: `import model`. A machine that has the
same folder at any path imports it under the same names.
"""

import contextlib
import dataclasses
import hashlib
import importlib
import importlib.util
import inspect
import os
import pkgutil
import re
import sys
import sysconfig
import traceback
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tftpu.config import Experiment
from tftpu.errors import UserError, did_you_mean, find_nearest
from tftpu.launch import configs
from tftpu.launch.cloud.shipping import code_imports
from tftpu.launch.correction import FIELDS
from tftpu.storage import files

# Names that a file beside a config may not have: tftpu imports these modules, and the file would
# replace them. `tftpu` is missing here, because it is already loaded and cannot be replaced if the
# config is in a clone of the repository.
_TAKEN = {*sys.stdlib_module_names, "absl", "keras", "numpy", "tensorflow"}
_brought = set[str]()  # modules that the imported configs have loaded


@dataclasses.dataclass(frozen=True)
class OwnCode:
    """The code of a config file.

    Attributes:
        folder: the absolute path of the config file's folder.
        module: the name under which the config file is imported, its stem.
    """

    folder: Path
    module: str

    @property
    def file(self) -> Path:
        """The config file."""
        return self.folder / f"{self.module}.py"


def find_code(config: str) -> OwnCode | None:
    """Returns the code of `--config=path/to/file.py`; None for the name of a config of tftpu.

    Raises:
        UserError: there is no such file, its name contains a dot, or it or another module in its
            folder has the name of an installed module.
    """
    if not config.endswith(".py"):
        return None
    path = Path(os.path.abspath(config))
    if not path.is_file():
        bundled = {one.name for one in pkgutil.iter_modules(configs.__path__)}
        near = path.stem if path.stem in bundled else find_near_file(path)
        hint = f" Did you mean {near!r}?" if near else ""
        raise UserError(f"There is no config file {config!r}.{hint}")
    code = OwnCode(path.parent, path.stem)
    if "." in code.module:
        raise UserError(
            f"The config file {path.name!r} cannot be imported, because its name contains a dot: "
            f"rename it, for example to {path.stem.replace('.', '_')}.py."
        )
    check_name(code.module)
    for other in sorted(_list_folder_modules(code.folder) & _TAKEN):
        raise UserError(
            f"{code.folder} holds a module {other!r}, which would replace the installed {other!r} "
            "for everything that the config imports: rename it."
        )
    return code


def find_near_file(path: Path) -> str | None:
    """Returns the relative path of the Python file beside `path` with the nearest name, or None."""
    files = {file.name: os.path.relpath(file) for file in path.parent.glob("*.py")}
    return files.get(find_nearest(path.name, files) or "")


def check_name(module: str) -> None:
    """Raises `UserError` if an installed module has this name."""
    found = _find_origin(module)
    if module in {*_TAKEN, "tftpu"} or (found and is_installed(found)):
        raise UserError(
            f"{module}.py has the name of an installed module ({found or module}), which it would "
            "replace: rename the file."
        )


def prepare(code: OwnCode) -> None:
    """Puts the folder first on `sys.path`; unloads other folders' modules of the same names."""
    folder = str(code.folder)
    sys.path[:] = [folder, *(path for path in sys.path if path != folder)]
    importlib.invalidate_caches()
    own = _list_folder_modules(code.folder) - {"tftpu"}
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if name.partition(".")[0] in own and file:
            if is_installed(Path(file)):
                raise UserError(
                    f"{code.folder} holds a module {name!r}, but an installed module of the same "
                    f"name ({file}) is already loaded: rename yours."
                )
            if not Path(file).is_relative_to(code.folder):
                del sys.modules[name]


def import_config(code: OwnCode) -> types.ModuleType:
    """Imports a config file that the user named, anew if it was imported before.

    Prepares the import with `prepare`, and records the file, because records of runs and searches
    may only name configs that the user has named: see `has_been_named`.
    """
    note = _locate_note(code.file)
    # Without a home folder, the user has to name the file each time.
    with contextlib.suppress(OSError):
        note.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        note.write_text(f"{code.file}\n")
    prepare(code)
    sys.modules.pop(code.module, None)
    before = set(sys.modules)
    config = importlib.import_module(code.module)
    _brought.update(set(sys.modules) - before)
    return config


def has_been_named(config: str) -> bool:
    """Returns whether this user has named a config file in a command on this machine before.

    A workdir from elsewhere may name any file as its config, and importing a file runs it.
    """
    return _locate_note(Path(os.path.abspath(config))).is_file()


def _locate_note(file: Path) -> Path:
    home = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    name = hashlib.sha256(str(file).encode(errors="surrogatepass")).hexdigest()
    return Path(home) / "tftpu" / "configs" / name


def list_modules(code: OwnCode) -> tuple[set[str], set[str], set[str]]:
    """Returns a config's own modules, other loaded modules, and names in the code.

    Own modules are those that the code imports by a statement (which may be in a function that was
    not called yet), and those of its folder that are loaded. Other modules are those of packages
    that the code names, and everything that its import has loaded except the standard library. The
    names are identifiers, such as `half` in `losses.half`.
    """
    within, others, written = code_imports.trace_modules(code.folder, code.module)
    beside = _list_folder_modules(code.folder)
    own = within | {name for name in sys.modules if _extract_package(name) in beside}
    named = {_extract_package(name) for name in others}
    imported = {name for name in sys.modules if name in _brought or _extract_package(name) in named}
    return _select_foreign(own), _select_foreign(imported - own), written


def _select_foreign(modules: set[str]) -> set[str]:
    known = {*sys.stdlib_module_names, "tftpu"}
    return {name for name in modules if _extract_package(name) not in known}


def _extract_package(module: str) -> str:
    return module.partition(".")[0]


@contextlib.contextmanager
def failures_of(what: str, *folders: Path) -> Iterator[None]:
    """Turns exceptions of a user's code into `UserError`, with file and line.

    Args:
        what: the name of the code, such as "The config 'flowers.py'".
        folders: the folders of the code; an exception that passed through none of them is raised
            unchanged, except a SyntaxError or ImportError.
    """
    try:
        yield
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in frames if Path(frame.filename).parent in folders]
        if not own and not isinstance(error, SyntaxError | ImportError):
            raise
        where = f" in line {own[-1].lineno} of {Path(own[-1].filename).name}" if own else ""
        if isinstance(error, FileNotFoundError) and isinstance(error.filename, str):
            raise UserError(f"{what}{where}: {explain_missing(error.filename)}") from error
        fields = _explain_field(str(error)) if isinstance(error, TypeError) else ""
        raise UserError(
            f"{what} fails{where} with {type(error).__name__}: {error}{fields}"
        ) from error


def _explain_field(message: str) -> str:
    """Returns a suggestion for a config class's error about an unknown argument; otherwise ""."""
    found = re.match(r"(\w+)\.__init__\(\) got an unexpected keyword argument '(\w+)'", message)
    if found is None or "Did you mean" in message:  # Python 3.13 suggests a name itself
        return ""
    # Of several classes with this name, the user's is in the module that was loaded last.
    named = [getattr(module, found[1], None) for module in reversed(list(sys.modules.values()))]
    kind = next((one for one in named if dataclasses.is_dataclass(one)), None)
    if kind is None:
        return ""
    names = [field.name for field in dataclasses.fields(kind) if field.init]
    near = FIELDS.get(found[2], "").rpartition(".")[2]
    hint = f" Did you mean {near!r}?" if near in names else did_you_mean(found[2], names)
    return f".{hint}"


def explain_missing(path: str) -> str:
    """Returns a message that a file does not exist, with a suggestion of the nearest path."""
    return f"there is no file {path!r}.{files.suggest_existing(path, folders=True)}"


def failures_of_class(value: Any, method: str) -> contextlib.AbstractContextManager[None]:
    """Returns `failures_of` for a method of a user's class; does nothing for a class of tftpu.

    The folders are those of the class and of the base class that defines the method.
    """
    cls = type(value)
    defining = next((kind for kind in cls.__mro__ if method in vars(kind)), cls)
    folders = []
    for kind in (cls, defining):
        # A class that is defined in a notebook has no file.
        with contextlib.suppress(TypeError, OSError):
            if not is_of_tftpu(kind):
                folders.append(Path(inspect.getfile(kind)).parent)
    if not folders:
        return contextlib.nullcontext()
    return failures_of(f"{cls.__name__}.{method}()", *folders)


def is_of_tftpu(cls: type) -> bool:
    """Returns whether a class comes with tftpu."""
    return _extract_package(cls.__module__) == "tftpu"


def validate(experiment: Experiment, data_shards: int | None = None) -> None:
    """Validates an experiment, whose model and data may be the user's own classes.

    Args:
        experiment: the experiment of a config.
        data_shards: see `Experiment.validate`.

    Raises:
        UserError: the first mistake found, or any exception of a user's `validate`.
    """
    experiment.validate_fields()
    with failures_of_class(experiment.data, "validate"):
        experiment.data.validate()
    with failures_of_class(experiment.model, "validate"):
        experiment.model.validate(experiment.divide_batch(data_shards))


def validate_recorded(experiment: Experiment) -> None:
    """Validates the experiment of a config.json, which anybody may have changed.

    A user's `validate` may need the data files, which an export does not. So the data's fields are
    validated by its first base class from tftpu.

    Raises:
        UserError: as for `validate`.
    """
    experiment.validate_fields()
    data = experiment.data
    with failures_of_class(data, "validate"):
        next(cls for cls in type(data).__mro__ if is_of_tftpu(cls)).validate(data)
    with failures_of_class(experiment.model, "validate"):
        experiment.model.validate(experiment.divide_batch())


def _list_folder_modules(folder: Path) -> set[str]:
    """Returns the names of the modules and packages in a folder."""
    files = {path.stem for path in folder.glob("*.py")}
    return files | {path.parent.name for path in folder.glob("*/__init__.py")}


def _find_origin(module: str) -> Path | None:
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return None
    return Path(spec.origin) if spec and spec.origin and spec.has_location else None


def is_installed(path: Path) -> bool:
    """Returns whether a file belongs to Python or to an installed package."""
    folders = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    folders |= {
        path for path in map(str, sys.path) if path.endswith(("site-packages", "dist-packages"))
    }
    return any(path.is_relative_to(folder) for folder in folders)
