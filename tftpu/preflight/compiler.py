"""Compiles a lowered step with libtpu's ahead-of-time compiler, on a machine without a TPU.

`python -m tftpu.preflight.compiler FOLDER` is the process that does it: libtpu aborts a process
that it does not like, writes to standard error, and is not told to stop.

JAX's private interfaces are used here and nowhere else, through `_jax_internals`: tried with jax
and jaxlib 0.10.2 and libtpu 0.0.51.
"""

import gzip
import hashlib
import importlib.metadata
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from tftpu.errors import UserError
from tftpu.tpu.slices import Slice

TIME_LIMIT = 1800  # seconds; the largest models take minutes
_TRIED = {"jax": "0.10.2", "libtpu": "0.0.51"}
_INSTALL = "Run `pip install 'tftpu[preflight]'` in an environment without tensorflow-tpu."
_OUT_OF_MEMORY = "RESOURCE_EXHAUSTED"
KERNEL_MEMORY = "memory space vmem"  # of a core, not HBM: a smaller batch does not help


class Compiled(NamedTuple):
    """What the compiler made of a program for one slice.

    Attributes:
        error: "" if it compiled, else one sentence; `out_of_memory` says whether that was why.
        text: the optimised program; "" if it did not compile.
        memory: bytes by kind, as `temp_size_in_bytes`.
        bytes_accessed: by the compiler's count; the body of a loop counts once.
        seconds: how long it took, when it was compiled.
        cached: whether it was found compiled.
    """

    error: str
    out_of_memory: bool
    text: str
    memory: dict[str, int]
    bytes_accessed: float
    seconds: float
    cached: bool


def compile_program(
    hlo: bytes, target: Slice, time_limit: float = TIME_LIMIT, verbose: bool = False
) -> Compiled:
    """Compiles a program for a slice, in a process of its own; results are kept on disk.

    Args:
        hlo: a serialized HloModuleProto, of one replica.
        target: the slice; its replicas are the program's.
        time_limit: seconds after which the compiler is stopped.
        verbose: show what libtpu writes to standard error.

    Raises:
        UserError: libtpu or jax is missing, too new or too old, or cannot run on this machine.
    """
    check_machine()
    module = _to_stablehlo(hlo)
    folder = _cache_folder() / _key(module, target)
    if (folder / "result.json").exists():
        return _read(folder, cached=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix="compiling-") as work:
        job = Path(work) / "job"
        job.mkdir()
        (job / "module.mlir").write_bytes(module)
        _write_json(job / "job.json", {"topology": target.topology, "replicas": target.replicas})
        failure = _run(job, target, time_limit, verbose)
        if failure:  # a crash or a time-out: not kept, so that the next try tries
            return Compiled(failure, False, "", {}, 0.0, time_limit, False)
        shutil.rmtree(folder, ignore_errors=True)
        job.rename(folder)
    return _read(folder, cached=False)


def check_machine() -> None:
    """Raises `UserError`, with the way out, if the TPU compiler cannot run here."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        raise UserError(
            "The TPU compiler (libtpu) runs on x86-64 Linux only, and this is "
            f"{platform.system()} on {platform.machine()}: run preflight on such a machine, in a "
            "container or in Colab."
        )
    _jax_internals()
    libtpu_version()


def libtpu_version() -> str:
    """The version of libtpu that is installed.

    Raises:
        UserError: there is none.
    """
    try:
        return importlib.metadata.version("libtpu")
    except importlib.metadata.PackageNotFoundError:
        raise UserError(f"libtpu, the TPU compiler, is not installed. {_INSTALL}") from None


class _Internals(NamedTuple):
    ir: Any
    hlo: Any
    mlir: Any
    xla: Any
    topologies: Any
    xla_client: Any


def _jax_internals() -> _Internals:
    """JAX's private interfaces. Raises `UserError` if they are not what was tried."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    try:
        from jax._src.interpreters import mlir
        from jax._src.lib import xla_client
        from jax.experimental import topologies
        from jaxlib import _jax
        from jaxlib.mlir import ir
        from jaxlib.mlir.dialects import stablehlo

        needed = (_jax.mlir.hlo_to_stablehlo, _jax.CompileOptions, _jax.DeviceList)
        needed += (stablehlo.RngBitGeneratorOp, stablehlo.slice)
        assert all(map(callable, (*needed, mlir.make_ir_context)))
    except (ImportError, AttributeError) as error:
        try:
            found = f"jax {importlib.metadata.version('jax')}"
        except importlib.metadata.PackageNotFoundError:
            raise UserError(f"jax, which drives the TPU compiler, is missing. {_INSTALL}") from None
        raise UserError(
            f"{found} is not one that preflight can drive ({error}): it was tried with "
            f"{' and '.join(f'{k} {v}' for k, v in _TRIED.items())}. {_INSTALL}"
        ) from error
    return _Internals(ir, stablehlo, mlir, _jax, topologies, xla_client)


