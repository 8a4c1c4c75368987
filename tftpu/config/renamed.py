"""The renamed classes of configs, for older code and workdirs."""

import sys
from typing import Any

NAMES = {
    "Cluster": "ClusterConfig",
    "Data": "DataConfig",
    "Model": "ModelConfig",
    "Optimizer": "OptimizerConfig",
    "Train": "TrainConfig",
    "TrainOptions": "TrainConfig",
}


def explain_missing(module: str, name: str) -> AttributeError | ImportError:
    """Returns the error for a missing attribute of a module, with the new name if it has one.

    Args:
        module: the name of the module, such as "tftpu".
        name: the name that the module does not have.
    """
    if name not in NAMES:
        return AttributeError(f"module {module!r} has no attribute {name!r}")
    others = ", ".join(f"{old} is {new}" for old, new in NAMES.items() if old != name)
    text = f"{module}.{name} is now {module}.{NAMES[name]}; likewise {others}."
    # `from module import name` drops the text of an AttributeError, but keeps that of an
    # ImportError.
    imports = sys._getframe(2).f_globals.get("__name__") == "importlib._bootstrap"
    return ImportError(text) if imports else AttributeError(text)


def update_class(path: str) -> str:
    """Returns the current path of a class of `tftpu.config`, and other paths unchanged."""
    module, _, name = path.rpartition(".")
    return f"{module}.{NAMES.get(name, name)}" if module.startswith("tftpu.config.") else path


def update_classes(plain: Any) -> Any:
    """Returns plain data of a config with the current paths of its classes."""
    if isinstance(plain, list):
        return [update_classes(part) for part in plain]
    if not isinstance(plain, dict):
        return plain
    return {
        key: update_class(part)
        if key.rpartition(".")[2] == "class" and isinstance(part, str)
        else update_classes(part)
        for key, part in plain.items()
    }
