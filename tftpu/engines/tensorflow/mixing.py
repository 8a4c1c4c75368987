"""Finds models in which the examples of a batch depend on each other.

The results of such a model change with the number of devices, because each device sees only its
shard of the batch.
"""

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tftpu.engines import checks, keras_internals
from tftpu.engines.collectives import gathering
from tftpu.engines.data.division import Division
from tftpu.engines.objectives.compiled import CompiledLosses
from tftpu.engines.objectives.forward import ForwardPass, Values
from tftpu.engines.objectives.losses import Losses, count_examples, sum_of_own
from tftpu.engines.tensorflow import internals, xla_ops
from tftpu.engines.tensorflow.state import ModelState
from tftpu.errors import OwnStepsNeeded, UserError
from tftpu.tensors import Nest, Tensor

# A relative difference larger than any from rounding, for example if examples at other positions of
# a batch are summed in another order.
_TOLERANCE = 1e-4
# The number of seeds over which to average a loss that depends on random numbers.
_DRAWS = 16
# Packages whose layers and losses compute every example separately, except batch normalization.
_KNOWN = ("keras", "keras_hub", "tftpu")


class TrialResult(NamedTuple):
    """The results of the model for a batch in a test.

    Attributes:
        terms: the values of each loss term per example; a term may be a scalar.
        added: for each objective, the sum of the losses that layers added, ().
        metrics: the states of the metrics.
    """

    terms: list[Tensor]
    added: list[Tensor]
    metrics: list[Tensor]


def warn_of_mixing(state: ModelState, batches: Callable[[], tf.data.Dataset]) -> None:
    """Warns if a result for an example depends on the other examples of its batch.

    Keras's own layers, losses and metrics compute every example separately, except batch
    normalization. This tests other code: it computes the loss of half of the examples, once in a
    batch with the other half and once in a batch with a copy of themselves.

    Args:
        state: the variables.
        batches: a function that returns global batches. It is called only to test other code, on
            the first batch.

    Raises:
        OwnStepsNeeded: a batch is divided, and a loss that layers add is not a mean over examples.
        UserError: the same, if the run has microbatches, a loss function or objectives.
    """
    normalised = checks.warn_of_batch_statistics(state.model)
    divided = state.replicas * state.options.gradient_accumulation_steps > 1
    if not _has_unknown_code(state) or (normalised and not divided):
        return
    trials = _Trials(state, _take_first_examples(state, batches()), training=True)
    if divided and trials.has_added_sums():
        whole = state.compiled and state.options.gradient_accumulation_steps == 1
        error = OwnStepsNeeded if whole else UserError
        raise error(
            "A loss that a layer or the model adds with add_loss grows with the number of "
            "examples. Each device adds the loss of its own shard of the batch, and tftpu takes "
            "the mean over the shards, so the loss would depend on the number of devices. Add a "
            "mean over the examples: add_loss(ops.sum(loss) / ops.shape(loss)[0])."
        )
    names = [] if normalised else trials.find_mixed()
    if names:
        warnings.warn(
            f"The {names[0]} of an example depends on the other examples of its batch, as with "
            "batch statistics or a loss over pairs of examples. Each device computes its own "
            "shard, so results depend on the number of devices and microbatches. In a loss "
            "function, tftpu.all_gather() returns the examples of all devices.",
            stacklevel=2,
        )


def is_mixed_in_evaluation(state: ModelState, batches: Callable[[], tf.data.Dataset]) -> bool:
    """Returns whether batches must stay whole: results depend on other examples or on their number.

    Args:
        state, batches: as for `warn_of_mixing`.
    """
    if not _has_unknown_code(state):
        return False
    specs = keras.tree.flatten(batches().element_spec)
    if state.replicas == 1 and all(spec.shape[0] for spec in specs):  # nothing divided or padded
        return False
    trials = _Trials(state, _take_first_examples(state, batches()), training=False)
    return trials.has_added_sums() or bool(trials.find_mixed())


def check_metrics(state: ModelState, batches: Callable[[], tf.data.Dataset]) -> None:
    """Raises `OwnStepsNeeded` for a metric whose states cannot be summed over batches and devices.

    Keras's own metrics consist of sums and counts. This tests other metrics: a batch that is added
    twice must lead to twice the state.

    Args:
        state: the variables.
        batches: as for `warn_of_mixing`.
    """
    own = [losses for losses in state.losses if losses.unknown_metrics]
    if not own:
        return
    batch = _take_first_examples(state, batches())
    compute = tf.function(lambda given: _compute_metric_states(state, own, given), autograph=False)
    names = [v.path for losses in own for v in losses.metric_variables]
    checks.refuse_states(names, *compute(batch))


def _compute_metric_states(
    state: ModelState, own: list[Losses], batch: Nest
) -> tuple[list[Tensor], list[Tensor]]:
    """Returns the states of metrics after a batch, and after the same batch again."""
    once: list[Tensor] = []
    twice: list[Tensor] = []
    for losses in own:
        forward = ForwardPass(state, losses, [])
        values = Values(state.read_trained_values(), seeds=state.compute_seeds(0, 0, 0))
        first = forward.run(batch, values, training=False, division=Division()).metrics
        values = values._replace(metrics=first)
        once += first
        twice += forward.run(batch, values, training=False, division=Division()).metrics
    return once, twice


def _has_unknown_code(state: ModelState) -> bool:
    layers = keras_internals.list_layers(state.model)
    if any(_is_unknown(type(layer)) or isinstance(layer, keras.layers.Lambda) for layer in layers):
        return True
    if keras_internals.has_raw_operations(state.model):
        return True
    for losses in state.losses:
        if not isinstance(losses, CompiledLosses) or any(map(_is_unknown, losses.functions)):
            return True
    return False


