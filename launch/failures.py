"""Turns the error that ends a command into an `ExitCode`, and explains known library errors.

There is one table for TensorFlow, JAX, XLA and libtpu. A row matches a message by words that are
stable across versions, and the first row that matches explains the message.
"""

import re
import sys
from collections.abc import Callable
from typing import NamedTuple

from tftpu.errors import ExitCode, HostLost, Preempted, UserError
from tftpu.launch import interrupts
from tftpu.storage import buckets


class Failure(NamedTuple):
    """A known failure.

    Attributes:
        name: a unique name, to which tests refer.
        pattern: regular expression for the message; its named groups fill the other texts.
        meaning: sentence that says what happened.
        remedy: sentence that says what to do; "" if there is none.
    """

    name: str
    pattern: str
    meaning: str
    remedy: str


_STEP_TOO_BIG = "The step does not fit into the memory of the TPU: it needs {used} of {limit}."
_MAKE_IT_SMALLER = (
    "Halve config.data.global_batch_size, or keep it and double "
    "config.train.gradient_accumulation_steps; mixed_bfloat16 halves the activations, and for a "
    "model of the zoo config.model.remat=block recomputes most of them."
)
FAILURES = (
    Failure(
        "bad-record",
        r"(?:User|Bucket|Missing|Unavailable)Error: (?P<what>[^\n]+)\n\s*Traceback",
        "The data cannot be read: {what}",
        "",
    ),
    Failure(
        "no-tpu-kernels",
        r"No OpKernel was registered to support Op '(?:ConfigureDistributedTPU|TPU\w+)'",
        "The TensorFlow that is loaded was not built for TPUs: plain tensorflow or tensorflow-cpu "
        "overwrote tensorflow-tpu, or is installed instead of it.",
        "Run `tftpu doctor`, which shows which package installed it and how to fix it.",
    ),
    Failure(
        "no-kernel",
        r"No OpKernel was registered to support Op '(?P<op>\w+)'",
        "This TensorFlow has no kernel of the op {op} for the device that it was placed on.",
        "Move it into the input pipeline, which runs on the CPU, or replace it with other ops.",
    ),
    Failure(
        "no-tpu-name",
        r"Please provide a TPU Name to connect to",
        "TPUClusterResolver() does not know where the TPU is.",
        'Use tftpu.connect(), or TPUClusterResolver(tpu="local") on a TPU VM, Colab or Kaggle.',
    ),
    Failure(
        "no-tpu",
        r"No matching devices found for '/device:TPU_SYSTEM:0'",
        "There is no TPU here that this process can use.",
        "On Colab or Kaggle choose a TPU as the accelerator; on a TPU VM run `tftpu doctor`, which "
        "looks for another process that uses it and for a stale lockfile.",
    ),
    Failure(
        "tpu-in-use",
        r"The TPU is already in use by (?:process with pid (?P<pid>\d+)|another process)"
        r"|Internal error when accessing libtpu multi-process lockfile",
        "Another process uses the TPU, or died using it: a TPU belongs to one process at a time.",
        "Run `tftpu doctor`, which names the process or the stale lockfile.",
    ),
    Failure(
        "libtpu-symbol",
        r"(?P<symbol>\w+) not available in this library",
        "The libtpu installed here lacks {symbol}, which this TensorFlow needs.",
        "Run `pip install 'libtpu==0.0.14'`, which tensorflow-tpu 2.20.0 was released against.",
    ),
    Failure(
        "hbm-at-compile-time",
        r"Ran out of memory in memory space hbm\. Used (?P<used>[\d.]+\w) of (?P<limit>[\d.]+\w)",
        _STEP_TOO_BIG,
        _MAKE_IT_SMALLER,
    ),
    Failure(
        "hbm-at-compile-time-in-new-words",
        r"Ran out of memory on HBM.*?\((?P<used>[\d.]+\w)\).*?\((?P<limit>[\d.]+\w)\)",
        _STEP_TOO_BIG,
        _MAKE_IT_SMALLER,
    ),
    Failure(
        "hbm-at-run-time",
        r"Attempting to (?:allocate|reserve) (?P<used>[\d.]+\w?)\b.*?That was not possible\. "
        r"There are (?P<limit>[\d.]+\w?) free",
        "The memory of the TPU is full: {used} were requested and {limit} are free.",
        "Something other than the step uses memory: a second model, another program here, "
        "results kept on the device. Otherwise halve config.data.global_batch_size, or double "
        "config.train.gradient_accumulation_steps.",
    ),
    Failure(
        "premapped-buffer",
        r"Failed to allocate using premapped buffer|premapped allocation failed"
        r"|Allocating buffer from premapped region failed",
        "The host memory for transfers to the TPU (the premapped buffer) is full.",
        "Enlarge it before the run, such as `export TPU_PREMAPPED_BUFFER_SIZE=17179869184` (bytes, "
        "a power of two), or feed smaller batches.",
    ),
    Failure(
        "transfer-manager",
        r"could not find registered transfer manager for platform Host",
        "A function compiled for the host (jit_compile=True) is called around or inside a step for "
        "a TPU, which is compiled as a whole. Keras does so for jit_compile='auto' and for "
        "convolutions with groups.",
        "Compile the model with jit_compile=False, or leave the step to tftpu.Trainer.",
    ),
    Failure(
        "strings",
        r"No registered '_Arg' OpKernel for XLA_\w+_JIT[^\n]*\n?[^\n]*T=DT_STRING"
        r"|Unsupported data type for TPU: string",
        "Strings reach the device, which supports numbers only.",
        "Turn them into numbers in the input pipeline, or drop them there: "
        "`dataset.map(lambda x: (x['image'], x['label']))`.",
    ),
    Failure(
        "unsupported-op",
        r"Detected unsupported operations when trying to compile graph .*?: "
        r"(?P<op>\w+) \(No registered",
        "XLA, which compiles for the TPU, has no {op}.",
        "Move the code that uses it into the input pipeline, or use other ops. Python functions, "
        "files, text and image decoding all belong in the pipeline.",
    ),
    Failure(
        "dynamic-shape",
        r"must be a compile-time constant",
        "A shape depends on data. A TPU program is compiled for fixed shapes.",
        "Batch with drop_remainder=True, pad to one length, and take sizes from "
        "`x.shape` instead of `tf.shape(x)`.",
    ),
    Failure(
        "value-while-tracing",
        r"(?:TracerBoolConversion|ConcretizationType|TracerIntegerConversion)Error",
        "Python asks for the value of a tensor (`if`, `while`, `float()`, `int()`, `range()`) in a "
        "step that JAX compiles before there are values.",
        "Use keras.ops.where, keras.ops.cond or keras.ops.while_loop, and sizes from `x.shape`.",
    ),
    Failure(
        "array-while-tracing",
        r"TracerArrayConversionError",
        "A function of NumPy or TensorFlow is called on a tensor of the JAX engine, in a step that "
        "JAX compiles before there are values.",
        "Use keras.ops in the model and in its losses, or move the function into the input "
        "pipeline.",
    ),
    Failure(
        "boolean-index",
        r"NonConcreteBooleanIndexError",
        "`x[mask]` has as many rows as the mask has true values, and the shapes of a compiled step "
        "do not depend on data.",
        "Use `keras.ops.where(mask, x, 0)`, or multiply by the mask.",
    ),
    Failure(
        "kept-tensor",
        r"UnexpectedTracerError",
        "A tensor of one call of the model was kept, in an attribute, a list or a global, and used "
        "in another.",
        "Return what is needed, or keep it in a variable: `self.add_weight(...)` and `assign`.",
    ),
    Failure(
        "compiler-option",
        r"No such compile option: '(?P<option>\w+)'",
        "XLA has no option {option} on this platform.",
        "Correct --config.cluster.compiler_options; CPUs and GPUs do not have libtpu's options.",
    ),
    Failure(
        "kernel-memory",
        r"Ran out of memory in memory space vmem",
        "A kernel of the step needs more of a core's own memory (VMEM) than there is.",
        "Use fewer tokens, smaller heads, or --config.model.attention=plain.",
    ),
    Failure(
        "end-of-data",
        r"End of sequence",
        "The data ended before the steps did.",
        "Let the training data repeat (`dataset.repeat()`), or ask for fewer steps.",
    ),
    Failure(
        "local-files",
        r"File system scheme '\[local\]' not implemented",
        "A TPU node (not a TPU VM) reads and writes files itself, and has no disk.",
        "Put data, checkpoints and logs into a bucket (gs://…), or use a TPU VM.",
    ),
    Failure(
        "data-file-gone",
        r"(NotFoundError|PermissionDeniedError): .*?(?P<file>/[^;\n]*); "
        r"(No such file or directory|Permission denied)",
        "The file {file} can no longer be opened: it was removed, or its permissions changed.",
        "Put it back, and run the same command again: the run resumes from its last checkpoint.",
    ),
    Failure(
        "worker-killed",
        r"^BrokenProcessPool: ",
        "A process of the data conversion was killed, probably because memory was short.",
        "Run the same command again, with fewer --workers: it resumes.",
    ),
    Failure(
        "norm-batch",
        r"norm_batch=\d+ does not divide the batch of \w+ examples given to layer '[^']+'",
        "A layer with batch statistics over fixed groups got a batch that is not a multiple of the "
        "group.",
        "Make the global batch a multiple of norm_batch x replicas x microbatches.",
    ),
    Failure(
        "disk-full",
        r"No space left on device|Disk quota exceeded",
        "The disk is full.",
        "Free some space, or write elsewhere, and run the same command again: complete files are "
        "kept.",
    ),
    Failure(
        "long-name",
        r"^OSError: \[Errno 36\] File name too long: '(?P<name>.{1,40})",
        "The name {name}… is too long for its file system: give a shorter one.",
        "",
    ),
    Failure(
        "may-not-write",
        r"^PermissionError: |^OSError: \[Errno 30\] Read-only file system",
        "Permission to write or read a file or folder is missing.",
        "Choose another one, or fix its permissions.",
    ),
    Failure(
        "host-memory",
        r"OOM when allocating tensor with shape(?P<shape>\[[\d,]*\]).*?device:(?P<device>[CG]PU):",
        "The memory of the {device} is full: a tensor of shape {shape} did not fit.",
        "Halve config.data.global_batch_size, or double config.train.gradient_accumulation_steps; "
        "`cache()` only what fits into memory.",
    ),
    Failure(
        "bucket",
        r"^(?:Bucket|Missing|Unavailable)Error: Failed [a-z ]+ (?P<path>gs://\S+): (?P<why>[^\n]+)",
        "{path} cannot be read or written: {why}",
        "Check the network, the name of the bucket and the permissions of this account, with "
        "`tftpu doctor --workdir=gs://BUCKET/RUN`.",
    ),
    Failure(
        "no-tensorboard",
        r"TensorBoard is not installed, missing implementation for tf\.summary",
        "tf.summary needs TensorBoard, which TensorFlow 2.21 no longer installs.",
        "Run `pip install 'tensorboard>=2.20,<2.22'`.",
    ),
)

