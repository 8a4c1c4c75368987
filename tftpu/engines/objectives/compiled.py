"""The losses and metrics that a Keras model was compiled with."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import keras

from tftpu import layer_internals
from tftpu.engines import keras_internals
from tftpu.engines.collectives import all_gather
from tftpu.engines.data.division import find_division
from tftpu.engines.objectives.losses import (
    RESERVED,
    Computed,
    Elements,
    Term,
    compute_product,
    count_examples,
    sum_of_own,
)
from tftpu.errors import OwnStepsNeeded, UserError
from tftpu.optim import chunked as chunks
from tftpu.optim.losses import SmoothedCrossentropy
from tftpu.optim.metrics import BitsPerToken
from tftpu.tensors import Nest, Tensor, ops

_BY_CLASS_IDS = (keras.losses.SparseCategoricalCrossentropy.call, SmoothedCrossentropy.call)
MEANS = ("sum_over_batch_size", "mean", "mean_with_sample_weight")


@runtime_checkable
class FactoredModel(Protocol):
    """A model whose logits are a matrix product, which a loss can compute in chunks."""

    def factored_logits(self, x: Nest, training: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the logits, and the factors `hidden` and `matrix` that they are a product of.

        Args:
            x: the features of a batch.
            training: whether the model trains, as for Keras's `call`.

        Returns:
            logits: (batch, time, vocabulary), float32.
            hidden: (batch, time, width), in the compute dtype.
            matrix: (vocabulary, width).
        """
        ...


class Outputs(NamedTuple):
    """Outputs of a model for one microbatch.

    Attributes:
        y_pred: the predictions.
        factors: the factors of the logits, (batch, time, width) and (vocabulary, width); None if
            the predictions are not such a product.
    """

    y_pred: Nest
    factors: tuple[Tensor, Tensor] | None


