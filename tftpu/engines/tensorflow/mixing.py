"""A guard: finds models whose examples depend on each other, before they are divided.

Such a model gives other numbers on another number of devices, because each sees only its share.
"""

import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tftpu.engines import checks, keras_internals
from tftpu.engines.compiled_losses import CompiledLosses
from tftpu.engines.division import Division
from tftpu.engines.forward import ForwardPass, Values
from tftpu.engines.losses import Losses, examples_of
from tftpu.engines.tensorflow.collectives import gathering
from tftpu.engines.tensorflow.state import ModelState
from tftpu.tensors import Nest, Tensor

# More than rounding: the same examples in another place of a batch may be summed in another order.
_TOLERANCE = 1e-4
# Whose layers and losses, but for batch normalisation, compute every example by itself.
_KNOWN = ("keras", "keras_hub", "tftpu")


def warn_of_mixing(state: ModelState, batches: Callable[[], tf.data.Dataset]) -> None:
    """Warns if the loss of an example depends on the other examples of its batch.

    What consists of Keras's own layers and losses is known not to, except for batch
    normalisation. Other code is tried: the loss of half of the examples, once beside the other
    half and once beside itself.

    Args:
        state: the variables.
        batches: returns global batches, of which the first is used; called only for a trial.
    """
    if not checks.warn_of_batch_statistics(state.model) and _has_unknown_code(state):
        names = _mixed(state, _first_examples(state, batches()))
        if names:
            warnings.warn(
                f"The loss {names[0]!r} of an example depends on the other examples of its batch "
                "(statistics of the batch, or a loss over pairs). Each device computes its own "
                "share, so another number of devices or microbatches gives other numbers. "
                "tftpu.all_gather() gives a loss function the examples of all devices.",
                stacklevel=2,
            )


def refuse_metrics(state: ModelState, batches: Callable[[], tf.data.Dataset]) -> None:
    """Raises `UserError` for a metric whose states cannot be added up over batches and devices.

    Keras's own metrics are made of sums and counts. Others are tried: the state after a batch twice
    over must be twice that after it once.

    Args:
        state: the variables.
        batches: as for `warn_of_mixing`.
    """
    own = [losses for losses in state.losses if losses.unknown_metrics]
    if not own:
        return
    batch = _first_examples(state, batches())
    compute = tf.function(lambda given: _metric_states(state, own, given), autograph=False)
    names = [v.path for losses in own for v in losses.metric_variables]
    checks.refuse_states(names, *compute(batch))


def _metric_states(
    state: ModelState, own: list[Losses], batch: Nest
) -> tuple[list[Tensor], list[Tensor]]:
    """Returns the states of metrics after a batch, and after the same batch twice."""
    once: list[Tensor] = []
    twice: list[Tensor] = []
    for losses in own:
        forward = ForwardPass(state, losses, [])
        values = Values(state.trained_values(), seeds=state.seeds(0, 0, 0))
        first = forward.run(batch, values, training=False, division=Division()).metrics
        values = values._replace(metrics=first)
        once += first
        twice += forward.run(batch, values, training=False, division=Division()).metrics
    return once, twice


def _has_unknown_code(state: ModelState) -> bool:
    layers = keras_internals.flat_layers(state.model)
    if any(_is_unknown(type(layer)) or isinstance(layer, keras.layers.Lambda) for layer in layers):
        return True
    if keras_internals.has_raw_operations(state.model):
        return True
    for losses in state.losses:
        if not isinstance(losses, CompiledLosses) or any(map(_is_unknown, losses.functions)):
            return True
    return False


def _is_unknown(code: Any) -> bool:
    # Code that `exec` made has no module.
    return (getattr(code, "__module__", None) or "").split(".")[0] not in _KNOWN


def _first_examples(state: ModelState, batches: tf.data.Dataset) -> Nest:
    """Returns as many examples as two parts of a global batch have, or all that there are."""
    batch = next(iter(batches.take(1)))
    parts = state.replicas * state.options.gradient_accumulation_steps
    size = examples_of(batch) // parts * min(parts, 2)
    return keras.tree.map_structure(lambda t: t[: size - size % 2], batch)


def _mixed(state: ModelState, batch: Nest) -> list[str]:
    """Returns the names of the terms whose values for half a batch depend on the other half."""
    half = examples_of(batch) // 2
    if half == 0:
        return []
    alike = keras.tree.map_structure(lambda t: tf.concat([t[:half], t[:half]], 0), batch)
    names: list[str] = []
    compute = tf.function(lambda given: _values(state, given), autograph=False)
    with gathering() as gathered:
        together, beside_itself = compute(batch), compute(alike)
    if gathered:  # which is exact on any number of devices
        return []
    terms = [term.name for losses in state.losses for term in losses.terms]
    for name, *values in zip(terms, together, beside_itself):
        one, other = (value.numpy() for value in values)
        if one.ndim == 0 or one.shape[0] != 2 * half:
            continue
        scale = np.abs(one[:half]).max() + 1e-6
        with np.errstate(invalid="ignore"):  # of a loss that overflows, nothing is known
            far = np.abs(one[:half] - other[:half]).max() > _TOLERANCE * scale
        if far:
            names.append(name)
    return names


def _values(state: ModelState, batch: Nest) -> list[Tensor]:
    """Returns the values of every term for each example, with the same random draws every time."""
    values = Values(state.trained_values(), seeds=state.seeds(0, 0, 0))
    return [
        element.values
        for losses in state.losses
        for element in ForwardPass(state, losses, [])
        .run(batch, values, training=True, division=Division())
        .computed.elements
    ]
