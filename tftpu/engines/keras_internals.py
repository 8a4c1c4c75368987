"""Every private interface of Keras that the engines use, each behind one small function.

Tested with Keras 3.14 - 3.15; `tests/engines/test_internals.py` fails when one of them changes.
"""

import contextlib
import contextvars
import copy
import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import keras
from keras.src import backend, models
from keras.src.backend.common import global_state, symbolic_scope
from keras.src.initializers import random_initializers
from keras.src.losses import loss as losses_module
from keras.src.models import functional as functional_models
from keras.src.optimizers import base_optimizer
from keras.src.random import seed_generator
from keras.src.trainers.data_adapters import array_slicing, data_adapter_utils

from tftpu.errors import UserError
from tftpu.layer_internals import read_mask
from tftpu.tensors import Nest, Tensor, ops


class CompiledTerm(NamedTuple):
    """One loss of a compiled model, for one of its outputs.

    Attributes:
        name: name of the loss as Keras logs it.
        loss: the loss.
        weight: the factor of the loss in the total.
    """

    name: str
    loss: keras.losses.Loss
    weight: float | keras.Variable


class BoundMetric(NamedTuple):
    """A compiled metric, bound to one output.

    Attributes:
        metric: the metric.
        output: index of the flattened output that it reads.
        weighted: whether sample weights apply to it.
        name: its name in Keras's logs, if no other metric has the same name.
    """

    metric: keras.Metric
    output: int
    weighted: bool
    name: str


def build(model: keras.Model, batch: Nest) -> None:
    """Creates all variables that `fit` would: of weights, losses, metrics and the optimizer.

    Args:
        model: the compiled model.
        batch: `(x, y, sample_weight)` of `keras.KerasTensor`s of static shape.

    Raises:
        UserError: a layer raised it, which Keras would report as a `RuntimeError`, or the batch
            lacks an input.
    """
    x, *others = batch
    batch = (_pick_inputs(model, x), *others)
    with plain_errors():
        try:
            model._symbolic_build(data_batch=batch)
        except RuntimeError as error:
            if isinstance(error.__context__, UserError):
                raise error.__context__ from None
            raise


def build_by(function: Callable[[Nest], Any], batch: Nest) -> Any:
    """Creates the variables that a function of a batch needs; returns the specs of its result.

    Args:
        function: a function that calls layers.
        batch: `keras.KerasTensor`s of static shape.
    """
    return backend.compute_output_spec(function, batch)


@contextlib.contextmanager
def plain_errors() -> Iterator[None]:
    """Keeps Keras from adding the arguments of layers to errors within the block."""
    filtered = keras.config.is_traceback_filtering_enabled()
    keras.config.disable_traceback_filtering()
    try:
        yield
    finally:
        if filtered:
            keras.config.enable_traceback_filtering()


def compute_loss(
    model: keras.Model, x: Nest, y: Nest, y_pred: Nest, sample_weight: Nest, training: bool
) -> Tensor | None:
    """Calls a model's own `compute_loss`, passing only the arguments that it takes."""
    return model._compute_loss(x, y, y_pred, sample_weight, training=training)


_SCALING = (
    losses_module.scale_loss_for_distribution,
    losses_module.unscale_loss_for_distribution,
)
_unscaled: list[object] = []  # open blocks of all threads; TensorFlow traces replicas in threads


@contextlib.contextmanager
def unscaled_losses() -> Iterator[None]:
    """Makes Keras's loss reductions return plain means within the block, as on one device.

    Under a strategy Keras divides each mean by the number of replicas, because its own step adds
    up the replicas' gradients. A loss that calls Keras's losses would come out too small here.
    """
    block = object()
    _unscaled.append(block)
    losses_module.scale_loss_for_distribution = lambda value: value
    losses_module.unscale_loss_for_distribution = lambda value: value
    try:
        yield
    finally:
        _unscaled.remove(block)
        if not _unscaled:
            losses_module.scale_loss_for_distribution = _SCALING[0]
            losses_module.unscale_loss_for_distribution = _SCALING[1]