class CompiledLosses:
    """The `Losses` of a model that is compiled with its loss and metrics.

    The `reduction` of a loss determines its divisor over the global batch: the number of unmasked
    elements for "sum_over_batch_size" and "mean", the sum of their weights for
    "mean_with_sample_weight", and 1 for "sum".

    Args:
        model: the compiled and built model.

    Attributes:
        terms: one term for each loss.
        metric_variables: the states of the metrics.

    Raises:
        UserError: a loss has another reduction, such as None.
        OwnStepsNeeded: a metric has a state that does not start at zero, so replicas cannot add up
            their states.
    """

    def __init__(self, model: keras.Model):
        self._model = model
        self._losses = keras_internals.list_loss_terms(model)
        self._metrics = keras_internals.list_bound_metrics(model)
        # A metric from another package may ignore the weights of examples, and so count the
        # padding.
        self._weighable = all(
            (type(bound.metric).update_state.__module__ or "").startswith("keras.")
            for bound in self._metrics
        )
        self.metric_variables = [v for m in self._metrics for v in m.metric.variables]
        # Keras logs each loss separately if a model has several.
        logged = {t.name: f"{t.name}_loss" for t in self._losses if len(self._losses) > 1}
        self.terms = [
            Term(found.name, found.loss.reduction, found.weight, logged.get(found.name))
            for found in self._losses
        ]
        for term in self.terms:
            if term.reduction not in (*MEANS, "sum"):
                raise UserError(
                    f"The loss {term.name!r} has reduction={term.reduction!r}: use one of "
                    f"{', '.join(MEANS)} or sum, so that it is one number per step."
                )
        for bound in self._metrics:
            if bound.name in RESERVED:
                raise UserError(
                    f"The model is compiled with a metric named {bound.name!r}, but tftpu itself "
                    "logs a value of that name: give yours another name."
                )
            # Devices add up the metrics' states, which is correct only for sums and counts.
            if not _resets_to_zero(bound.metric):
                raise OwnStepsNeeded(
                    f"The metric {bound.metric.name!r} has a state that does not start at zero in "
                    "each epoch, so it cannot be added up over devices."
                )

    @property
    def unknown_metrics(self) -> bool:
        """True if a metric is not one of Keras's, so its states may not be sums."""
        return not self._weighable

    @property
    def functions(self) -> list[Any]:
        """The functions or classes that compute the losses and the metrics."""
        losses = [keras_internals.find_function(term.loss) for term in self._losses]
        return [*losses, *(keras_internals.find_function(m.metric) for m in self._metrics)]

    def compute(
        self, batch: Nest, training: bool, valid: Tensor | None, own: Callable[[], list[Tensor]]
    ) -> Computed:
        """Calls the model and computes its losses; updates its metrics."""
        x, y, weight = keras.utils.unpack_x_y_sample_weight(batch)
        outputs = call(self._model, x, training)
        added = own()
        # Preflight reads from these scopes which part of the step an instruction belongs to.
        with keras.name_scope("loss"):
            elements = self._compute_elements(outputs, y, weight, valid)
        with keras.name_scope("metrics"):
            chunked = next((e.chunked for e in elements if e.chunked is not None), None)
            divides = self.update_metrics(y, outputs.y_pred, weight, valid, chunked)
        separable = self._weighable and divides and not added
        separable = separable and not any(e.is_scalar for e in elements)
        return Computed(outputs.y_pred, elements, sum_of_own(self._model, added), separable)

    def compute_outputs(self, batch: Nest) -> Nest:
        """Returns the model's outputs, as in evaluation."""
        x, _, _ = keras.utils.unpack_x_y_sample_weight(batch)
        return keras_internals.call_model(self._model, x, training=False)

    def compute_metric_results(self) -> dict[str, Tensor]:
        """Returns the results of the metrics; called in a scope that holds their states."""
        return keras_internals.compute_metric_results(self._model)

    def compute_zero_elements(
        self, batch: Nest, output: Nest, valid: Tensor | None = None
    ) -> list[Elements]:
        """Returns the losses of all-zero outputs; any outputs without masks have the same divisors.

        Args:
            batch: `(x, y)` or `(x, y, sample_weight)`.
            output: the shapes and dtypes of one example's outputs as `keras.KerasTensor`s.
            valid: see `compute`.
        """
        x, y, weight = keras.utils.unpack_x_y_sample_weight(batch)
        size = count_examples(x)
        y_pred = keras.tree.map_structure(lambda s: ops.zeros((size, *s.shape), s.dtype), output)
        with keras.StatelessScope():  # drops the updates of Keras's running means of the losses
            return self._compute_elements(Outputs(y_pred, None), y, weight, valid)

    def _compute_elements(
        self, outputs: Outputs, y: Nest, sample_weight: Nest, valid: Tensor | None
    ) -> list[Elements]:
        if not self._losses:
            return []
        matched = keras_internals.match_losses(self._model, y, outputs.y_pred, sample_weight)
        return [
            _compute_term(term, *parts, valid, outputs.factors)
            for term, parts in zip(self._losses, matched)
        ]

    def update_metrics(
        self,
        y: Nest,
        y_pred: Nest,
        sample_weight: Nest,
        valid: Tensor | None,
        chunked: chunks.Chunked | None = None,
    ) -> bool:
        """Updates every metric; called in a `keras.StatelessScope`, which keeps the new states.

        Args:
            y, y_pred, sample_weight: as for `keras.Model.compute_metrics`.
            valid: see `compute`.
            chunked: see `Elements`; metrics whose values it contains do not read `y_pred`.

        Returns:
            False if a metric returns one number for a whole batch, so `valid` does not apply to it.
        """
        divides = True
        if not self._metrics:
            return divides
        y = keras_internals.flatten_outputs(self._model, y)
        y_pred = keras_internals.flatten_outputs(self._model, y_pred)
        weights: list[Tensor | None] = [None] * len(y)
        if sample_weight is not None:
            given = keras_internals.flatten_outputs(self._model, sample_weight)
            weights = [*given] if len(given) == len(y) else given[:1] * len(y)
        for metric, output, weighted, _ in self._metrics:
            values = keras_internals.compute_metric_values(metric, y[output], y_pred[output])
            if values is not None and len(values.shape) == 0:
                if weighted and weights[output] is not None:
                    raise OwnStepsNeeded(
                        f"The metric {metric.name!r} returns one number for the whole batch, so "
                        "weights of examples cannot be applied to it."
                    )
                _update_whole(metric, y[output], y_pred[output])
                divides = False
                continue
            factors = [weights[output] if weighted else None]
            factors.append(valid if self._weighable else None)
            given = [factor for factor in factors if factor is not None]
            update = metric.update_state
            known = _find_values(metric, chunked)
            # Keras's mean applies the mask of values, which is that of ignored labels, only if
            # there are weights or another mask. The copy has no mask, as padding is no weight.
            masks = [layer_internals.read_mask(part) for part in (y_pred[output], values)]
            is_plain = type(metric).update_state is keras.metrics.MeanMetricWrapper.update_state
            if is_plain and known is None and factors[0] is None and masks[0] is None:
                known = ops.copy(values) if masks[1] is not None else None
            if known is not None:
                update = functools.partial(keras_internals.update_mean, metric, known)
            if not given:
                update(y[output], y_pred[output])
                continue
            # Keras multiplies a mask only with weights that have the same number of axes.
            shapes = [part.shape for part in (*given, *masks) if part is not None]
            shapes.append(_find_weight_shape(metric, y[output], y_pred[output]))
            product = compute_product(max(shapes, key=len), *given)
            if factors[0] is None:  # only 1 and 0, which Keras need not round for an integer state
                product = ops.cast(product, metric.dtype)
            update(y[output], y_pred[output], sample_weight=product)
        return divides


