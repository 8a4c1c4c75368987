"""Preflight's pricing, advice and reports load no engine."""

import subprocess
import sys

MODULES = ("advise", "compiler", "cost", "hlo", "options", "report", "slice_report", "table")


def test_everything_but_the_check_itself_works_without_tensorflow_and_keras():
    names = ", ".join(f"tftpu.preflight.{module}" for module in MODULES)
    code = f"import sys, {names}; print({{'tensorflow', 'keras', 'jax'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_the_hardware_of_a_run_is_described_without_tensorflow():
    code = (
        "import sys; from tftpu.tpu import hardware; print(hardware.of_devices(8, False));"
        "print({'tensorflow', 'keras', 'jax'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        "Hardware(chips=8, generation=None, is_tpu=False)",
        "set()",
    ]
