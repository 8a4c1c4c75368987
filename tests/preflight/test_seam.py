"""Preflight's pricing, advice and reports load no engine."""

import subprocess
import sys

from tests.support.repository.imports import modules

# What builds and lowers models needs an engine, and what checks the request for that.
WITH_AN_ENGINE = tuple(
    f"tftpu.preflight.{name}"
    for name in ("compiled_model", "examining", "likeness", "rebuilding", "request", "writing")
)
MODULES = [
    name
    for name in modules()
    if name.startswith("tftpu.preflight.") and not name.startswith(WITH_AN_ENGINE)
]


def test_everything_but_the_check_itself_works_without_tensorflow_and_keras():
    names = ", ".join(MODULES)
    code = f"import sys, {names}; print({{'tensorflow', 'keras', 'jax'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_the_hardware_of_a_run_is_described_without_tensorflow():
    code = (
        "import sys; from tftpu.tpu import hardware; print(hardware.find_hardware(8, False));"
        "print({'tensorflow', 'keras', 'jax'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        "Hardware(chips=8, generation=None, is_tpu=False)",
        "set()",
    ]