def find_function(owner: keras.losses.Loss | keras.Metric) -> Any:
    """Returns the function that a loss or metric wraps; its class if it wraps none."""
    found = (getattr(owner, name, None) for name in ("fn", "_fn"))
    return next((function for function in found if callable(function)), type(owner))


def has_raw_operations(model: keras.Model) -> bool:
    """Returns whether a functional model calls functions of `keras.ops` between its layers."""
    operations = model.operations if isinstance(model, models.Functional) else []
    return any(not isinstance(operation, keras.Layer) for operation in operations)


def list_loss_terms(model: keras.Model) -> list[CompiledTerm]:
    """Returns the losses of a compiled and built model; [] if a loss function replaces them."""
    compiled: Any = model._compile_loss
    # A model with a loss function does not build the losses of `compile`.
    if compiled is None or not compiled.built:
        return []
    return [
        CompiledTerm(name, loss, 1.0 if weight is None else weight)
        for _, loss, weight, name in compiled._flat_losses
    ]


def match_losses(
    model: keras.Model, y: Nest, y_pred: Nest, sample_weight: Nest
) -> list[tuple[Tensor, Tensor, Tensor | None]]:
    """Returns `(y, y_pred, sample_weight)` for each loss, as Keras would pass them.

    Keras reconciles lists, dicts and missing labels in many ways. Its own code runs here, with
    recorders in place of the losses.
    """
    compiled: Any = model._compile_loss
    seen = []

    def record(y_true, y_pred, sample_weight):
        seen.append((y_true, y_pred, sample_weight))
        return ops.zeros(())

    losses = compiled._flat_losses
    compiled._flat_losses = [term._replace(loss=record) for term in losses]
    try:
        compiled(y, y_pred, sample_weight)
    finally:
        compiled._flat_losses = losses
    return seen


def list_bound_metrics(model: keras.Model) -> list[BoundMetric]:
    """Returns the metrics of a compiled and built model, in the order of `compute_metrics`."""
    compiled: Any = getattr(model, "_compile_metrics", None)
    # A model with a loss function does not build the metrics of `compile`.
    if compiled is None or not compiled.built:
        return []
    return [
        BoundMetric(
            metric, output, weighted, "_".join(filter(None, [metrics.output_name, metric.name]))
        )
        for weighted, lists in (
            (False, compiled._flat_metrics),
            (True, compiled._flat_weighted_metrics),
        )
        for output, metrics in enumerate(lists)
        for metric in (metrics.metrics if metrics else ())
    ]


def compute_metric_values(metric: keras.Metric, y: Tensor, y_pred: Tensor) -> Tensor | None:
    """Returns the per-example values of a mean metric; None for other metrics."""
    if not isinstance(metric, keras.metrics.MeanMetricWrapper):
        return None
    return ops.convert_to_tensor(metric._fn(y, y_pred, **metric._fn_kwargs))


def update_mean(
    metric: Any, values: Tensor, y: Tensor, y_pred: Tensor, sample_weight: Tensor | None = None
) -> None:
    """Updates a mean metric with its per-example values, which are not computed again."""
    weight = losses_module.apply_mask(
        sample_weight, read_mask(y_pred), dtype=metric.dtype, reduction="sum"
    )
    keras.metrics.Mean.update_state(metric, values, sample_weight=weight)


def list_tracked_metrics(model: keras.Model) -> list[keras.Metric]:
    """Returns the metrics that a model or its layers update themselves, not compiled ones."""
    layers = (layer for layer in list_layers(model) if not isinstance(layer, keras.Model))
    return [*model._metrics, *(metric for layer in layers for metric in layer.metrics)]


def list_compiled_states(model: keras.Model) -> list[keras.Variable]:
    """Returns the states of compiled metrics, and of Keras's running means of several losses."""
    metrics = [bound.metric for bound in list_bound_metrics(model)]
    return [v for metric in (*metrics, *list_loss_means(model)) for v in metric.variables]


def list_loss_means(model: keras.Model) -> list[keras.Metric]:
    """Returns the metrics in which Keras averages each loss of a model with several losses."""
    compiled: Any = model._compile_loss if getattr(model, "compiled", False) else None
    return list(compiled.metrics) if compiled is not None else []


