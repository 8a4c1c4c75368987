"""Compares preflight's predictions with published step times, and fits its prices to them.

    python -m tests.benchmarks.calibration [ROW ...]

Each row compiles the step of a published run with the installed TPU compiler, and prices it as
`tftpu preflight` does. Without names the prices are then fitted to all rows, and to those of all
models but one, for each of the models: how far the prediction of that one is off says how far to
trust predictions of a model that nobody has published.

The first run takes two to three hours on two cores; later runs use the cached programs.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.benchmarks.calibration import fit
from tests.benchmarks.calibration.recording import read_rows

ENGINES = ("tensorflow", "jax")


def main(names: list[str]) -> None:
    """Prints the published and the predicted time of the rows; of all of them the fit, too."""
    measured = []
    with tempfile.TemporaryDirectory() as folder:
        for engine in ENGINES:  # Keras has one backend a process
            file = Path(folder) / f"{engine}.json"
            program = "tests.benchmarks.calibration.measure"
            command = [sys.executable, "-m", program, engine, str(file)]
            environment = {**os.environ, "KERAS_BACKEND": engine, "TF_CPP_MIN_LOG_LEVEL": "3"}
            subprocess.run([*command, *names], env=environment, check=True)
            measured += read_rows(file)
    if names:
        fit.compare(measured, {})
    else:
        fit.report(measured)


if __name__ == "__main__":
    main(sys.argv[1:])
