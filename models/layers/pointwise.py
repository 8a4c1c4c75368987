"""1x1 convolutions with batch normalisation behind them, for memory-bound devices.

The output of a bottleneck's last convolution is its largest tensor, and a step reads it five times:
for its statistics, to normalise it, and in the backward pass. All of these follow from its two
factors, of which the input is a quarter as large and the kernel small. So here one product gives
the normalised output, or the sum of two where a shortcut is one, too; and of several groups of
examples, the output is made, and read once.
"""

import keras
from keras import ops


class PointwiseConv(keras.layers.Conv2D):
    """A 1x1 convolution, without bias, whose output knows what it is the product of.

    The output has the attribute `tftpu_product`, the pair (x, kernel) in the compute dtype, from
    which a `GhostBatchNormalization` behind it takes statistics, gradients, and its own output.
    They cost about channels / filters of the convolution: for filters of twice the channels or
    more.
    """

    def call(self, inputs):
        if self.strides != (1, 1):
            # A slice would be taken of what is before the ReLU before it, and both be written.
            inputs = ops.average_pool(inputs, 1, self.strides, data_format="channels_last")
        product = ops.conv(inputs, self.kernel, data_format="channels_last")
        kernel = ops.cast(self.kernel, self.compute_dtype)[0, 0]
        product.tftpu_product = (inputs, kernel)
        return product


def statistics(x, kernel, groups: int):
    """Mean and variance of `x @ kernel` over groups of consecutive examples, without the product.

    With the mean m and the covariance C of x, those of x @ w are m @ w and w @ C @ w. Accumulated
    in float32.

    Args:
        x: (batch, height, width, channels).
        kernel: (channels, filters), of x's dtype.

    Returns:
        Two of (groups, filters), float32.
    """
    mean, square = _moments(x, groups)
    covariance = square - mean[:, :, None] * mean[:, None, :]
    kernel = ops.cast(kernel, "float32")
    # A TPU rounds the factors of a matrix product to bfloat16: this one is taken in two parts.
    high = _leading_digits(covariance)
    images = ops.matmul(high, kernel) + ops.matmul(covariance - high, kernel)
    variance = ops.sum(images * kernel, axis=1)
    mean = ops.sum(mean[:, :, None] * kernel, axis=1)
    return mean, ops.maximum(variance, 0.0)


def normalized(*terms: tuple):
    """The sum over terms of `product * scale + shift`, of product = x @ kernel.

    Args:
        terms: each product, x, kernel, scale and shift. product: (batch, height, width, filters);
            x: (batch, height, width, channels), kernel: (channels, filters), of one dtype; scale,
            shift: (groups, filters), float32.

    Returns:
        As `product`. Its gradients read x instead of the product, which gets none.
    """
    groups, dtype = terms[0][3].shape[0], terms[0][1].dtype
    products = [ops.stop_gradient(product) for product, *_ in terms]
    shape = products[0].shape

    @ops.custom_gradient
    def result(*flat):
        xs, kernels, scales, shifts = (flat[index::4] for index in range(4))
        x = ops.concatenate(xs, axis=-1) if len(xs) > 1 else xs[0]
        shift = _broadcast(sum(shifts), dtype)

        def output():
            if groups > 1:  # a kernel for each would cut what is read, and join what is written
                scaled = (
                    _grouped(p, groups) * _broadcast(s, dtype) for p, s in zip(products, scales)
                )
                return ops.reshape(sum(scaled) + shift, shape)
            scaled = [ops.cast(k, "float32") * s for k, s in zip(kernels, scales)]
            return _product(x, ops.cast(ops.concatenate(scaled), dtype)) + shift[0]

        def gradient(upstream):
            crossed = _crossed(x, upstream, groups)  # (groups, channels, filters)
            grouped = _grouped(upstream, groups)
            of_shift = ops.sum(ops.cast(grouped, "float32"), axis=(1, 2, 3))
            gradients, first = [], 0
            for kernel, scale in zip(kernels, scales):
                part = crossed[:, first : first + kernel.shape[0]]
                first += kernel.shape[0]
                scaled = ops.reshape(grouped * _broadcast(scale, dtype), shape)
                of_x = _product(scaled, ops.transpose(kernel))
                of_kernel = ops.cast(ops.sum(part * scale[:, None], axis=0), dtype)
                of_scale = ops.sum(part * ops.cast(kernel, "float32"), axis=1)
                gradients += [of_x, of_kernel, of_scale, of_shift]
            return gradients

        return output(), gradient

    return result(*(factor for _, *term in terms for factor in term))


def _moments(x, groups: int):
    """E[x], (groups, channels), and E[x x'], (groups, channels, channels), float32."""

    @ops.custom_gradient
    def moments(x):
        count = x.shape[0] * x.shape[1] * x.shape[2] / groups
        mean = ops.mean(ops.cast(_grouped(x, groups), "float32"), axis=(1, 2, 3))

        def gradient(of_mean, of_square):
            both = (of_square + ops.transpose(of_square, (0, 2, 1))) / count
            both = ops.unstack(ops.cast(both, x.dtype), groups)
            of_x = ops.concatenate([_product(*part) for part in zip(_parts(x, groups), both)])
            of_x = _grouped(of_x, groups) + _broadcast(of_mean / count, x.dtype)
            return ops.reshape(of_x, x.shape)

        return (mean, _crossed(x, x, groups) / count), gradient

    return moments(x)


def _crossed(x, y, groups: int):
    """The sum of x y' over a group: (groups, channels of x, channels of y), float32."""
    wide = (_parts(ops.cast(z, "float32"), groups) for z in (x, y))
    # A group at a time: a product that has groups makes a TPU reorder what it reads.
    return ops.stack([ops.einsum("bhwc,bhwd->cd", a, b) for a, b in zip(*wide)])


def _parts(x, groups: int) -> list:
    examples = x.shape[0] // groups
    return [x[group * examples : (group + 1) * examples] for group in range(groups)]


def _grouped(x, groups: int):
    """(batch, height, width, channels) -> (groups, examples, height, width, channels)."""
    return ops.reshape(x, (groups, -1, *x.shape[1:]))


def _broadcast(value, dtype: str):
    """(groups, channels) -> (groups, 1, 1, 1, channels), in the compute dtype."""
    return ops.cast(value, dtype)[:, None, None, None]


def _product(x, matrix):
    """x @ matrix over the channels, as a convolution: a TPU keeps its order of dimensions."""
    return ops.conv(x, matrix[None, None], data_format="channels_last")


def _leading_digits(x):
    """float32 cut to the 8 digits of bfloat16 (Dekker 1971), a constant to gradients."""
    large = x * (2.0**16 + 1.0)
    return ops.stop_gradient(large - (large - x))
