"""Ahead-of-time compilation of a lowered step by libtpu, on a machine without a TPU.

Each program is compiled in its own process (`python -m` with this module and a folder),
because libtpu aborts its process on some errors, writes to standard error, and cannot be
interrupted.
"""

import contextlib
import ctypes
import functools
import gzip
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import shutil
import signal
import sys
import threading
import time
import zlib
from pathlib import Path
from typing import Any, NamedTuple

from tftpu.engines.lowered import LoweredStep
from tftpu.errors import UserError
from tftpu.installation import find_cache_folder
from tftpu.preflight.compiling.duration import count_instructions, find_measured_seconds
from tftpu.preflight.compiling.jax_internals import Internals, install, load_internals
from tftpu.preflight.compiling.processes import Processes
from tftpu.preflight.compiling.progress import Progress
from tftpu.preflight.compiling.work_folder import open_work_folder
from tftpu.tpu.slices import Slice

TIME_LIMIT = 1800.0  # seconds; the largest models take several minutes
_OUT_OF_MEMORY = "RESOURCE_EXHAUSTED"
# Marks the error of a kernel that needs more VMEM than a core has; smaller batches do not help.
KERNEL_MEMORY = "memory space vmem"
_PR_SET_PDEATHSIG = 1  # an option of Linux's `prctl`; libtpu runs only on Linux
_CONVERTING = threading.Lock()


class Compiled(NamedTuple):
    """Result of compiling a program for one slice.

    Attributes:
        error: error message; "" if the program compiled.
        out_of_memory: whether the program failed to compile because it needs too much HBM.
        text: HLO text of the compiled program; "" if it did not compile, or cannot be read.
        memory: bytes by kind, such as `temp_size_in_bytes`.
        bytes_accessed: the compiler's count, in which the body of a loop counts once.
        seconds: duration of the compilation.
        cached: whether the result was read from the cache.
        undecided: whether the time limit passed or the compiler crashed, so the result is unknown.
    """

    error: str
    out_of_memory: bool
    text: str
    memory: dict[str, int]
    bytes_accessed: float
    seconds: float
    cached: bool
    undecided: bool = False


def compile_program(
    step: LoweredStep,
    target: Slice,
    options: dict[str, str] | None = None,
    time_limit: float = TIME_LIMIT,
    verbose: bool = False,
    processes: Processes | None = None,
    text: str = "",
) -> Compiled:
    """Compiles a step for a slice in a separate process, and caches the result on disk.

    Args:
        step: the lowered step.
        target: the slice to compile for.
        options: XLA's options by name; all others keep XLA's defaults.
        time_limit: seconds; the compiler is stopped once both elapsed and processor time reach it.
        verbose: whether to pass libtpu's messages through to standard error.
        processes: starts this compiler together with others of the check; None: starts it alone.
        text: the text of the lines of progress; "" for "compiling" and the name of the slice.

    Raises:
        UserError: the compiler cannot run on this machine (see `check_machine`), an op has operands
            that XLA does not accept, or the cache's folder cannot be created or written.
        StoppedError: `processes` was stopped.
    """
    check_machine()
    with _CONVERTING:  # one thread converts the step; the others wait and get the cached result
        module = step.program if step.partitioned else _convert_step(step)
    options = options or {}
    folder = Path(find_cache_folder("preflight")) / _build_key(module, target, options)
    kept = _read_kept(folder)
    if kept is not None:
        return kept
    if processes is None:
        with Progress() as progress:
            alone = Processes(progress)
            return compile_program(step, target, options, time_limit, verbose, alone, text)
    instructions = count_instructions(module.decode())
    with open_work_folder(folder.parent) as work:
        job = work / "job"
        job.mkdir()
        (job / "module.mlir").write_bytes(module)
        settings = {
            "topology": target.topology,
            "slices": target.slices,
            "chip_config": target.generation.chip_config,
            "partitioned": step.partitioned,
            "options": options,
            "instructions": instructions,
        }
        _write_json(job / "job.json", settings)
        text = text or f"compiling {target.name}"
        expected = find_measured_seconds(instructions, target.generation.name, folder.parent)
        failure, seconds = processes.run(job, target, time_limit, verbose, text, expected)
        if failure:  # a crash or a time-out is not cached, so that the next call compiles again
            return Compiled(failure, False, "", {}, 0.0, seconds, False, undecided=True)
        _keep(job, folder)
    return _read(folder, cached=False)


