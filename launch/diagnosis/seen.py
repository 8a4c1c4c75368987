"""Asks TensorFlow and JAX for their devices, in separate processes because an import may abort."""

import json
import os
import subprocess
import sys
from typing import Any

from tftpu.launch import failures
from tftpu.launch.diagnosis.machine import Machine, Problem

_TIMEOUT_S = 120  # seconds to wait for a TPU that does not answer
_MARK = "tftpu-doctor:"
_TENSORFLOW = f"""
import json
from tftpu.engines.tensorflow import cluster
import tensorflow as tf
print({_MARK!r} + json.dumps({{
    "version": tf.__version__,
    "tpu_kernels": cluster.has_tpu_kernels(),
    "devices": sorted({{device.device_type for device in tf.config.list_physical_devices()}}),
}}))
"""
_JAX = f"""
import collections, json
import jax
kinds = collections.Counter(device.device_kind for device in jax.devices())
print({_MARK!r} + json.dumps({{"version": jax.__version__, "devices": kinds}}))
"""


def ask_tensorflow(machine: Machine) -> tuple[dict[str, str], list[Problem]]:
    """Returns TensorFlow's devices for the report, and the problem if TensorFlow does not answer.

    Args:
        machine: the machine whose environment variables are used, with this process's packages.
    """
    seen, problems = _run_program(_TENSORFLOW, "tensorflow", "TensorFlow", machine)
    if seen is None:
        return {}, problems
    kernels = "with" if seen["tpu_kernels"] else "without"
    # TensorFlow's wheel for TPUs lists a TPU's system device even where there is no TPU.
    devices = [name for name in seen["devices"] if name != "TPU_SYSTEM"]
    fact = f"{', '.join(devices)}; version {seen['version']}, {kernels} TPU kernels"
    return {"TensorFlow sees": fact}, []


def ask_jax(machine: Machine) -> tuple[dict[str, str], list[Problem]]:
    """Returns JAX's devices for the report, and the problem if JAX does not answer.

    Args:
        machine: see `ask_tensorflow`.
    """
    seen, problems = _run_program(_JAX, "jax", "JAX", machine)
    if seen is None:
        return {}, problems
    devices = ", ".join(f"{count} x {kind}" for kind, count in seen["devices"].items())
    return {"JAX sees": f"{devices}; version {seen['version']}"}, []


def _run_program(
    program: str, package: str, name: str, machine: Machine
) -> tuple[dict[str, Any] | None, list[Problem]]:
    """Returns the JSON that a program prints after `_MARK`, or the problem if it prints none."""
    environ = {**machine.environ, "TF_CPP_MIN_LOG_LEVEL": "2"}
    try:
        done = subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            env=environ,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return None, [_build_problem(package, f"{name} did not answer within {_TIMEOUT_S} s.", [])]
    answers = [line for line in done.stdout.splitlines() if line.startswith(_MARK)]
    if answers:
        return json.loads(answers[-1].removeprefix(_MARK)), []
    end = f"signal {-done.returncode}" if done.returncode < 0 else f"code {done.returncode}"
    lines = done.stderr.strip().splitlines()
    return None, [_build_problem(package, f"`import {package}` ends with {end}.", lines)]


def _build_problem(package: str, what: str, lines: list[str]) -> Problem:
    said = f" Its last line: {lines[-1][:200]}" if lines else ""
    explanation = failures.explain(RuntimeError("\n".join(lines)))
    return Problem(
        f"{package}-fails",
        what + said,
        explanation.partition("\n\n")[0] if explanation else "Nothing runs until this is fixed.",
        f"{os.path.basename(sys.executable)} -c 'import {package}'",
    )
