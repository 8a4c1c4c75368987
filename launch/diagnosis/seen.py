"""Asks TensorFlow for its devices, in a separate process because its import may abort."""

import json
import os
import subprocess
import sys

from tftpu.launch import failures
from tftpu.launch.diagnosis.machine import Machine, Problem

_TIMEOUT_S = 120  # for a TPU that does not answer
_MARK = "tftpu-doctor:"
_PROGRAM = f"""
import json
from tftpu.engines.tensorflow import cluster
import tensorflow as tf
print({_MARK!r} + json.dumps({{
    "version": tf.__version__,
    "tpu_kernels": cluster.has_tpu_kernels(),
    "devices": sorted({{device.device_type for device in tf.config.list_physical_devices()}}),
}}))
"""


def ask(machine: Machine) -> tuple[dict[str, str], list[Problem]]:
    """Returns the fact for the report, and the problem if TensorFlow does not answer.

    Args:
        machine: its environment variables are used; the packages are those of this process.
    """
    environ = {**machine.environ, "TF_CPP_MIN_LOG_LEVEL": "2"}
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROGRAM],
            capture_output=True,
            text=True,
            env=environ,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {}, [_problem(f"TensorFlow did not answer within {_TIMEOUT_S} s.", [])]
    answers = [line for line in done.stdout.splitlines() if line.startswith(_MARK)]
    if not answers:
        end = f"signal {-done.returncode}" if done.returncode < 0 else f"code {done.returncode}"
        lines = done.stderr.strip().splitlines()
        return {}, [_problem(f"`import tensorflow` ends with {end}.", lines)]
    seen = json.loads(answers[-1].removeprefix(_MARK))
    kernels = "with" if seen["tpu_kernels"] else "without"
    # The TPU wheel lists the system device of a TPU even where there is none.
    devices = [name for name in seen["devices"] if name != "TPU_SYSTEM"]
    fact = f"{', '.join(devices)}; version {seen['version']}, {kernels} TPU kernels"
    return {"TensorFlow sees": fact}, []


def _problem(what: str, lines: list[str]) -> Problem:
    said = f" Its last line: {lines[-1][:200]}" if lines else ""
    explanation = failures.explain(RuntimeError("\n".join(lines)))
    return Problem(
        "tensorflow-fails",
        what + said,
        explanation.partition("\n\n")[0] if explanation else "Nothing runs until this is fixed.",
        f"{os.path.basename(sys.executable)} -c 'import tensorflow'",
    )