_NODES = (r'op_name="([^"]+)"', r"\{\{node ([^}]+)\}\}", r"to node `([^`]+)`")
# Parts that TensorFlow adds to a node's name: loops, calls, replicas, gradients.
_NOT_A_LAYER = re.compile(
    r"while|body|cond|then|else|gradient_tape|gradients|(Stateful)?PartitionedCall|_\d+|"
    r"(while|cond|body|(Stateful)?PartitionedCall|replica|tpu|cluster)(_\d+)+|\w*\(.*\)"
)


def _read_notes(error: BaseException) -> list[str]:
    """Returns the notes of an error, without JAX's note about its filtered tracebacks."""
    return [note for note in getattr(error, "__notes__", ()) if "internal frames" not in note]


@interrupts.noting()
def run_for_exit_code(work: Callable[[], None]) -> int:
    """Runs a function and returns the exit code; prints a known error, and raises others."""
    try:
        work()
        return int(ExitCode.DONE)
    except UserError as error:
        said = str(explain(error) if isinstance(error, OSError) else error)
        return _end(_choose_code(error), "\n".join([said, *_read_notes(error)]))
    except Preempted as stopped:
        return _end(ExitCode.PREEMPTED, stopped)
    except HostLost as lost:
        return _end(ExitCode.HOST_LOST, lost)
    except (Exception, KeyboardInterrupt) as error:
        if interrupts.was_interrupted(error):
            said = "\n".join(["interrupted", *_read_notes(error)])
            return _end(ExitCode.INTERRUPTED, said)
        explanation = explain(error)
        if explanation is None:
            raise
        return _end(_choose_code(error), explanation)