def check_machine() -> None:
    """Raises `UserError` unless this is x86-64 Linux with libtpu and a supported jax installed."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        raise UserError(
            "The TPU compiler (libtpu) runs only on x86-64 Linux, but this is "
            f"{platform.system()} on {platform.machine()}: run preflight on an x86-64 Linux "
            "machine, in a container, or in Colab."
        )
    load_internals()
    read_libtpu_version()


def read_libtpu_version() -> str:
    """Returns the version of the installed libtpu.

    Raises:
        UserError: libtpu is not installed.
    """
    try:
        return importlib.metadata.version("libtpu")
    except importlib.metadata.PackageNotFoundError:
        raise UserError(f"libtpu, the TPU compiler, is not installed. {install()}") from None


# Functions that run in the calling process


def _convert_step(step: LoweredStep) -> bytes:
    """Returns a step's program as StableHLO.

    Raises:
        UserError: an op gets operands that XLA does not accept.
    """
    try:
        return _to_stablehlo(step.program)
    except load_internals().ir.MLIRError as error:
        raise UserError(_explain_invalid(str(error), step)) from error
    finally:
        _release_memory()


def _release_memory() -> None:
    """Gives freed memory back to the system for the compiler; glibc would keep gigabytes."""
    with contextlib.suppress(AttributeError):  # another C library than glibc has no malloc_trim
        ctypes.CDLL(None).malloc_trim(0)


@functools.lru_cache(maxsize=2)
def _to_stablehlo(hlo: bytes) -> bytes:
    """Converts HLO to StableHLO with op names, and rewrites ops as libtpu needs them."""
    jax = load_internals()
    with jax.mlir.make_ir_context():
        module = jax.ir.Module.parse(jax.xla.mlir.hlo_to_stablehlo(hlo))
        _remove_copies(module.body)
        _use_hardware_generator(module.body, jax)
        # TensorFlow's numbers in names would change the cache key: the module gets a fixed name,
        # and its functions keep only the number that XLA adds at the end.
        module.operation.attributes["sym_name"] = jax.ir.StringAttr.get("train_step")
        text = module.operation.get_asm(enable_debug_info=True)
        return re.sub(r"@\w+(?=\.\d+)", lambda name: re.sub(r"_\d+", "", name[0]), text).encode()


def _explain_invalid(message: str, step: LoweredStep) -> str:
    """Turns the compiler's error message for an invalid program into one for the user."""
    found = re.search(r'error: "([^"]*)": (.*)', message)
    name, problem = found.groups() if found else ("", message[:300])
    layer, op = step.find_layer_path(name), name.rsplit("/", 1)[-1]
    where = f"the op {op} of the layer {layer!r}" if layer else f"the op {op or '(unnamed)'}"
    hint = (
        " Its operands have two float types. TensorFlow makes the gradient of a bilinear resizing "
        "float32, for example: give that layer, such as UpSampling2D, dtype='float32'."
        if "compatible types" in problem
        else ""
    )
    return f"XLA cannot compile {where} in {step.precision}.{hint} The compiler says: {problem}"


def _remove_copies(block: Any) -> None:
    """Removes `mhlo.copy`, a no-op that the TPU pipeline does not support."""
    for op in list(block.operations):
        for region in op.operation.regions:
            for inner in region.blocks:
                _remove_copies(inner)
        if op.operation.name == "mhlo.copy":
            op.operation.results[0].replace_all_uses_with(op.operation.operands[0])
            op.operation.erase()


def _use_hardware_generator(block: Any, jax: Internals) -> None:
    """Replaces the CPU's random number generator with the TPU's hardware generator.

    The step is lowered for a CPU, where TensorFlow uses Philox with a state of three integers. For
    a TPU it uses XLA's default (tf2xla/kernels/rng_converter_utils.cc): in libtpu it is much
    cheaper, and its state has two integers on all generations. Ops that use the resulting state get
    the old one instead, because ops with a seed ignore it.
    """
    for op in list(block.operations):
        for region in op.operation.regions:
            for inner in region.blocks:
                _use_hardware_generator(inner, jax)
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


def _build_key(module: bytes, target: Slice, options: dict[str, str]) -> str:
    given = json.dumps(options, sort_keys=True).encode() if options else b""
    given += os.environ.get("LIBTPU_INIT_ARGS", "").encode()  # libtpu reads its own options there
    text = hashlib.sha256(module + given).hexdigest()
    chip = f"-{target.generation.chip_config}" if target.generation.chip_config else ""
    return f"{target.name}{chip}-libtpu{read_libtpu_version()}-{text[:32]}"


