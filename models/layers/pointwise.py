"""1x1 convolutions followed by batch normalisation, for memory-bound devices.

The output of a bottleneck's last convolution is its largest tensor, and a step reads it five times:
for its statistics, to normalise it, and in the backward pass. All of these can be computed from
its two factors: an input a quarter as large, and a small kernel. So here one product gives the
normalised output, or the sum of two outputs if the shortcut has such a convolution, too. With
several groups of examples, the output is written and read once.

Three layers pass the factors on:

    x  --PointwiseConv-->  (product, x, kernel)  --PointwiseNormalization-->  term  --Sum-->  y
"""

from collections.abc import Sequence
from typing import Any

import keras

from tftpu.models.layers.convolution import CHANNELS_LAST, Conv2D
from tftpu.models.layers.normalization import GhostBatchNormalization
from tftpu.tensors import Tensor, ops

# product: (batch, height, width, filters); x: (batch, height, width, channels); kernel: (channels,
# filters). All three have the same dtype. Scale and shift are float32: (groups, filters) if they
# come from the statistics of groups of the batch, (filters,) if they come from the moving
# statistics.
Product = tuple[Tensor, Tensor, Tensor]  # product, x, kernel
Term = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]  # product, x, kernel, scale, shift


@keras.saving.register_keras_serializable("tftpu")
class PointwiseConv(Conv2D):
    """A 1x1 convolution without bias that returns its output and its factors.

    A `PointwiseNormalization` after it computes statistics, gradients and its output from the
    factors. This takes about channels / filters times the operations of the convolution, and so
    saves time if there are at least twice as many filters as channels.

    Returns:
        product, x, kernel: as for `Product`, in the compute dtype. With strides, x is the part of
        the input that the convolution reads.
    """

    def call(self, inputs: Tensor) -> Product:
        if self.strides != (1, 1):
            # Pools instead of slicing: XLA would slice the tensor before the preceding ReLU, and
            # write both.
            inputs = ops.average_pool(inputs, 1, self.strides, data_format=CHANNELS_LAST)
        kernel = self.kernel
        product = ops.conv(inputs, kernel, data_format=CHANNELS_LAST)
        return product, inputs, ops.cast(kernel, self.compute_dtype)[0, 0]

    def compute_output_spec(self, inputs: Any) -> Product:
        shape = super().compute_output_shape(inputs.shape)
        channels = inputs.shape[-1]
        shapes = (shape, (*shape[:-1], channels), (channels, self.filters))
        product, x, kernel = (keras.KerasTensor(shape, self.compute_dtype) for shape in shapes)
        return product, x, kernel


@keras.saving.register_keras_serializable("tftpu")
class PointwiseNormalization(GhostBatchNormalization):
    """A `GhostBatchNormalization` after a `PointwiseConv`; a `Sum` applies its result.

    Args: as for `GhostBatchNormalization`; `norm_batch` must be an integer, not "global".
    """

    def build(self, input_shape: Any) -> None:
        super().build(input_shape[0])

    def call(self, x: Product, training: bool | None = False) -> Term:
        product, factor, kernel = x
        if not self._has_batch_statistics(training):
            return (*x, *self._compute_line(self.moving_mean, self.moving_variance))
        mean, variance = compute_product_statistics(
            factor, kernel, self._count_groups(product.shape[0])
        )
        self._update(mean, variance)
        return (*x, *self._compute_line(mean, variance))

    def compute_output_spec(self, x: Any, training: bool | None = False) -> Term:
        filters = x[0].shape[-1]
        # Makes new tensors, because a symbolic tensor belongs to the layer that created it.
        product, factor, kernel = (keras.KerasTensor(each.shape, each.dtype) for each in x)
        scale, shift = (keras.KerasTensor((filters,), "float32") for _ in range(2))
        return product, factor, kernel, scale, shift


@keras.saving.register_keras_serializable("tftpu")
class Sum(keras.layers.Layer):
    """The sum of tensors and of the terms of `PointwiseNormalization`.

    If all inputs are terms with batch statistics, one product computes their sum.
    """

    def __init__(self, **kwargs: Any):
        super().__init__(autocast=False, **kwargs)  # without autocast, scales stay float32

    def call(self, inputs: Sequence[Tensor | Term]) -> Tensor:
        """Adds up tensors of (batch, height, width, filters), and terms that represent them."""
        if all(_has_batch_statistics(x) for x in inputs):
            return normalize_terms(*inputs)
        total, *others = (_evaluate_value(x) for x in inputs)
        for other in others:
            total = total + other
        return total


def _has_batch_statistics(x: Tensor | Term) -> bool:
    return isinstance(x, tuple) and len(x[3].shape) == 2


def _evaluate_value(x: Tensor | Term) -> Tensor:
    if not isinstance(x, tuple):
        return x
    if _has_batch_statistics(x):
        return normalize_terms(x)
    product, _, _, scale, shift = x
    return product * ops.cast(scale, product.dtype) + ops.cast(shift, product.dtype)


