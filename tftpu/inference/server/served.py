"""Models that the server can call: an export, or the model of a run."""

import dataclasses
import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tftpu import installation
from tftpu.errors import UserError
from tftpu.inference.exporting import onnx_seal
from tftpu.inference.exporting.inputs import Input
from tftpu.inference.server import device
from tftpu.storage import files

Arrays = dict[str, np.ndarray]
Call = Callable[[Mapping[str, np.ndarray]], Arrays]


class Refused(Exception):  # noqa: N818 (an answer, not a failure of the server)
    """The model cannot compute the request; the message says why."""


@dataclasses.dataclass(frozen=True)
class Served:
    """A model that answers requests with arrays.

    Attributes:
        inputs: the inputs in order.
        outputs: the names of the outputs.
        call: a function that maps inputs by name to outputs by name, for any batch size. It raises
            `Refused` for values that the model does not take.
        device: "CPU" or "GPU".
        encode: a function that returns the inputs by name for texts; None: the model takes none. It
            raises `Refused` for a text that cannot be read.
    """

    inputs: tuple[Input, ...]
    outputs: tuple[str, ...]
    call: Call
    device: str = "CPU"
    encode: Callable[[Sequence[str]], Arrays] | None = None


def check_outputs(model: Served) -> None:
    """Checks the outputs for two examples of zeros, which also loads the model.

    Raises:
        UserError: an output does not have a value for each example, or cannot be written as JSON.
        Refused: the model does not take zeros.
    """
    found = model.call({i.name: np.zeros((2, *i.shape), i.dtype) for i in model.inputs})
    for name, value in found.items():
        if value.shape[:1] != (2,):
            raise UserError(
                f"The output {name!r} has the shape {list(value.shape)} for two examples: to be "
                "served, a model must return one value for each example."
            )
        if value.dtype.kind not in "biufOSU":
            raise UserError(
                f"The output {name!r} has the dtype {value.dtype}, which JSON cannot represent."
            )


def load(path: str) -> Served:
    """Loads an exported model.

    Args:
        path: an ONNX file or the folder of a SavedModel, local or `gs://`; or a folder with a
            single ONNX file.

    Raises:
        UserError: the model does not exist, cannot be loaded, or has a fixed batch size.
    """
    if path.endswith(".onnx"):
        return _load_onnx(path)
    if files.exists(files.join(path, "saved_model.pb")):
        return _load_saved_model(path)
    names = [name for name in files.list_names(path) if name.endswith(".onnx")]
    if len(names) == 1:
        return _load_onnx(files.join(path, names[0]))
    if files.exists(files.join(path, "config.json")):
        raise UserError(f"{path} is a run, not an exported model: `tftpu serve {path}` serves it.")
    found = f"holds {len(names)} files of ONNX" if names else "is not an export that can be served"
    raise UserError(
        f"{path} {found}: give an ONNX file (.onnx) or the folder of a SavedModel, as `tftpu "
        "export` writes them."
    )


def _load_onnx(path: str) -> Served:
    try:
        import onnxruntime
    except ImportError as error:
        raise UserError(
            f"{path} needs ONNX Runtime: run `{installation.command('serve')}`."
        ) from error
    if not files.exists(path):
        raise UserError(f"There is no file {path}.{files.suggest_existing(path)}")
    data = files.read(path)
    if not onnx_seal.is_intact(data):
        raise UserError(
            f"{path} is not the file that `tftpu export` wrote, because its content does not "
            "match its checksum. Copy or export it again. A program that changes the file on "
            f"purpose must remove {onnx_seal.KEY!r} from its metadata."
        )
    try:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4  # errors are raised as exceptions anyway
        session = onnxruntime.InferenceSession(
            data, options, providers=onnxruntime.get_available_providers()
        )
    except Exception as error:  # the exceptions of ONNX Runtime share no base class
        raise UserError(f"ONNX Runtime cannot load {path}: {extract_first_line(error)}") from error
    inputs = [
        _check_input(path, value.name, value.shape, _parse_onnx_dtype(value.type))
        for value in session.get_inputs()
    ]
    outputs = tuple(value.name for value in session.get_outputs())
    failures: Any = importlib.import_module("onnxruntime.capi.onnxruntime_pybind11_state")

    def call(given: Mapping[str, np.ndarray]) -> Arrays:
        try:
            found: list[Any] = list(session.run(list(outputs), dict(given)))
        except (failures.InvalidArgument, failures.RuntimeException) as error:
            raise Refused(extract_first_line(error)) from error
        return dict(zip(outputs, found))

    used = device.find_onnxruntime_device(session.get_providers())
    return Served(tuple(inputs), outputs, call, used)