# In the process of the trainer or of the command line


def _to_stablehlo(hlo: bytes) -> bytes:
    """StableHLO with the names of the ops that it came from, less what libtpu rejects."""
    jax = _jax_internals()
    with jax.mlir.make_ir_context():
        module = jax.ir.Module.parse(jax.xla.mlir.hlo_to_stablehlo(hlo))
        _drop_copies(module.body)
        _take_the_tpus_generator(module.body, jax)
        # TensorFlow numbers its functions, so the name would be another in every process.
        module.operation.attributes["sym_name"] = jax.ir.StringAttr.get("train_step")
        return module.operation.get_asm(enable_debug_info=True).encode()


def _drop_copies(block) -> None:
    """Removes `mhlo.copy`, which means nothing and which the TPU pipeline does not know."""
    for op in list(block.operations):
        for region in op.operation.regions:
            for inner in region.blocks:
                _drop_copies(inner)
        if op.operation.name == "mhlo.copy":
            op.operation.results[0].replace_all_uses_with(op.operation.operands[0])
            op.operation.erase()


def _take_the_tpus_generator(block, jax: _Internals) -> None:
    """Draws random numbers as a TPU does, by the generator of its hardware.

    The step is lowered for a CPU, where TensorFlow takes Philox with a state of three numbers; for
    a TPU it takes XLA's default (tf2xla/kernels/rng_converter_utils.cc), which costs a fraction of
    that, and which libtpu has for all generations with a state of two. What is left of the state is
    not what it would be: an op with a seed does not read it.
    """
    for op in list(block.operations):
        for region in op.operation.regions:
            for inner in region.blocks:
                _take_the_tpus_generator(inner, jax)
        if op.operation.name != "stablehlo.rng_bit_generator":
            continue
        state = op.operation.operands[0]
        with jax.ir.InsertionPoint(op), op.location:
            pair = jax.hlo.slice(state, [0], [2], [1])
            algorithm = jax.hlo.RngAlgorithmAttr.get("DEFAULT")
            drawn = jax.hlo.RngBitGeneratorOp(
                pair.type, op.operation.results[1].type, algorithm, pair
            )
        op.operation.results[0].replace_all_uses_with(state)
        op.operation.results[1].replace_all_uses_with(drawn.output)
        op.operation.erase()


def _cache_folder() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(os.environ.get("TFTPU_CACHE") or Path(home) / "tftpu") / "preflight"


def _key(module: bytes, target: Slice) -> str:
    text = hashlib.sha256(module).hexdigest()
    return f"{target.name}-libtpu{libtpu_version()}-{text[:32]}"