def describe_compiled_parts(model: keras.Model) -> list[str]:
    """Returns "a loss" and "metrics", each if the model is compiled with it."""
    if not getattr(model, "compiled", False):
        return []
    given = {"a loss": model._compile_loss, "metrics": model._compile_metrics}
    return [name for name, part in given.items() if part is not None]


def compile_arguments(model: keras.Model) -> list[str]:
    """Returns the names of the arguments of the last `compile` that are not None."""
    config: Any = getattr(model, "_compile_config", None)  # `_compile_loss` may be older
    return [name for name, part in (config.config if config else {}).items() if part is not None]


def list_compiled_names(model: keras.Model) -> dict[str, list[str]]:
    """Returns the losses ("loss") and metrics ("metric") that `compile` was given by name."""
    loss, metrics = model._compile_loss, model._compile_metrics
    given = {"loss": [] if loss is None else [loss._user_loss], "metric": []}
    if metrics is not None:
        given["metric"] = [metrics._user_metrics, metrics._user_weighted_metrics]
    return {
        kind: [name for name in keras.tree.flatten(parts) if isinstance(name, str)]
        for kind, parts in given.items()
    }


def describe_training_setup(model: keras.Model) -> tuple[Any, ...]:
    """Returns the model's settings for training, which `compile` and freezing layers change."""
    names = ("optimizer", "_compile_loss", "_compile_metrics")
    parts = [getattr(model, name, None) for name in names]
    return (*parts, *(v.path for v in model.trainable_variables))


def compute_metric_results(model: keras.Model) -> dict[str, Tensor]:
    """Returns the results of the compiled metrics, under the names that `fit` gives them."""
    return model._compile_metrics.result() if model._compile_metrics is not None else {}


def select_metric_results(model: keras.Model, logs: dict[str, Any]) -> dict[str, Any]:
    """Returns a model's metric results if the logs have the same names; otherwise the logs."""
    return model._get_metrics_result_or_logs(logs)


def overrides(model: keras.Model, method: str) -> bool:
    """Returns whether a model overrides a method of Keras's models."""
    own = getattr(type(model), method, None)
    return own is not None and not _is_keras(own)


def _is_keras(method: Any) -> bool:
    return getattr(method, "__module__", "").startswith("keras.")


def is_torch_tensor(value: Any) -> bool:
    """Returns whether a value is a tensor of PyTorch."""
    return data_adapter_utils.is_torch_tensor(value)


def build_slicer(arrays: Nest) -> Callable[[Any], Nest]:
    """Returns a function that maps the indices of examples to a batch of them.

    Args:
        arrays: arrays, and sparse or ragged tensors of any library.
    """
    sliceable: Any = array_slicing.convert_to_sliceable(arrays)

    def take(numbers: Any) -> Nest:
        return keras.tree.map_structure(
            lambda part: None if part is None else part[numbers], sliceable
        )

    return take


def is_sparse_or_ragged(value: Any) -> bool:
    """Returns whether a value is a sparse or ragged tensor of SciPy, TensorFlow or JAX."""
    kinds: Any = data_adapter_utils
    return any(
        test(value)
        for test in (
            kinds.is_scipy_sparse,
            kinds.is_jax_sparse,
            kinds.is_tensorflow_sparse,
            kinds.is_tensorflow_ragged,
        )
    )


def to_tensorflow(value: Any) -> Any:
    """Converts sparse tensors of SciPy and JAX to TensorFlow's; returns other values unchanged."""
    kinds: Any = data_adapter_utils
    if kinds.is_scipy_sparse(value):
        return kinds.scipy_sparse_to_tf_sparse(value)
    return kinds.jax_sparse_to_tf_sparse(value) if kinds.is_jax_sparse(value) else value


def to_jax(batch: Nest) -> Nest:
    """Returns a batch of any library as arrays and sparse arrays of JAX."""
    kinds: Any = data_adapter_utils
    (converted,) = kinds.get_jax_iterator([batch])
    return converted