def _find_weight_shape(metric: keras.Metric, y: Tensor, y_pred: Tensor) -> tuple[int, ...]:
    """Returns the shape that weights need for Keras to apply them; () if (batch,) is enough."""
    kinds = keras.metrics
    if isinstance(metric, kinds.IoU):  # flattens labels and weights
        place = len(y.shape) if metric.sparse_y_true else metric.axis % len(y.shape)
        return (*y.shape[:place], *y.shape[place + 1 :])
    if isinstance(metric, kinds.Mean | kinds.FBetaScore | kinds.R2Score):
        return ()
    # Counts of a confusion matrix, such as Precision and AUC: Keras adds the last axis itself.
    is_keras = type(metric).update_state.__module__.startswith("keras.")
    return tuple(y_pred.shape[:-1]) if is_keras else ()


def _find_values(metric: keras.Metric, chunked: chunks.Chunked | None) -> Tensor | None:
    """Returns the values of a mean metric if the loss computed them in chunks; otherwise None."""
    if chunked is None:
        return None
    if type(metric) is keras.metrics.SparseCategoricalAccuracy:
        return chunked.correct
    crossentropy = keras.metrics.SparseCategoricalCrossentropy
    if isinstance(metric, crossentropy) and type(metric) in (crossentropy, BitsPerToken):
        plain = metric.from_logits and metric.ignore_class is None and metric.axis == -1
        return chunked.crossentropy if plain else None
    return None


def _resets_to_zero(metric: keras.Metric) -> bool:
    """Resets a metric; returns whether this makes all states zero, and restores them if not."""
    # Copies, because TensorFlow's tensor of a variable changes with the variable. They may be
    # symbolic, because preflight traces the creation of a model.
    before = [ops.copy(v) for v in metric.variables]
    for variable in metric.variables:
        variable.assign(ops.ones(variable.shape, variable.dtype))
    metric.reset_state()
    if not any(v.numpy().any() for v in metric.variables):
        return True
    for variable, value in zip(metric.variables, before):
        variable.assign(value)
    return False


def call(model: keras.Model, x: Nest, training: bool) -> Outputs:
    """Calls a model; the outputs include the factors of its logits if it has them."""
    if isinstance(model, FactoredModel):
        logits, hidden, matrix = model.factored_logits(x, training)
        return Outputs(logits, (hidden, matrix))
    with keras_internals.recording_products() as products:
        y_pred = keras_internals.call_model(model, x, training)
    factors = products.find_factors(y_pred)
    if factors is None:
        return Outputs(y_pred, None)
    hidden, matrix = factors
    return Outputs(y_pred, (hidden, ops.transpose(matrix)))


