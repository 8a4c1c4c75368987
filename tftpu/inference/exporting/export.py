"""Writes an export to a scratch folder, runs it in the real runtime, and compares its outputs.

An export that differs from the trained model is discarded.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tftpu import quick_import
from tftpu.errors import UserError
from tftpu.inference.exporting import litert_model, onnx_model
from tftpu.inference.exporting.serving import Serving
from tftpu.storage import files

TOLERANCE = 1e-4  # allowed difference, as a share of the largest output
_RUNTIMES = Path(__file__).parent / "runtimes"
# For some scripts, the package that they import and that `quick_import` can import faster.
_IMPORTED = {"run_saved_model.py": "tensorflow", "run_keras.py": "keras"}
_BATCHES = (5, 1)


class Exported(NamedTuple):
    """An export that was compared with the model.

    Attributes:
        bytes: the size on disk.
        difference: the largest difference between its outputs and the model's, divided by the
            largest output.
    """

    bytes: int
    difference: float


def saved_model(serving: Serving, to: str) -> Exported:
    """Writes a SavedModel, which TensorFlow runs without Keras; see `onnx`."""

    def write(path: Path) -> None:
        tf.saved_model.save(serving.module(), str(path), serving.signatures())

    further = [] if serving.of_files is None else [serving.draw_files()]
    return _write_export(serving, to, write, "run_saved_model.py", further=further)


def onnx(serving: Serving, to: str, about: Mapping[str, Any]) -> Exported:
    """Writes an ONNX model.

    Args:
        serving: the model.
        to: the path of the export, local or `gs://`, which must not exist yet.
        about: JSON values for the file's metadata, by name.

    Raises:
        UserError: the model cannot be converted, the outputs of the export differ from the model's,
            or `to` exists or cannot be written.
    """
    return _write_export(
        serving, to, lambda path: onnx_model.write(serving, path, about), "run_onnx.py"
    )


def litert(serving: Serving, to: str, about: Mapping[str, Any]) -> Exported:
    """Writes a LiteRT model, which the Interpreter and the CompiledModel of LiteRT run.

    Args:
        serving: the model, without labels, because CompiledModel has no strings; its quantized
            weights have 8 bits.
        to: the path of the export, local or `gs://`, which must not exist yet.
        about: JSON values for the file "about.json" inside, by name.

    Raises:
        UserError: the model cannot be converted, the outputs of the export differ from the model's,
            or `to` exists or cannot be written.
    """
    return _write_export(
        serving, to, lambda path: litert_model.write(serving, path, about), "run_litert.py"
    )


def keras_file(serving: Serving, to: str) -> Exported:
    """Writes the model as a `.keras` file; arguments and errors as for `onnx`."""
    return _write_model(serving, to, lambda path: serving.model.save(path))


def preset(serving: Serving, to: str) -> Exported:
    """Writes a KerasHub model, with its preprocessor if it has one, as a preset; see `onnx`."""
    model: Any = serving.model
    return _write_model(serving, to, lambda path: model.save_to_preset(str(path)))


def _write_model(serving: Serving, to: str, write: Callable[[Path], None]) -> Exported:
    """Writes a model that Keras loads, and runs it with the modules that define its layers."""
    modules = sorted(list_modules(serving.model))
    return _write_export(serving, to, write, "run_keras.py", modules)


def list_modules(model: keras.Model) -> set[str]:
    """Returns the names of the modules that define the classes of a model and its layers."""
    found = {type(model).__module__}
    for layer in model.layers:
        found |= list_modules(layer) if isinstance(layer, keras.Model) else {type(layer).__module__}
    return found


def _write_export(
    serving: Serving,
    to: str,
    write: Callable[[Path], None],
    runtime: str,
    modules: Sequence[str] = (),
    further: Sequence[Mapping[str, np.ndarray]] = (),
) -> Exported:
    if files.exists(to):
        raise UserError(f"{to} exists already: choose another place.")
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / (os.path.basename(to.rstrip("/")) or "model")
        write(path)
        drawn = [serving.draw_examples(size, n) for n, size in enumerate(_BATCHES)]
        calls = [*drawn, *further]
        difference = _compare_export(serving, path, [runtime, *modules], calls, Path(scratch))
        size = _put(path, to)
    return Exported(size, difference)


def _compare_export(
    serving: Serving,
    path: Path,
    program: Sequence[str],
    calls: Sequence[Mapping[str, np.ndarray]],
    scratch: Path,
) -> float:
    """Returns the difference between an export's outputs and the model's; see `Exported`.

    Args:
        serving: the model.
        path: the path of the export.
        program: the script that runs the export, then the modules that it must import.
        calls: the inputs of each call, by name.
        scratch: a folder for inputs and outputs.

    Raises:
        UserError: the difference exceeds `TOLERANCE`, or the runtime cannot run the export.
    """
    named: dict[str, Any] = {f"{n}/{k}": v for n, x in enumerate(calls) for k, v in x.items()}
    np.savez(scratch / "in.npz", **named)
    runtime, *modules = program
    # -I also ignores PYTHONPATH, which is needed only to import the modules of a user's layers.
    alone = "-P" if modules else "-I"
    script, package = _RUNTIMES / runtime, _IMPORTED.get(runtime)
    command = [sys.executable, alone, str(script)]
    if package:
        command = quick_import.build_script_command(script, package, alone)
    paths = [str(path), str(scratch / "in.npz"), str(scratch / "out.npz")]
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1"}
    done = subprocess.run(
        [*command, *paths, *modules],
        capture_output=True,
        text=True,
        env={**os.environ, **quiet, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    if done.returncode:
        why = next(iter(done.stderr.strip().splitlines()[-1:]), f"exit status {done.returncode}")
        raise UserError(f"The export was discarded, because its runtime cannot run it ({why}).")
    found = np.load(scratch / "out.npz")
    worst = 0.0
    for number, inputs in enumerate(calls):
        theirs = {name: found[f"{number}/{name}"] for name in serving.output_specs()}
        worst = max(worst, _compute_difference(serving.outputs(inputs), theirs))
    return worst


def _compute_difference(ours: Mapping[str, np.ndarray], theirs: Mapping[str, np.ndarray]) -> float:
    worst = 0.0
    for name, value in ours.items():
        if value.dtype.kind == "f":
            off = float(np.abs(value - theirs[name]).max() / max(np.abs(value).max(), 1e-30))
            if not off <= TOLERANCE:
                raise UserError(
                    f"The export was discarded, because its output {name!r} differs from the "
                    f"model's by {off:.1e} of the largest value, but only {TOLERANCE:.0e} is "
                    "allowed."
                )
            worst = max(worst, off)
    for name, value in ours.items():
        if value.dtype.kind != "f" and not _is_same(value, theirs[name], ours):
            raise UserError(
                f"The export was discarded, because its output {name!r} differs from the model's."
            )
    return worst


def _is_same(value: np.ndarray, theirs: np.ndarray, ours: Mapping[str, np.ndarray]) -> bool:
    """Returns whether integers or texts are equal; classes may differ where scores nearly tie."""
    same = (value.astype(str) if value.dtype == object else value) == theirs
    if "class" in ours and ours["logits"].shape[-1] > 1:
        scores = np.sort(ours["logits"], -1)
        same |= scores[:, -1] - scores[:, -2] <= 2 * TOLERANCE * np.abs(scores).max()
    return bool(np.all(same))


def _put(path: Path, to: str) -> int:
    """Moves an export from `path` to `to`, local or `gs://`; returns its size in bytes."""
    parts = [p for p in path.rglob("*") if p.is_file()] if path.is_dir() else [path]
    # This file is moved last: a folder without it is not taken for a model.
    parts.sort(key=lambda part: part.name == "saved_model.pb")
    size = sum(part.stat().st_size for part in parts)
    try:
        if files.is_remote(to):
            for part in parts:
                name = part.relative_to(path).as_posix() if path.is_dir() else ""
                files.write_whole(files.join(to, name) if name else to, part.read_bytes())
        else:
            _move(path, Path(to).absolute())
    except OSError as error:
        raise UserError(f"{to} cannot be written ({error.strerror or error}).") from error
    return size


def _move(path: Path, place: Path) -> None:
    """Moves a file or a folder atomically; between file systems, it is copied first."""
    files.make_folder(place.parent)
    beside = place.with_name(f".{place.name}.{os.getpid()}")
    try:
        try:
            path.rename(beside)
        except OSError:
            # Not `shutil.move`, whose error message would list all files of a folder.
            for part in (path, *sorted(path.rglob("*"))):
                target = beside / part.relative_to(path)
                target.mkdir() if part.is_dir() else shutil.copyfile(part, target)
        beside.rename(place)
    except OSError:
        if beside.is_dir():
            shutil.rmtree(beside, ignore_errors=True)
        else:
            beside.unlink(missing_ok=True)
        raise
