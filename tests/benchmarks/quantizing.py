"""Trains two configs, and measures what weights of 8 and 4 bits cost them.

    python -m tests.benchmarks.quantizing [--workdir=runs]

Prints the table of `tftpu quantize` for digits_resnet and python_gpt, and the sizes of their ONNX
files as parts of those in float32. It takes 5 minutes on 2 cores.

Evidence: executed, on this machine's CPU; the files are run by ONNX Runtime.
"""

import argparse
import os
import tempfile

from tftpu.launch.main import main as tftpu

CONFIGS = ("digits_resnet", "python_gpt")


def main() -> None:
    """Prints the measurements."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workdir", default="", help="runs that are there are not trained again")
    folder = parser.parse_args().workdir or tempfile.mkdtemp()
    for config in CONFIGS:
        workdir = os.path.join(folder, config)
        run = f"--workdir={workdir}"
        if not os.path.exists(os.path.join(workdir, "config.json")):
            tftpu(["train", f"--config={config}", run])
        print(f"\n{config}", flush=True)
        tftpu(["quantize", run])
        with tempfile.TemporaryDirectory() as scratch:
            whole = _size(run, scratch, [])
            for name in ("int8", "int4"):
                part = _size(run, scratch, [f"--quantize={name}"])
                print(f"{config} as ONNX, {name}: {part / whole:.3f} of float32", flush=True)


def _size(run: str, folder: str, words: list[str]) -> int:
    """Returns the bytes of an ONNX file of a run."""
    path = os.path.join(folder, f"model{len(os.listdir(folder))}.onnx")
    tftpu(["export", run, "--format=onnx", f"--to={path}", *words])
    return os.path.getsize(path)


if __name__ == "__main__":
    main()
