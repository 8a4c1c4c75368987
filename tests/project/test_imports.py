"""Who may import whom, and what `import tftpu` costs."""

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent

# What each part may not import, but for the files named (where TensorFlow is the point).
FORBIDDEN = {
    "tftpu": ("tftpu.models", "tftpu.input_pipelines", "tftpu.launch"),
    "models": ("tensorflow", "tftpu.input_pipelines", "tftpu.launch", "tftpu.training.trainer"),
    "input_pipelines": ("tftpu.models", "tftpu.launch", "tftpu.training.trainer"),
}
ALLOWED = {"models": ("models/kernels/",)}


def imports_of(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def test_nobody_imports_whom_they_may_not():
    wrong = []
    for part, forbidden in FORBIDDEN.items():
        for path in (ROOT / part).rglob("*.py"):
            name = path.relative_to(ROOT).as_posix()
            if name.startswith(ALLOWED.get(part, ("-",))):
                continue
            for imported in imports_of(path):
                if any(imported == f or imported.startswith(f + ".") for f in forbidden):
                    wrong.append(f"{name} imports {imported}")
    assert not wrong


def test_private_interfaces_stand_in_files_of_their_own():
    """One for TensorFlow's and Keras's, one for the kernels', one for JAX's."""
    packages = ("keras.src", "tensorflow.python", "tensorflow.compiler", "jax._src")
    private = {
        path.relative_to(ROOT).as_posix()
        for part in ("tftpu", "models", "input_pipelines", "launch")
        for path in (ROOT / part).rglob("*.py")
        if any(name.startswith(packages) for name in imports_of(path))
    }
    assert private == {
        "tftpu/engines/keras_internals.py",
        "tftpu/engines/tensorflow/internals.py",
        "tftpu/preflight/compiler.py",
        "models/kernels/internals.py",
    }


def test_import_tftpu_loads_neither_tensorflow_nor_keras():
    code = (
        "import sys, tftpu, tftpu.models, tftpu.input_pipelines, tftpu.launch.main;"
        "tftpu.models.config('resnet50');"
        "print({'tensorflow', 'keras', 'jax'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