def _run(job: Path, target: Slice, time_limit: float, verbose: bool) -> str:
    """Runs the compiler's process to its end. Returns why it failed, or ""."""
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",  # else libtpu waits for a cloud's metadata server
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # else one process a machine may use libtpu
        "TPU_ACCELERATOR_TYPE": target.name,
        "TPU_WORKER_HOSTNAMES": "localhost",
    }
    command = [sys.executable, "-m", "tftpu.preflight.compiler", str(job)]
    with (job / "stderr.txt").open("wb") as log:
        process = subprocess.Popen(
            command, env=environment, stdout=log, stderr=None if verbose else log
        )
        try:
            _wait(process, target, time_limit)
        except subprocess.TimeoutExpired:
            return (
                f"The TPU compiler had not finished after {time_limit:.0f} s and was stopped: "
                "raise --time_limit, or try a smaller model first."
            )
        finally:
            process.kill()
            process.wait()
    if process.returncode == 0:
        return ""
    died = process.returncode
    how = f"died of {signal.Signals(-died).name}" if died < 0 else f"ended with code {died}"
    last = [line for line in (job / "stderr.txt").read_text(errors="replace").splitlines() if line]
    return f"The TPU compiler {how}. Its last words: {' '.join(last[-2:])[-300:] or 'none'}"


def _wait(process: subprocess.Popen, target: Slice, time_limit: float) -> None:
    """Waits for the process, with a line on standard error that says for what."""
    start = time.monotonic()
    live = sys.stderr.isatty()
    while True:
        elapsed = time.monotonic() - start
        line = f"{target.name}: compiling with libtpu, {elapsed:.0f} s (limit {time_limit:.0f} s)"
        if live:
            print(f"\r{line}", end="", file=sys.stderr, flush=True)
        elif elapsed < 1:
            print(line, file=sys.stderr, flush=True)
        try:
            process.wait(min(1.0, time_limit - elapsed) if live else time_limit)
            return
        except subprocess.TimeoutExpired:
            if time.monotonic() - start >= time_limit:
                raise
        finally:
            if live:
                print("\r" + " " * len(line) + "\r", end="", file=sys.stderr, flush=True)


def _read(folder: Path, cached: bool) -> Compiled:
    result = json.loads((folder / "result.json").read_text())
    error = result["error"]
    text = "" if error else gzip.decompress((folder / "program.txt.gz").read_bytes()).decode()
    return Compiled(
        error=error,
        out_of_memory=_OUT_OF_MEMORY in error and KERNEL_MEMORY not in error,
        text=text,
        memory=result["memory"],
        bytes_accessed=result["bytes_accessed"],
        seconds=result["seconds"],
        cached=cached,
    )


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1))


# In the process of the compiler


def _compile_job(job: Path) -> None:
    """Compiles `module.mlir` of a folder as its `job.json` says, and writes what came of it."""
    settings = json.loads((job / "job.json").read_text())
    start = time.monotonic()
    result = {"error": "", "memory": {}, "bytes_accessed": 0.0}
    try:
        executable = _compile((job / "module.mlir").read_text(), **settings)
    except Exception as error:
        result["error"] = f"{type(error).__name__}: {error}"
    else:
        text = executable.hlo_modules()[0].to_string()
        (job / "program.txt.gz").write_bytes(gzip.compress(text.encode(), 5))
        memory = executable.get_compiled_memory_stats()
        result["memory"] = {
            name: getattr(memory, name) for name in dir(memory) if name.endswith("_in_bytes")
        }
        result["bytes_accessed"] = executable.cost_analysis()["bytes accessed"]
    result["seconds"] = time.monotonic() - start
    (job / "module.mlir").unlink()
    _write_json(job / "result.json", result)


def _compile(module: str, topology: str, replicas: int) -> Any:
    import numpy as np

    jax = _jax_internals()
    described = jax.topologies.get_topology_desc(platform="tpu", topology_name=topology)
    devices = tuple(described.devices)[:replicas]
    options = jax.xla.CompileOptions()
    options.num_replicas, options.num_partitions = replicas, 1
    options.device_assignment = jax.xla_client.DeviceAssignment.create(
        np.arange(replicas).reshape(replicas, 1)
    )
    with jax.mlir.make_ir_context():
        parsed = jax.ir.Module.parse(module)
        return devices[0].client.compile(parsed, jax.xla.DeviceList(devices), options)


if __name__ == "__main__":
    _compile_job(Path(sys.argv[1]))