def list_results(model: keras.Model, results: dict[str, float]) -> list[float] | float:
    """Returns results as a list in Keras's order, or as a number if there is only one."""
    return model._flatten_metrics_in_order(results)


def flatten_outputs(model: keras.Model, y: Nest) -> list[Tensor]:
    """Returns labels or predictions as a flat list, in the order of `BoundMetric.output`."""
    compiled: Any = model._compile_metrics
    return compiled._flatten_y(y)


def list_seed_states(model: keras.Model) -> list[keras.Variable]:
    """Returns the states of all seed generators that the model may draw from.

    The last is Keras's global generator, which layers with `seed=None` use.
    """
    own = [v for v in model.non_trainable_variables if v.name == "seed_generator_state"]
    return [*own, seed_generator.global_seed_generator().state]


def list_example_seeds(model: keras.Model) -> list[keras.Variable]:
    """Returns the states of generators whose random numbers depend on an example's position.

    Each has the form of the state of `tftpu.models.layers.stochastic_depth.ExampleSeed`.
    """
    return [v for v in model.non_trainable_variables if v.name == "example_seed"]


def apply_weight_decay(
    optimizer: keras.optimizers.Optimizer, variables: list[keras.Variable]
) -> None:
    """Applies the optimizer's decoupled weight decay to this replica's copies of variables."""
    own = type(optimizer)._apply_weight_decay
    if own is keras.optimizers.SGD._apply_weight_decay:
        # The TensorFlow backend's variant leaves the replica context, which is not allowed in a
        # branch of a tf.cond.
        own = base_optimizer.BaseOptimizer._apply_weight_decay
    own(optimizer, variables)


def clip(optimizer: keras.optimizers.Optimizer, grads: list[Tensor]) -> list[Tensor]:
    """Returns the gradients clipped by the optimizer's clipnorm, global_clipnorm or clipvalue."""
    return optimizer._clip_gradients(grads)


def has_own_apply(optimizer: keras.optimizers.Optimizer) -> bool:
    """Returns whether the optimizer does more in a step than `update_step` for each variable."""
    plain = keras.optimizers.SGD
    methods = ("apply", "apply_gradients", "_backend_apply_gradients", "_backend_update_step")
    return any(getattr(type(optimizer), m) is not getattr(plain, m) for m in methods)


@contextlib.contextmanager
def fresh_names() -> Iterator[None]:
    """Makes automatic names ("dense", "dense_1", …) count from the start inside the block."""
    key = "object_name_uids"
    before = global_state.get_global_attribute(key)
    global_state.set_global_attribute(key, None)
    try:
        yield
    finally:
        global_state.set_global_attribute(key, before)


def list_layers(model: keras.Model) -> list[keras.Layer]:
    """Returns all layers of the model, nested ones included."""
    return list(model._flatten_layers(include_self=False))


def keeps_graph(layer: keras.Layer) -> bool:
    """Returns whether a layer's config contains a graph of layers, as for functional models."""
    is_functional = isinstance(layer, models.Functional)
    return is_functional and functional_models.functional_like_constructor(type(layer))


def has_frozen_weights(model: keras.Model) -> bool:
    """Returns whether any weight that a layer created as trainable is frozen now.

    Moving statistics, as in BatchNormalization, are not created as trainable.
    """
    return any(map(has_frozen, list_layers(model)))


def has_frozen(layer: keras.Layer) -> bool:
    """Returns whether any weight that the layer itself created as trainable is frozen now."""
    return any(not v.trainable for v in layer._trainable_variables)


def list_symbolic_inputs(layer: keras.Layer) -> list[Any]:
    """Returns the symbolic inputs that a layer was called with in functional models."""
    nodes: Any = layer._inbound_nodes
    return [tensor for node in nodes for tensor in node.input_tensors]


def pack_inputs(model: Any, values: list[Any]) -> Nest:
    """Nests a list of values, one for each symbolic input, in the structure of a model's inputs."""
    functional = getattr(model, "_functional", None) or model
    return keras.tree.pack_sequence_as(functional._inputs_struct, values)


