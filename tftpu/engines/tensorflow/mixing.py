"""A guard: finds models whose examples depend on each other, before they are divided.

Such a model gives other numbers on another number of devices, because each sees only its share.
"""

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tftpu.engines import checks, keras_internals
from tftpu.engines.compiled_losses import CompiledLosses
from tftpu.engines.division import Division
from tftpu.engines.forward import ForwardPass, Values
from tftpu.engines.losses import Losses, examples_of
from tftpu.engines.tensorflow import internals
from tftpu.engines.tensorflow.collectives import gathering
from tftpu.engines.tensorflow.state import ModelState
from tftpu.errors import UserError
from tftpu.tensors import Nest, Tensor

# More than rounding: the same examples in another place of a batch may be summed in another order.
_TOLERANCE = 1e-4
# Whose layers and losses, but for batch normalisation, compute every example by itself.
_KNOWN = ("keras", "keras_hub", "tftpu")


class Trial(NamedTuple):
    """The results of a batch in a trial.

    Attributes:
        terms: of every loss, one value for each example.
        added: the sum of the losses that layers added, for each objective.
        metrics: the states of the metrics.
    """

    terms: list[Tensor]
    added: list[Tensor]
    metrics: list[Tensor]


def warn_of_mixing(state: ModelState, batches: Callable[[], tf.data.Dataset]) -> None:
    """Warns if a number of an example depends on the other examples of its batch.

    What consists of Keras's own layers, losses and metrics is known not to, except for batch
    normalisation. Other code is tried: the loss of half of the examples, once beside the other
    half and once beside itself.

    Args:
        state: the variables.
        batches: returns global batches, of which the first is used; called only for a trial.

    Raises:
        UserError: layers add a loss that is no mean over examples, and a batch is divided.
    """
    normalised = checks.warn_of_batch_statistics(state.model)
    if not _has_unknown_code(state):
        return
    batch = _first_examples(state, batches())
    divided = state.replicas * state.options.gradient_accumulation_steps > 1
    if divided and (_adds_sums(state, batch, False) or _adds_sums(state, batch, True)):
        raise UserError(
            "The loss that a layer or the model adds by add_loss grows with the number of "
            "examples, and each device adds that of its own share of a batch: tftpu takes the "
            "mean of the shares, as of all losses. Add a mean over the examples, "
            "add_loss(ops.sum(loss) / ops.shape(loss)[0])."
        )
    names = [] if normalised else _mixed(state, batch, training=True)
    if names:
        warnings.warn(
            f"The {names[0]} of an example depends on the other examples of its batch "
            "(statistics of the batch, or a loss over pairs). Each device computes its own "
            "share, so another number of devices or microbatches gives other numbers. "
            "tftpu.all_gather() gives a loss function the examples of all devices.",
            stacklevel=2,
        )


def mixes_in_evaluation(state: ModelState, batches: Callable[[], tf.data.Dataset]) -> bool:
    """Returns whether an evaluation must not divide or pad a batch, as its examples are mixed.

    Args:
        state, batches: as for `warn_of_mixing`.
    """
    if not _has_unknown_code(state):
        return False
    batch = _first_examples(state, batches())
    return _adds_sums(state, batch, False) or bool(_mixed(state, batch, training=False))


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


def _mixed(state: ModelState, batch: Nest, training: bool) -> list[str]:
    """Returns what depends, for half a batch, on the other half: losses and metrics, in words."""
    half = examples_of(batch) // 2
    if half == 0:
        return []
    parts = [keras.tree.map_structure(lambda t, i=i: t[i : i + half], batch) for i in (0, half)]
    first, second = parts[0], parts[1]
    with gathering() as gathered:
        compute = _compiled(state, _joined(first, second), training)
        together, beside_itself = compute(_joined(first, second)), compute(_joined(first, first))
    if gathered:  # which is exact on any number of devices
        return []
    names: list[str] = []
    terms = [term.name for losses in state.losses for term in losses.terms]
    for name, one, other in zip(terms, together.terms, beside_itself.terms):
        if one.shape.rank and one.shape[0] == 2 * half and _differ(one[:half], other[:half]):
            names.append(f"loss {name!r}")
    # Sums over examples are the same in all, whichever halves are together.
    swapped, other = compute(_joined(second, first)), compute(_joined(second, second))
    for what, place in (("loss that layers add", 1), ("metric", 2)):
        sums = zip(*(result[place] for result in (together, swapped, beside_itself, other)))
        if any(_differ(a + b, c + d) for a, b, c, d in sums):
            names.append(what)
    return names


def _adds_sums(state: ModelState, batch: Nest, training: bool) -> bool:
    """Returns whether layers add a loss that grows with the number of examples."""
    half = examples_of(batch) // 2
    if half == 0:
        return False
    first = keras.tree.map_structure(lambda t: t[:half], batch)
    doubled = _joined(first, first)
    results = (_compiled(state, batch, training)(batch) for batch in (first, doubled))
    pairs = zip(*(result.added for result in results))
    # In training, other random numbers are drawn for the second half.
    return any(_differ(one, two, 1 / 3 if training else _TOLERANCE) for one, two in pairs)


def _joined(first: Nest, second: Nest) -> Nest:
    return keras.tree.map_structure(lambda a, b: tf.concat([a, b], 0), first, second)


def _differ(one: Tensor, other: Tensor, tolerance: float = _TOLERANCE) -> bool:
    """Returns whether values differ by more than rounding, or than another share of the first."""
    found, expected = (tf.cast(value, "float32").numpy() for value in (one, other))
    with np.errstate(invalid="ignore"):  # of a loss that overflows, nothing is known
        return bool(np.abs(found - expected).max() > tolerance * (np.abs(found).max() + 1e-6))


def _compiled(state: ModelState, batch: Nest, training: bool) -> Callable[[Nest], Trial]:
    """Returns a function that tries batches like this one, and changes nothing."""
    function: Any = tf.function(lambda given: _try(state, given, training), autograph=False)
    graph = function.get_concrete_function(batch).graph
    checks.refuse_outside(internals.changed_resources(graph))
    return function


def _try(state: ModelState, batch: Nest, training: bool) -> Trial:
    """Returns the numbers of a batch, with the same random draws every time."""
    values = Values(state.trained_values(), seeds=state.seeds(0, 0, 0))
    runs = [
        ForwardPass(state, losses, []).run(batch, values, training=training, division=Division())
        for losses in state.losses
    ]
    return Trial(
        [element.values for run in runs for element in run.computed.elements],
        [run.computed.added for run in runs],
        [value for run in runs for value in run.metrics],
    )