def _compute_term(
    term: keras_internals.CompiledTerm,
    y: Tensor,
    y_pred: Tensor,
    sample_weight: Tensor | None,
    valid: Tensor | None,
    factors: tuple[Tensor, Tensor] | None,
) -> Elements:
    if type(term.loss).__call__ is not keras.losses.Loss.__call__:
        return _call_loss(term, y, y_pred, sample_weight)
    mask = layer_internals.read_mask(y_pred)
    labels = y
    y, y_pred = (
        keras.tree.map_structure(lambda t: ops.convert_to_tensor(t, term.loss.dtype), part)
        for part in (y, y_pred)
    )
    in_chunks = factors is not None and _takes_factors(term.loss, y, y_pred)
    values = ops.zeros_like(labels, dtype="float32") if in_chunks else term.loss.call(y, y_pred)
    out_mask = layer_internals.read_mask(values)
    values = ops.cast(values, "float32")
    known = _find_known_classes(term.loss, labels, y_pred, ops.shape(values))
    if len(values.shape) == 0:
        if sample_weight is not None or mask is not None:
            raise OwnStepsNeeded(
                f"The loss {term.name!r} returns one number for the whole batch, so weights and "
                "masks of examples cannot be applied to it. (A loss of one value per example, "
                "(batch,), can be divided.)"
            )
        if find_division().shards > 1:
            values = ops.cast(term.loss.call(_gather(y), _gather(y_pred)), "float32")
        return Elements(values, factor=_read_factor(term), whole=_is_whole())
    count = compute_product(values.shape, mask, out_mask, valid)
    weight = compute_product(values.shape, mask, out_mask, valid, sample_weight)
    if term.loss.reduction == "mean_with_sample_weight":
        count = weight
    if known is not None:
        if weight is not None:
            known = ops.logical_or(known, weight == 0)
        # An unknown class makes loss and gradient NaN; a dynamic loss scale skips the step then.
        known = ops.where(known, 1.0, float("nan"))
    factor, total, chunked = _read_factor(term), None, None
    if in_chunks and factors is not None and known is not None:
        ids = ops.cast(labels, "int32")
        total, chunked = _compute_in_chunks(term.loss, factors, ids, weight, known)
        values = chunked.values
    values = values if known is None else values * known
    return Elements(values, weight, count, factor, chunked=chunked, total=total)


def _compute_in_chunks(
    loss: keras.losses.Loss,
    factors: tuple[Tensor, Tensor],
    labels: Tensor,
    weight: Tensor | None,
    known: Tensor,
) -> tuple[Tensor | None, chunks.Chunked]:
    """Returns the weighted sum of a loss, and its results for each token.

    The sum is None if gradients flow through the results instead.

    Args:
        loss: the loss.
        factors: the factors of the logits.
        labels: the classes, (batch, time).
        weight: the weight of each label, (batch, time); None: all are 1.
        known: 1.0 where a label is a class or has weight 0, otherwise NaN.
    """
    rows, smoothing = find_division().rows, getattr(loss, "smoothing", 0.0)
    if not chunks.takes_tokens(rows, factors[0], factors[1].shape[0]):
        return None, chunks.chunked_crossentropy(*factors, labels, smoothing, rows)
    weight = known if weight is None else known * weight
    return chunks.summed_crossentropy(*factors, labels, weight, smoothing, rows)


def _takes_factors(loss: keras.losses.Loss, y: Tensor, y_pred: Tensor) -> bool:
    """Returns whether `chunked_crossentropy` can compute a loss, in several chunks of classes."""
    ranks = len(y.shape), len(y_pred.shape)
    if y_pred.shape[-1] <= chunks.CHUNK or ranks[0] == ranks[1]:
        return False
    if not takes_class_ids(loss, *ranks) or find_ignored_class(loss) is not None:
        return False
    return isinstance(loss, SmoothedCrossentropy) or getattr(loss, "from_logits", False)