def call_model(model: Any, x: Nest, training: bool) -> Nest:
    """Calls a model; from a dictionary of features, passes only the model's inputs.

    Raises:
        UserError: the dictionary lacks an input.
    """
    return model(_pick_inputs(model, x), training=training)


def _pick_inputs(model: Any, x: Nest) -> Nest:
    """Picks from a dictionary the features that a functional model takes, nested as its inputs.

    Keras does so as well, but warns of other features, and of a dictionary for a single input.
    """
    if not isinstance(x, dict):
        return x
    # A subclass of Sequential with its own `call` may take other features.
    functional = model._functional if type(model).call is models.Sequential.call else model
    if getattr(type(functional), "call", None) is not models.Functional.call:
        return x
    inputs = functional._inputs_struct
    tensors = keras.tree.flatten(inputs)
    names = list(inputs) if isinstance(inputs, dict) else [tensor.name for tensor in tensors]
    if missing := [name for name in names if name not in x]:
        example = next((repr(name) for name in x if name not in names), "...")
        raise UserError(
            f"The data give {_quote(x) or 'no feature'}, but the model has the "
            f"{'input' if len(missing) == 1 else 'inputs'} {_quote(missing)}: give each input the "
            f"name of a feature, keras.Input(..., name={example}), or add the feature to the data."
        )
    if isinstance(inputs, dict):
        return {name: x[name] for name in names}
    return keras.tree.pack_sequence_as(inputs, [x[name] for name in names])


def _quote(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))


@contextlib.contextmanager
def reading_variables(read: Callable[[Any, Tensor], Tensor]) -> Iterator[None]:
    """Lets a function replace the values of variables that are read, within the block.

    Args:
        read: a function from a variable and its value, after Keras's autocast, to the new value.
    """
    kind: Any = backend.Variable
    own = kind._maybe_autocast
    kind._maybe_autocast = lambda variable, value: read(variable, own(variable, value))
    try:
        yield
    finally:
        kind._maybe_autocast = own


@contextlib.contextmanager
def assigning_variables(check: Callable[[Any, bool], None]) -> Iterator[None]:
    """Calls a function before each assignment to a variable within the block.

    Args:
        check: a function of the variable, and of whether a `keras.StatelessScope` is open.
    """
    kind: Any = backend.Variable
    own = kind.assign

    def assign(variable: Any, value: Any) -> Any:
        check(variable, backend.in_stateless_scope())
        return own(variable, value)

    kind.assign = assign
    try:
        yield
    finally:
        kind.assign = own


class Products:
    """A record of the matrix products in a model's call; the last one may be the logits.

    Attributes:
        last: the last product of (batch, time, width) with (width, classes), and its two factors;
            None if there was none.
    """

    def __init__(self) -> None:
        self.last: tuple[Tensor, Tensor, Tensor] | None = None

    def find_factors(self, tensor: Any) -> tuple[Tensor, Tensor] | None:
        """Returns the factors of a tensor if it is the last product; otherwise None."""
        if self.last is None or tensor is not self.last[0]:
            return None
        return self.last[1], self.last[2]


_PRODUCTS: contextvars.ContextVar[list[Products]] = contextvars.ContextVar("products")
_RECORDING = threading.Lock()
_recorders: list[Products] = []  # of all threads; TensorFlow traces replicas in threads


@contextlib.contextmanager
def recording_products() -> Iterator[Products]:
    """Records the products that Keras's layers compute within the block, in this thread."""
    products = Products()
    token = _PRODUCTS.set([*_PRODUCTS.get([]), products])
    module: Any = backend.numpy
    with _RECORDING:
        if not _recorders:
            module.matmul = functools.partial(_record_product, module.matmul)
        _recorders.append(products)
    try:
        yield products
    finally:
        with _RECORDING:
            _recorders.remove(products)
            if not _recorders:
                module.matmul = module.matmul.args[0]
        _PRODUCTS.reset(token)