def _is_unknown(code: Any) -> bool:
    # Code that was defined in `exec` may have no module.
    return (getattr(code, "__module__", None) or "").split(".")[0] not in _KNOWN


def _take_first_examples(state: ModelState, batches: tf.data.Dataset) -> Nest:
    """Returns the first examples of a global batch: an even number, up to two microbatches."""
    batch = next(iter(batches.take(1)))
    parts = state.replicas * state.options.gradient_accumulation_steps
    size = count_examples(batch) // parts * min(parts, 2)
    return keras.tree.map_structure(lambda t: t[: size - size % 2], batch)


class _Trials:
    """Compares the results of halves of a batch in several combinations; the model is unchanged.

    Args:
        state: the variables.
        batch: the batch as `_take_first_examples` returns it.
        training: as for a model's `call`.
    """

    def __init__(self, state: ModelState, batch: Nest, training: bool):
        self._state, self._half = state, count_examples(batch) // 2
        self._compute: Any = internals.build_graph_function(
            lambda given, draw: _try(state, given, training, draw)
        )
        self._halves = [
            keras.tree.map_structure(lambda t, i=i: t[i : i + self._half], batch)
            for i in (0, self._half)
        ]
        # Whether layers add losses that depend on the batch, and whether the code calls
        # `all_gather`.
        self._adds, self._gathers = False, False
        if self._half:
            with gathering() as gathered:
                graph = self._compute.get_concrete_function(
                    _join_batches(*self._halves), _to_tensor(0)
                ).graph
            checks.refuse_outside(internals.list_changed_resources(graph))
            given = graph.inputs[: len(keras.tree.flatten(batch))]
            added = graph.structured_outputs.added
            self._adds = any(xla_ops.is_computed_from(loss, given) for loss in added)
            self._gathers = bool(gathered)

    def has_added_sums(self) -> bool:
        """Returns whether layers add a loss that grows with the number of examples.

        A sum grows twice as much from two to four copies of the examples as from one to two. A mean
        changes only if it depends on random numbers.
        """
        if not self._adds:
            return False
        examples = max(self._half // 2, 1)
        once = keras.tree.map_structure(lambda t: t[:examples], self._halves[0])
        twice = _join_batches(once, once)
        sizes = (once, twice, _join_batches(twice, twice))

        def compute_added(draw: int) -> list[list[float]]:
            results = [self._compute(batch, _to_tensor(draw)).added for batch in sizes]
            return [[float(loss) for loss in losses] for losses in results]

        drawn = [compute_added(0), compute_added(1)]
        if drawn[0] != drawn[1]:
            drawn += [compute_added(draw) for draw in range(2, _DRAWS)]
        values = np.array(drawn)  # (draws, sizes, objectives)
        growths = np.diff(values, axis=1)
        growth, errors = growths.mean(0), growths.std(0, ddof=1) / np.sqrt(len(drawn))
        # Regularization losses, which do not grow with the batch.
        weights = float(sum_of_own(self._state.model, []))
        rounding = 1e-2 * np.abs(values[:, 0].mean(0) - weights) + 1e-5 * abs(weights)
        grows = (np.abs(growth) > 4 * errors + rounding).all(0)
        return bool((grows & (np.sign(growth[0]) * growth[1] > 1.6 * np.abs(growth[0]))).any())

    def find_mixed(self) -> list[str]:
        """Returns, for messages, the names of results that depend on other examples of a batch."""
        if self._half == 0 or self._gathers:  # all_gather gives every device all examples
            return []
        half, (first, second) = self._half, self._halves
        together, beside_itself, swapped, other = (
            self._compute(_join_batches(*pair), _to_tensor(0))
            for pair in ((first, second), (first, first), (second, first), (second, second))
        )
        names: list[str] = []
        terms = [term.name for losses in self._state.losses for term in losses.terms]
        for name, a, b in zip(terms, together.terms, beside_itself.terms):
            if a.shape.rank and a.shape[0] == 2 * half and _is_different(a[:half], b[:half]):
                names.append(f"loss {name!r}")
        # If halves A and B are independent, f(A, B) + f(B, A) = f(A, A) + f(B, B).
        for what, place in (("loss that layers add", 1), ("metric", 2)):
            sums = zip(*(result[place] for result in (together, swapped, beside_itself, other)))
            if any(_is_different(a + b, c + d) for a, b, c, d in sums):
                names.append(what)
        return names


def _to_tensor(number: int) -> tf.Tensor:
    return tf.constant(number)  # TensorFlow would retrace a function for every Python number


def _join_batches(first: Nest, second: Nest) -> Nest:
    return keras.tree.map_structure(lambda a, b: tf.concat([a, b], 0), first, second)


def _is_different(one: Tensor, other: Tensor) -> bool:
    """Returns whether two tensors differ by more than rounding errors."""
    found, expected = (tf.cast(value, "float32").numpy() for value in (one, other))
    with np.errstate(invalid="ignore"):  # values that overflow do not count as different
        return bool(np.abs(found - expected).max() > _TOLERANCE * (np.abs(found).max() + 1e-6))


def _try(state: ModelState, batch: Nest, training: bool, draw: Tensor) -> TrialResult:
    """Returns the results of a batch; random numbers depend only on the integer `draw`."""
    values = Values(state.read_trained_values(), seeds=state.compute_seeds(draw, 0, 0))
    runs = [
        ForwardPass(state, losses, []).run(batch, values, training=training, division=Division())
        for losses in state.losses
    ]
    return TrialResult(
        [element.values for run in runs for element in run.computed.elements],
        [run.computed.added for run in runs],
        [value for run in runs for value in run.metrics],
    )