def takes_class_ids(loss: keras.losses.Loss, label_rank: int, output_rank: int) -> bool:
    """Returns whether the labels of a loss must be indices of classes.

    Args:
        loss: a loss of a model. A loss with its own `call` may read any labels.
        label_rank, output_rank: the numbers of axes of labels and outputs.
    """
    own_call = type(loss).__call__ is not keras.losses.Loss.__call__
    if own_call or type(loss).call not in _BY_CLASS_IDS:
        return False
    if isinstance(loss, SmoothedCrossentropy):
        return label_rank < output_rank
    sparse = keras.losses.sparse_categorical_crossentropy
    return keras_internals.find_function(loss) is sparse


def find_ignored_class(loss: keras.losses.Loss) -> int | None:
    """Returns the label that a loss ignores, or None."""
    return getattr(loss, "ignore_class", None)


def _find_known_classes(
    loss: keras.losses.Loss, y: Tensor, y_pred: Tensor, shape: tuple[Any, ...]
) -> Tensor | None:
    """Returns whether each label is a class of the output; None if labels are not classes.

    On an accelerator, and in `SmoothedCrossentropy`, labels that are not classes of the output
    would give a finite loss. The label that the loss ignores counts as a class.
    """
    if keras.tree.is_nested(y) or not takes_class_ids(loss, len(y.shape), len(y_pred.shape)):
        return None
    # In float32, so the comparisons are exact, whatever dtype the loss computes in.
    labels = ops.reshape(ops.cast(y, "float32"), shape)
    known = ops.logical_and(labels >= 0, labels < y_pred.shape[-1])  # NaN fails both comparisons
    if keras.backend.is_float_dtype(keras.backend.standardize_dtype(y.dtype)):
        known = ops.logical_and(known, labels == ops.floor(labels))
    ignored = find_ignored_class(loss)
    return known if ignored is None else ops.logical_or(known, labels == ignored)


def _call_loss(
    term: keras_internals.CompiledTerm, y: Tensor, y_pred: Tensor, sample_weight: Tensor | None
) -> Elements:
    """Calls a loss that has its own `__call__`; returns its number as `Elements`."""
    if find_division().shards > 1:
        y, y_pred, sample_weight = _gather(y), _gather(y_pred), _gather(sample_weight)
    values = ops.cast(term.loss(y, y_pred, sample_weight), "float32")
    if len(values.shape):
        raise UserError(
            f"The loss {term.name!r} has its own __call__ that returns the shape "
            f"{tuple(values.shape)}, but __call__ must return one number. To return one value for "
            "each example, override call(y_true, y_pred) instead: Keras weights and reduces "
            "these values."
        )
    return Elements(values, factor=_read_factor(term), whole=_is_whole())


def _read_factor(term: keras_internals.CompiledTerm) -> Tensor | None:
    """Returns the current weight of a loss if it is a variable; otherwise None."""
    if not isinstance(term.weight, keras.Variable):
        return None
    return ops.cast(term.weight.value, "float32")


def _update_whole(metric: keras.Metric, y: Tensor, y_pred: Tensor) -> None:
    """Updates a metric on each replica with the whole global batch, weighted by 1 / replicas."""
    if not _is_whole():
        raise UserError(
            f"The metric {metric.name!r} returns one number for a whole batch, but the batch is "
            "computed in microbatches: set gradient_accumulation_steps=1, or return one value for "
            "each example, (batch,)."
        )
    shards = find_division().shards
    if shards == 1:
        metric.update_state(y, y_pred)
    else:
        metric.update_state(_gather(y), _gather(y_pred), sample_weight=1.0 / shards)


def _is_whole() -> bool:
    """Returns whether the global batch is computed at once, rather than in microbatches."""
    return find_division().microbatches == 1


def _gather(part: Nest) -> Nest:
    """Returns the examples of all replicas; with microbatches, the given ones only."""
    if part is None or not _is_whole():
        return part

    def gather(tensor: Tensor) -> Tensor:
        mask, gathered = layer_internals.read_mask(tensor), all_gather(tensor)
        if mask is not None:
            layer_internals.attach_mask(gathered, all_gather(mask))
        return gathered

    return keras.tree.map_structure(gather, part)
