"""Losses that users write: `loss_fn`, and a model's own `compute_loss`."""

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import keras

from tftpu.engines import keras_internals
from tftpu.engines.objectives.compiled import CompiledLosses
from tftpu.engines.objectives.losses import MEAN, RESERVED, Computed, Elements, Term, sum_of_own
from tftpu.engines.objectives.objective import Objective
from tftpu.errors import UserError
from tftpu.tensors import Nest, Tensor, ops


class FunctionLosses:
    """The `Losses` of a `loss_fn`.

    Args:
        model: the model that the function takes; this builds its unbuilt layers.
        objective: the objective with the function.
        logged: whether the loss is logged separately from the total.
        batch: `keras.KerasTensor`s of static shape, nested as the function takes them.

    Raises:
        UserError: the function does not return a loss, or names a value as tftpu names its own.
    """

    def __init__(self, model: keras.Model, objective: Objective, logged: bool, batch: Nest):
        # There are no metrics: the values that the function returns are logged as terms.
        self.metric_variables: list[keras.Variable] = []
        self._model = model
        self._loss_fn = objective.loss_fn
        self._name = name = objective.name
        self._regularize = objective.regularize
        _, values = keras_internals.build_by(self._build, batch)
        for key in {*RESERVED, f"{name}_loss"} & {*values}:
            raise UserError(
                f"The loss function {name!r} returns a value named {key!r}, but tftpu itself logs "
                "a value of that name: give yours another name."
            )
        self._keys = [*values]  # keeps the function's order, because JAX sorts the keys
        named = [Term(key, MEAN, 0.0, key) for key in values]
        self.terms = [Term(name, MEAN, 1.0, f"{name}_loss" if logged else None), *named]

    @property
    def unknown_metrics(self) -> bool:
        """False, because there are no metrics."""
        return False

    def compute(
        self, batch: Nest, training: bool, valid: Tensor | None, own: Callable[[], list[Tensor]]
    ) -> Computed:
        """Calls the function, and adds the model's own losses to its result."""
        loss, values = self._call(batch, training)
        if {*values} != {*self._keys}:
            raise UserError(
                f"The loss function {self._name!r} returns values named {sorted(values)} if "
                f"training={training}, but {sorted(self._keys)} otherwise: return the same names "
                "in both cases."
            )
        ordered = (loss, *(values[key] for key in self._keys))
        elements = [Elements(ops.cast(value, "float32")) for value in ordered]
        # Padding cannot be ignored: the loss of an example may depend on the others of its batch.
        added = sum_of_own(self._model, own()) if self._regularize else ops.zeros(())
        return Computed(None, elements, added, separable=False)

    def compute_outputs(self, batch: Nest) -> Nest:
        """Returns the results of the function, as in evaluation."""
        return self._call(batch, False)

    def compute_metric_results(self) -> dict[str, Tensor]:
        """Returns {}, because the values that the function returns are logged as terms."""
        return {}

    def _build(self, batch: Nest) -> tuple[Tensor, dict[str, Tensor]]:
        # As in a step, the function sees tensors as the values of the variables.
        known = [(v, ops.convert_to_tensor(v)) for v in self._model.variables]
        with keras.StatelessScope(known):
            return self._call(batch, False)

    def _call(self, batch: Nest, training: bool) -> tuple[Tensor, dict[str, Tensor]]:
        # without labels, `fit` passes features [a, b] as ((a, b),)
        if isinstance(batch, tuple) and len(batch) == 1:
            (batch,) = batch
        with _explain_errors(self._name):
            result: Any = self._loss_fn(self._model, batch, training)
        loss, values = result if isinstance(result, tuple) else (result, {})
        if not hasattr(loss, "shape") or not isinstance(values, dict):
            raise UserError(
                f"The loss function {self._name!r} returns {_describe_kind(result)}: it must "
                "return the loss of each example, of shape (batch,), or a pair of that and a "
                "dictionary with further values for each example."
            )
        return loss, values


class ComputedLoss:
    """The `Losses` of a model that overrides `compute_loss`.

    As in Keras, the method returns the total, which must include regularizers and losses of layers.

    Args:
        model: the compiled and built model.
        compiled: the compiled losses and metrics; the metrics are updated as for any other model.
    """

    def __init__(self, model: keras.Model, compiled: CompiledLosses):
        self._model = model
        self._compiled = compiled
        # If there are several losses, Keras's `compute_loss` averages each in a metric.
        means = keras_internals.list_loss_means(model)
        own = [v for mean in means for v in mean.variables]
        self.metric_variables = [*own, *compiled.metric_variables]
        self._means = means
        self.terms = [Term("loss", MEAN, 1.0, None)]

    @property
    def unknown_metrics(self) -> bool:
        """True if a metric is not one of Keras's, so its states may not be sums."""
        return self._compiled.unknown_metrics

    def compute(
        self, batch: Nest, training: bool, valid: Tensor | None, own: Callable[[], list[Tensor]]
    ) -> Computed:
        """Calls the model and its `compute_loss`; updates its metrics."""
        x, y, weight = keras.utils.unpack_x_y_sample_weight(batch)
        y_pred = keras_internals.call_model(self._model, x, training)
        with keras.name_scope("loss"):
            loss = keras_internals.compute_loss(self._model, x, y, y_pred, weight, training)
        if loss is None:
            raise UserError(
                f"{type(self._model).__name__}.compute_loss returns None: it must return the loss "
                "of each example, of shape (batch,)."
            )
        with keras.name_scope("metrics"):
            self._compiled.update_metrics(y, y_pred, weight, None)
        elements = [Elements(ops.cast(loss, "float32"))]
        return Computed(y_pred, elements, ops.zeros(()), separable=False)

    def compute_outputs(self, batch: Nest) -> Nest:
        """Returns the model's outputs, as in evaluation."""
        return self._compiled.compute_outputs(batch)

    def compute_metric_results(self) -> dict[str, Tensor]:
        """Returns the results of the metrics; called in a scope that holds their states."""
        means = {mean.name: mean.result() for mean in self._means}
        return means | self._compiled.compute_metric_results()


@contextlib.contextmanager
def _explain_errors(name: str) -> Iterator[None]:
    """Explains errors of a loss function that takes gradients with respect to model variables."""
    try:
        yield
    except (AttributeError, ValueError) as error:
        if not re.search(r"attribute '?(handle|_id)'?$|\.handle is not available", str(error)):
            raise
        raise UserError(
            f"The loss function {name!r} computes gradients with respect to variables of the "
            "model. In a step, their values are tensors that tftpu passes in. On TensorFlow, "
            "take values = [v.value for v in model.trainable_variables], call tape.watch(values) "
            "before the model, and then tape.gradient(loss, values). On JAX there is no "
            "GradientTape: use jax.grad of a function that calls the model."
        ) from error


def has_own_compute_loss(model: keras.Model) -> bool:
    """Returns whether a model overrides `compute_loss`."""
    return type(model).compute_loss is not keras.Model.compute_loss


def _describe_kind(result: Any) -> str:
    return "None" if result is None else f"a {type(result).__name__}"
