"""Rules of imports between packages, and the cost of `import tftpu`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.repository.imports import ROOT, circles, modules, names_imported

ENGINE_FREE = ("training", "runtime", "observe", "checkpoint")
# What a part may not import. A trailing dot names all modules below.
FORBIDDEN = {
    "tftpu": ("tftpu.models", "tftpu.input_pipelines", "tftpu.launch"),
    "tftpu.models": ("tftpu.input_pipelines", "tftpu.launch", "tftpu.training", "tftpu.engines"),
    "tftpu.models.families": ("tensorflow", "jax"),
    "tftpu.models.layers": ("tensorflow", "jax"),
    "tftpu.models.weights": ("tensorflow", "jax"),
    "tftpu.input_pipelines": (
        *("tftpu.models", "tftpu.launch", "tftpu.training", "tftpu.engines", "jax"),
    ),
    "tftpu.preflight": ("tftpu.training", "tftpu.observe", "tftpu.runtime"),
    "tftpu.config": ("tensorflow", "keras", "jax", "tftpu.engines", "tftpu.training"),
    "tftpu.tpu": ("tensorflow", "keras", "tftpu.engines", "tftpu.training", "tftpu.preflight"),
    "tftpu.storage": ("keras", "jax", "tftpu.engines", "tftpu.training", "tftpu.config"),
    "tftpu.kernels": ("tftpu.engines", "tftpu.training"),
    "tftpu.blocks": ("tensorflow", "jax", "tftpu.engines", "tftpu.training"),
    "tftpu.optim": ("tensorflow", "jax", "tftpu.training"),
    **{
        f"tftpu.{part}": ("jax", "tensorflow.distribute", "tftpu.engines.tensorflow")
        for part in ENGINE_FREE
    },
}
# The core's outermost modules may name the engine's; nothing else depends on TensorFlow.
TENSORFLOW_FREE = (
    "tftpu.training",
    "tftpu.runtime",
    "tftpu.checkpoint",
    "tftpu.preflight.pricing.cost",
    "tftpu.preflight.advise",
    "tftpu.preflight.report",
    "tftpu.tensors",
    "tftpu.engines.keras_internals",
    "tftpu.engines.objectives.losses",
    "tftpu.engines.objectives.compiled",
    "tftpu.engines.objectives.own",
    "tftpu.engines.objectives.objective",
    "tftpu.engines.objectives.sums",
    "tftpu.engines.engine",
)
# The public face imports everything lazily, by name.
FACE = ("tftpu", "tftpu.models", "tftpu.input_pipelines", "tftpu.preflight")


def below(name: str, part: str) -> bool:
    return name == part or name.startswith(part + ".")


def belongs(module: str, part: str) -> bool:
    """Returns whether a module belongs to a part; the zoo does not belong to the core."""
    siblings = ("tftpu.models", "tftpu.input_pipelines", "tftpu.launch")
    if part == "tftpu":
        return below(module, part) and not any(below(module, s) for s in siblings)
    return below(module, part)


@pytest.mark.parametrize("part", FORBIDDEN)
def test_no_part_imports_what_it_must_not(part):
    wrong = [
        f"{module} imports {name}"
        for module, path in modules().items()
        if belongs(module, part) and module not in FACE
        for name in sorted(names_imported(path))
        if any(below(name, forbidden) for forbidden in FORBIDDEN[part])
    ]
    assert not wrong, "docs/architecture.md says who may import whom"


@pytest.mark.parametrize("part", TENSORFLOW_FREE)
def test_the_trainer_and_the_pricing_depend_only_on_the_engine_protocol(part):
    wrong = [
        f"{module} imports {name}"
        for module, path in modules().items()
        if below(module, part)
        for name in sorted(names_imported(path))
        if below(name, "tensorflow") or below(name, "tftpu.engines.tensorflow")
    ]
    assert not wrong


def test_only_the_command_line_imports_commands():
    """Commands may share their options; what else two rooms need lies below both."""
    top = ("tftpu.launch.commands", "tftpu.launch.main")
    script = "tftpu.launch.entry"
    wrong = [
        f"{module} imports {name}"
        for module, path in modules().items()
        if module != script and not any(below(module, part) for part in top)
        for name in sorted(names_imported(path))
        if any(below(name, part) for part in top)
    ]
    assert not wrong


def test_no_module_imports_itself_through_others():
    assert circles() == []


def test_no_test_imports_another():
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in sorted((ROOT / "tests").rglob("*.py"))
        for name in sorted(names_imported(path))
        if name.startswith("tests.") and ".test_" in name
    ]
    assert not wrong


def test_no_folder_is_crowded():
    """At most 16 files stand side by side; the scripts of other people are a collection."""
    tops = ("tftpu", "models", "input_pipelines", "launch", "tests", "docs")
    crowded = {}
    for top in tops:
        for folder, _, names in os.walk(ROOT / top):
            if "__pycache__" not in folder and len(names) > 16:
                crowded[Path(folder).relative_to(ROOT).as_posix()] = len(names)
    del crowded["tests/compatibility/scripts"]
    assert not crowded, "sort the files of these folders, more than 16, into folders by topic"


def test_private_interfaces_are_used_in_separate_files_only():
    """One file each is for a package, or for a part of it."""
    packages = ("keras.src", "tensorflow.python", "tensorflow.compiler", "jax._src")
    private = {
        path.relative_to(ROOT).as_posix()
        for path in modules().values()
        if any(name.startswith(packages) for name in names_imported(path, typing=True))
    }
    assert private == {
        "tftpu/engines/ending.py",
        "tftpu/engines/jax/processes/coordination.py",
        "tftpu/engines/jax/internals.py",
        "tftpu/engines/keras_internals.py",
        "tftpu/engines/tensorflow/internals.py",
        "tftpu/preflight/compiling/jax_internals.py",
        "tftpu/kernels/internals.py",
        "tftpu/kernels/jax_internals.py",
        "tftpu/layer_internals.py",
    }, "use the function of such a file, or add one to it"


def test_import_tftpu_loads_neither_tensorflow_nor_keras():
    code = (
        "import sys, tftpu, tftpu.models, tftpu.input_pipelines, tftpu.launch.main;"
        "tftpu.models.config('resnet50');"
        "print({'tensorflow', 'keras', 'jax'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