def _choose_code(error: BaseException) -> ExitCode:
    """Returns the code of a known error: a restart may help where a bucket did not answer."""
    kind = buckets.UnavailableError
    is_passing = any(isinstance(one, kind) for one in (error, error.__cause__))
    # tf.data reports an error of Python code as text.
    is_reported = f"{kind.__name__}: " in str(error)
    return ExitCode.HOST_LOST if is_passing or is_reported else ExitCode.USER_ERROR


def _end(code: int, message: object) -> int:
    print(f"tftpu: {message}", file=sys.stderr)
    return int(code)


def explain(error: BaseException) -> str | None:
    """Returns an explanation of a failure, with the original message; None if it is unknown.

    Args:
        error: the exception.
    """
    message = f"{type(error).__name__}: {error}"
    for failure in FAILURES:
        match = re.search(failure.pattern, message, re.DOTALL)
        if match:
            values = match.groupdict()
            where = find_layer(message)
            said = "\n".join(f"  {line}".rstrip() for line in message.strip().splitlines())
            sentences = [
                failure.meaning.format_map(values),
                *([f"The layer is {where!r}."] if where else []),
                failure.remedy.format_map(values),
            ]
            text = " ".join(filter(None, sentences))
            # Without a remedy, the meaning quotes the message, which is therefore not repeated.
            return f"{text}\n\n{said}" if failure.remedy else text
    return None


def find_layer(message: str) -> str | None:
    """Returns the layer that a message names, such as "encoder/block_3/attention", or None."""
    for pattern in _NODES:
        for node in re.findall(pattern, message):
            parts = [part for part in node.split("/")[:-1] if not _NOT_A_LAYER.fullmatch(part)]
            if parts:
                return "/".join(parts)
    return None