def _record_product(own: Callable[..., Tensor], x1: Tensor, x2: Tensor) -> Tensor:
    product = own(x1, x2)
    if (len(x1.shape), len(x2.shape)) == (3, 2):
        for products in _PRODUCTS.get([]):
            products.last = product, x1, x2
    return product


@contextlib.contextmanager
def random_initial_values(value_of: Callable[[Any, Any, str, Any], Any]) -> Iterator[None]:
    """Lets a function compute the random initial values of variables, within the block.

    A value is computed when it is read, or at the end of the block, but at once if its initializer
    has a `SeedGenerator`. No value is computed for a variable that is assigned earlier, for example
    from a file.

    Args:
        value_of: a function from an initializer, and the shape, dtype and layout of a variable of
            the JAX backend, to the variable's value.
    """
    kind: Any = backend.Variable
    own = kind._initialize_with_initializer
    waiting: list[Any] = []

    def initialize(variable: Any, initializer: Any) -> None:
        if not isinstance(initializer, random_initializers.RandomInitializer):
            own(variable, initializer)
            return
        variable._initialize_layout()
        is_late = variable._initializer is not None  # Keras deferred the value until now

        def compute(shape: Any, dtype: str) -> Any:
            """Sets the value; Keras calls this to read a variable that has none."""
            if symbolic_scope.in_symbolic_scope():
                return backend.numpy.zeros(shape, dtype)  # only its shape and dtype are read
            variable._direct_assign(value_of(initializer, shape, dtype, variable._layout))
            return variable._value

        # Computed now: the values of initializers that share a generator depend on their order.
        if is_late or isinstance(initializer.seed, seed_generator.SeedGenerator):
            compute(variable._shape, variable._dtype)
            return
        variable._value, variable._initializer = None, compute
        waiting.append(variable)

    kind._initialize_with_initializer = initialize
    try:
        yield
    finally:
        kind._initialize_with_initializer = own
    for variable in waiting:
        if variable._value is None:
            variable._initializer(variable._shape, variable._dtype)
        variable._initializer = None


@contextlib.contextmanager
def random_functions(**functions: Callable[..., Any]) -> Iterator[None]:
    """Replaces functions of the backend that draw random numbers, within the block.

    Args:
        functions: the new functions by name in `keras.random`; they take the same seeds.
    """
    drawing: Any = backend.random
    before = {name: getattr(drawing, name) for name in functions}
    for name, function in functions.items():
        setattr(drawing, name, function)
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(drawing, name, function)


def draw_seed(seed: Any) -> Tensor:
    """Draws the next seed, (2,), from an integer or a `keras.random.SeedGenerator`."""
    return seed_generator.draw_seed(seed)


def forget_initial_epoch(model: Any) -> None:
    """Drops the epoch that a `keras.callbacks.BackupAndRestore` restored in an earlier `fit`."""
    model._initial_epoch = None


def find_initial_epoch(model: Any) -> int:
    """Returns the epoch that a `keras.callbacks.BackupAndRestore` has restored; 0 for none."""
    return getattr(model, "_initial_epoch", None) or 0


def build_callback_list(
    callbacks: list[keras.callbacks.Callback], model: keras.Model, epochs: int, steps: int | None
) -> keras.callbacks.CallbackList:
    """Returns Keras's list of callbacks, with its `History` added."""
    return keras.callbacks.CallbackList(
        callbacks, add_history=True, model=model, epochs=epochs, steps=steps, verbose=0
    )


def traces_batches(callback: Any) -> bool:
    """Returns whether a `keras.callbacks.TensorBoard` profiles some batches."""
    return bool(callback._should_trace)


def has_direction(callback: Any) -> bool:
    """Returns whether a callback knows the direction in which its monitored value improves."""
    with contextlib.suppress(ValueError):
        # Works on a copy, because the method changes the callback.
        copy.copy(callback)._set_monitor_op()
        return True
    return False


def find_history(callbacks: keras.callbacks.CallbackList) -> keras.callbacks.History:
    """Returns the `History` of a callback list; raises `ValueError` if it has none."""
    history = callbacks._history
    if history is None:
        raise ValueError("The callback list has no History.")
    return history