def _keep(job: Path, folder: Path) -> None:
    """Moves a compiled program into the cache, unless another process has already put it there."""
    if not (folder / "result.json").exists():
        shutil.rmtree(folder, ignore_errors=True)
    try:
        job.rename(folder)
    except OSError:
        if not (folder / "result.json").exists():
            raise


def _read_kept(folder: Path) -> Compiled | None:
    """Returns a compiled program from the cache, or None; removes the program if it is damaged."""
    if not (folder / "result.json").exists():
        return None
    try:
        return _read(folder, cached=True)
    except (OSError, EOFError, ValueError, KeyError, TypeError, zlib.error):
        shutil.rmtree(folder, ignore_errors=True)
        return None


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


# Functions that run in the compiler's process


def _end_with_parent() -> None:
    """Makes the system end this process when its parent is killed.

    A compilation takes minutes and gigabytes, and nobody would read its result.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _compile_job(job: Path) -> None:
    """Compiles a folder's `module.mlir` as its `job.json` specifies, and writes the result."""
    _end_with_parent()
    settings = json.loads((job / "job.json").read_text())
    start = time.monotonic()
    result: dict[str, Any] = {"error": "", "memory": {}, "bytes_accessed": 0.0}
    result["instructions"] = settings.pop("instructions")
    dumped = job / "dumped"
    settings["options"] |= {"xla_dump_to": str(dumped), "xla_dump_hlo_as_text": "True"}
    try:
        executable = _compile((job / "module.mlir").read_text(), **settings)
    except (RuntimeError, ValueError) as error:  # the errors of libtpu, which are cached
        result["error"] = f"{type(error).__name__}: {error}"
    else:
        text = _read_text(executable, dumped)
        (job / "program.txt.gz").write_bytes(gzip.compress(text.encode(), 5))
        memory = executable.get_compiled_memory_stats()
        result["memory"] = {
            name: getattr(memory, name) for name in dir(memory) if name.endswith("_in_bytes")
        }
        result["bytes_accessed"] = executable.cost_analysis()["bytes accessed"]
    result["seconds"] = time.monotonic() - start
    result["processor_seconds"] = time.process_time()
    shutil.rmtree(dumped, ignore_errors=True)
    (job / "module.mlir").unlink()
    _write_json(job / "result.json", result)


def _read_text(executable: Any, dumped: Path) -> str:
    """Returns the text of a compiled program; "" if it cannot be read.

    jaxlib cannot read every program of a newer libtpu, such as gathers that run on the SparseCore
    of v6e. The compiler's own dump has the same program.
    """
    try:
        return executable.hlo_modules()[0].to_string()
    except RuntimeError:  # libtpu raises a JaxRuntimeError, which is a RuntimeError
        return next((p.read_text() for p in dumped.glob("*.after_codegen.txt")), "")


def _compile(
    module: str,
    topology: str,
    slices: int,
    chip_config: str,
    partitioned: bool,
    options: dict[str, str],
) -> Any:
    import numpy as np

    jax = load_internals()
    given: dict[str, Any] = {"num_slices": slices} if slices > 1 else {}
    if chip_config:
        given["chip_config_name"] = chip_config
    described = jax.topologies.get_topology_desc(platform="tpu", topology_name=topology, **given)
    # Devices have a slice index only if there are several slices.
    found = sorted(described.devices, key=lambda d: (getattr(d, "slice_index", 0), d.id))
    replicas, partitions = (1, len(found)) if partitioned else (len(found), 1)
    settings = jax.xla.CompileOptions()
    settings.num_replicas, settings.num_partitions = replicas, partitions
    settings.env_option_overrides = list(options.items())
    settings.device_assignment = jax.xla_client.DeviceAssignment.create(
        np.asarray([device.id for device in found]).reshape(replicas, partitions)
    )
    if partitioned:
        build = settings.executable_build_options
        build.use_spmd_partitioning = build.use_shardy_partitioner = True
    with jax.mlir.make_ir_context():
        parsed = jax.ir.Module.parse(module)
        return found[0].client.compile(parsed, jax.xla.DeviceList(tuple(found)), settings)


if __name__ == "__main__":
    _compile_job(Path(sys.argv[1]))