def _load_saved_model(path: str) -> Served:
    import tensorflow as tf

    try:
        signatures = tf.saved_model.load(path).signatures
    except Exception as error:  # a damaged graph raises KeyError, RuntimeError and others
        raise UserError(f"TensorFlow cannot load {path}: {extract_first_line(error)}") from error
    if "serving_default" not in signatures:
        raise UserError(f"The SavedModel {path} has no signature named serving_default.")
    run = signatures["serving_default"]
    specs: Mapping[str, tf.TensorSpec] = run.structured_input_signature[1]
    inputs = []
    for name, spec in specs.items():
        if spec.shape.rank is None:
            raise UserError(f"The input {name!r} of {path} has no known shape.")
        inputs.append(_check_input(path, name, spec.shape.as_list(), spec.dtype.name))

    def call(given: Mapping[str, np.ndarray]) -> Arrays:
        found = run(**{name: tf.constant(value) for name, value in given.items()})
        return {name: value.numpy() for name, value in found.items()}

    outputs = tuple(sorted(run.structured_outputs))
    return wrap_tensorflow(tuple(inputs), outputs, call)


def wrap_tensorflow(inputs: tuple[Input, ...], outputs: tuple[str, ...], call: Call) -> Served:
    """Returns a `Served` model that TensorFlow computes.

    Args:
        inputs: the inputs in order.
        outputs: the names of the outputs.
        call: see `Served`; raises TensorFlow's errors for values that the model does not take.
    """
    import tensorflow as tf

    def explained(given: Mapping[str, np.ndarray]) -> Arrays:
        try:
            return call(given)
        except tf.errors.InvalidArgumentError as error:
            raise Refused(extract_first_line(error)) from error

    return Served(inputs, outputs, explained, device.find_tensorflow_device())


def _check_input(path: str, name: str, shape: Sequence[Any], dtype: str) -> Input:
    """Returns an input of numbers, or raises `UserError` unless only the batch size may vary."""
    first, *rest = shape or [1]
    if isinstance(first, int) or not all(isinstance(size, int) for size in rest):
        raise UserError(
            f"The input {name!r} of {path} has the shape {list(shape)}: the first dimension must "
            "be a batch of any size, and the others must be fixed."
        )
    try:
        np.dtype(dtype)
    except TypeError as error:
        raise UserError(
            f"The input {name!r} of {path} has the dtype {dtype}, which is not a number."
        ) from error
    return Input(name, tuple(rest), dtype)


def _parse_onnx_dtype(kind: str) -> str:
    """Returns the NumPy dtype of a text such as "tensor(float)"."""
    name = kind.removeprefix("tensor(").removesuffix(")")
    return {"float": "float32", "double": "float64"}.get(name, name)


def extract_first_line(error: Exception) -> str:
    """Returns the reason from the message of an error, which may have many lines."""
    lines = [line.strip() for line in str(error).splitlines()]
    lines = [line for line in lines if line and not line.startswith("[[{{node")]
    if lines[:1] == ["Graph execution error:"]:  # a traceback of the model's code, then the reason
        lines = lines[-1:]
    reason = next(iter(lines), type(error).__name__)
    return reason.rpartition("Status Message: ")[2][:300]  # ONNX Runtime's message, after its codes