def compute_product_statistics(x: Tensor, kernel: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """Returns mean and variance of `x @ kernel` over groups, without computing the product.

    With the mean m and the covariance C of x, those of x @ w are m @ w and w @ C @ w. They are
    accumulated in float32.

    Args:
        x: (batch, height, width, channels).
        kernel: (channels, filters), of x's dtype.
        groups: number of groups of consecutive examples in the batch.

    Returns:
        mean, variance: (groups, filters), float32.
    """
    mean, square = _compute_moments(x, groups)
    covariance = square - mean[:, :, None] * mean[:, None, :]
    kernel = ops.cast(kernel, "float32")
    # A TPU rounds the factors of a matrix product to bfloat16, so this product is computed in two
    # parts.
    high = _truncate_digits(covariance)
    images = ops.matmul(high, kernel) + ops.matmul(covariance - high, kernel)
    variance = ops.sum(images * kernel, axis=1)
    mean = ops.sum(mean[:, :, None] * kernel, axis=1)
    return mean, ops.maximum(variance, 0.0)


def normalize_terms(*terms: Term) -> Tensor:
    """Returns the sum over terms of `product * scale + shift`.

    Args:
        terms: the terms with scales and shifts of (groups, filters), as for `Term`.

    Returns:
        (batch, height, width, filters). Gradients are computed from x and kernel of each `Term`;
        its product gets none.
    """
    groups, dtype = terms[0][3].shape[0], terms[0][1].dtype
    products = [ops.stop_gradient(product) for product, *_ in terms]
    shape = products[0].shape

    @ops.custom_gradient
    def result(*flat):
        xs, kernels, scales, shifts = (flat[index::4] for index in range(4))
        x = xs[0] if len(terms) == 1 else ops.concatenate(xs, axis=-1)
        shift = _broadcast_groups(sum(shifts), dtype)

        def compute_output():
            if groups > 1:  # scaling the kernel, as below, would need one product per group
                scaled = (
                    _group_examples(p, groups) * _broadcast_groups(s, dtype)
                    for p, s in zip(products, scales)
                )
                return ops.reshape(sum(scaled) + shift, shape)
            scaled = [ops.cast(k, "float32") * s for k, s in zip(kernels, scales)]
            return _multiply_channels(x, ops.cast(ops.concatenate(scaled), dtype)) + shift[0]

        def gradient(upstream):
            crossed = _multiply_groups(x, upstream, groups)  # (groups, channels, filters)
            grouped = _group_examples(upstream, groups)
            d_shift = ops.sum(ops.cast(grouped, "float32"), axis=(1, 2, 3))
            gradients, first = [], 0
            for kernel, scale in zip(kernels, scales):
                part = crossed[:, first : first + kernel.shape[0]]
                first += kernel.shape[0]
                scaled = ops.reshape(grouped * _broadcast_groups(scale, dtype), shape)
                d_x = _multiply_channels(scaled, ops.transpose(kernel))
                d_kernel = ops.cast(ops.sum(part * scale[:, None], axis=0), dtype)
                d_scale = ops.sum(part * ops.cast(kernel, "float32"), axis=1)
                gradients += [d_x, d_kernel, d_scale, d_shift]
            return gradients

        return compute_output(), gradient

    return result(*(factor for _, *term in terms for factor in term))


def _compute_moments(x: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """Returns E[x], (groups, channels), and E[x x'], (groups, channels, channels), float32."""

    @ops.custom_gradient
    def moments(x):
        count = x.shape[0] * x.shape[1] * x.shape[2] / groups
        mean = ops.mean(ops.cast(_group_examples(x, groups), "float32"), axis=(1, 2, 3))

        def gradient(*upstream):
            # JAX passes one tuple, TensorFlow two arguments.
            d_mean, d_square = upstream if len(upstream) == 2 else upstream[0]
            both = (d_square + ops.transpose(d_square, (0, 2, 1))) / count
            both = ops.unstack(ops.cast(both, x.dtype), groups)
            d_x = ops.concatenate(
                [_multiply_channels(*part) for part in zip(_split_groups(x, groups), both)]
            )
            d_x = _group_examples(d_x, groups) + _broadcast_groups(d_mean / count, x.dtype)
            return ops.reshape(d_x, x.shape)

        return (mean, _multiply_groups(x, x, groups) / count), gradient

    return moments(x)


def _multiply_groups(x: Tensor, y: Tensor, groups: int) -> Tensor:
    """Sums x^T y over each group; returns (groups, channels of x, channels of y), float32."""
    wide = (_split_groups(ops.cast(z, "float32"), groups) for z in (x, y))
    # One group at a time, because a TPU reorders the inputs of a batched product.
    return ops.stack([ops.einsum("bhwc,bhwd->cd", a, b) for a, b in zip(*wide)])


def _split_groups(x: Tensor, groups: int) -> list[Tensor]:
    examples = x.shape[0] // groups
    return [x[group * examples : (group + 1) * examples] for group in range(groups)]


def _group_examples(x: Tensor, groups: int) -> Tensor:
    """Maps (batch, height, width, channels) to (groups, examples, height, width, channels)."""
    return ops.reshape(x, (groups, -1, *x.shape[1:]))


def _broadcast_groups(value: Any, dtype: str) -> Tensor:
    """Maps (groups, channels) to (groups, 1, 1, 1, channels), in the compute dtype."""
    return ops.cast(value, dtype)[:, None, None, None]


def _multiply_channels(x: Tensor, matrix: Tensor) -> Tensor:
    """Returns x @ matrix over the channels, as a convolution, which keeps x's layout on a TPU."""
    return ops.conv(x, matrix[None, None], data_format=CHANNELS_LAST)


def _truncate_digits(x: Tensor) -> Tensor:
    """Rounds float32 to the 8 significant bits of bfloat16 (Dekker 1971), without a gradient."""
    large = x * (2.0**16 + 1.0)
    return ops.stop_gradient(large - (large - x))
