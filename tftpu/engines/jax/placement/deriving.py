"""Derives the sharding of weights along the `tensor` axis for a model without sharding rules.

Of two matrix products in a row, the first is sharded along its outputs and the second along its
inputs, so devices communicate only to add up the second one's outputs (Shoeybi et al. 2019,
https://arxiv.org/abs/1909.08053). Embeddings are sharded by vocabulary, attention by heads.
The compiler divides the program like the weights, so a poor choice costs time, not correctness.

Convolutions are sharded by filters if a model has more convolutions than matrix products.
Otherwise they are not sharded, for example the patch embedding of a vision transformer.
"""

import collections
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import keras

from tftpu import layer_internals as internals
from tftpu.blocks import structure

Axes = tuple[str | None, ...]
_CONVOLUTIONS = keras.layers.Conv1D, keras.layers.Conv2D, keras.layers.Conv3D


class Product(NamedTuple):
    """A layer that multiplies its input by a kernel.

    Attributes:
        layer: the layer.
        kernel: the kernel.
        inputs: the indices of the kernel's dimensions that the product sums over.
        outputs: the indices of the kernel's other dimensions.
    """

    layer: keras.Layer
    kernel: keras.Variable
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    def reads(self, width: int) -> bool:
        """Returns whether the product sums over exactly one dimension, of size `width`."""
        return [self.kernel.shape[i] for i in self.inputs] == [width]

    def writes(self, width: int) -> bool:
        """Returns whether the product's outputs have exactly one dimension, of size `width`."""
        return [self.kernel.shape[i] for i in self.outputs] == [width]


def derive_axes(model: keras.Model, axis: str) -> dict[str, Axes]:
    """Returns the sharded variables' axes by path: `axis` or None for each dimension.

    Args:
        model: the built model.
        axis: the name of the mesh axis. The sizes of the sharded dimensions are not checked.
    """
    found: dict[str, Axes] = {}
    blocks = structure.find_blocks(model)
    inside = {id(layer) for block in blocks for layer in internals.flatten_layers(block)}
    rest = [layer for layer in internals.flatten_layers(model) if id(layer) not in inside]
    widths = _count_sizes(_list_products(internals.flatten_layers(model)))
    for layers in [*map(internals.flatten_layers, blocks), rest]:
        for variable, dimension in _choose_dimensions(layers, widths):
            rank = len(variable.shape)
            found[variable.path] = tuple(axis if i == dimension else None for i in range(rank))
    if is_convolutional(model):
        convolutions = _list_convolutions(model)
        for variable in itertools.chain.from_iterable(map(_list_own, convolutions)):
            if variable.name in ("kernel", "bias"):
                found[variable.path] = (*[None] * (len(variable.shape) - 1), axis)
    return found


def is_convolutional(model: keras.Model) -> bool:
    """Returns whether a model has more convolutions than matrix products."""
    products = _list_products(internals.flatten_layers(model))
    return len(_list_convolutions(model)) > len(products)


def _list_convolutions(model: keras.Model) -> list[keras.Layer]:
    return [one for one in internals.flatten_layers(model) if isinstance(one, _CONVOLUTIONS)]


def _choose_dimensions(
    layers: Sequence[keras.Layer], widths: collections.Counter[int]
) -> Iterator[tuple[keras.Variable, int]]:
    """Yields the variables of a block to shard, each with the index of the sharded dimension.

    Args:
        layers: the layers of the block.
        widths: the result of `_count_sizes` for the whole model.
    """
    products = _list_products(layers)
    sizes = _count_sizes(products)
    width = max(sizes, key=lambda size: (sizes[size], widths[size]), default=0)
    last = _find_last_squares(layers, products, width)
    for product in products:
        is_square = product.reads(width) and product.writes(width)
        if product.layer in last if is_square else product.writes(width):
            yield product.kernel, product.inputs[0]
        else:
            yield from _shard_outputs(product)
    multiplying = {id(product.layer) for product in products}
    for layer in layers:
        if isinstance(layer, keras.layers.Embedding):
            for variable in _list_own(layer):
                if layer.input_dim in variable.shape:  # embeddings, or untied weights of logits
                    yield variable, tuple(variable.shape).index(layer.input_dim)
        elif id(layer) not in multiplying and not hasattr(layer, "kernel_size"):
            yield from _shard_experts(layer, width)


def _list_products(layers: Sequence[keras.Layer]) -> list[Product]:
    return [product for layer in layers if (product := _read_product(layer))]


def _read_product(layer: keras.Layer) -> Product | None:
    """Returns the product that a `Dense` or `EinsumDense` layer computes; None for others."""
    kernels = [v for v in _list_own(layer) if v.name == "kernel"]
    if not kernels:
        return None
    if isinstance(layer, keras.layers.EinsumDense):
        given, _, output = layer.equation.replace("->", ",").replace("...", "").split(",")
        labels = layer.equation.split(",")[1].split("->")[0]
        if len(labels) != len(kernels[0].shape):  # a kernel quantized to int4, stored as a matrix
            return Product(layer, kernels[0], (0,), (1,))
        inputs = tuple(i for i, label in enumerate(labels) if label not in output)
        outputs = tuple(i for i, label in enumerate(labels) if label not in given)
        return Product(layer, kernels[0], inputs, outputs) if inputs and outputs else None
    return Product(layer, kernels[0], (0,), (1,)) if isinstance(layer, keras.layers.Dense) else None


def _count_sizes(products: Sequence[Product]) -> collections.Counter[int]:
    """Counts how often each size occurs as a product's only input or only output dimension."""
    return collections.Counter(
        product.kernel.shape[dimensions[0]]
        for product in products
        for dimensions in (product.inputs, product.outputs)
        if len(dimensions) == 1
    )


def _find_last_squares(
    layers: Sequence[keras.Layer], products: Sequence[Product], width: int
) -> list[keras.Layer]:
    """Returns, for each layer with several square products of the model's width, the last one.

    In attention, this is the output projection, which comes after queries, keys and values.
    """
    square = {id(p.layer) for p in products if p.reads(width) and p.writes(width)}
    found = []
    for layer in layers:
        inner = [one for one in internals.list_layers(layer) if id(one) in square]
        if len(inner) > 1:
            found.append(inner[-1])
    return found


def _shard_outputs(product: Product) -> Iterator[tuple[keras.Variable, int]]:
    yield product.kernel, product.outputs[0]
    sizes = tuple(product.kernel.shape[i] for i in product.outputs)
    for variable in _list_own(product.layer):
        if variable.name == "bias" and tuple(variable.shape) == sizes:
            yield variable, 0


def _shard_experts(layer: keras.Layer, width: int) -> Iterator[tuple[keras.Variable, int]]:
    """Yields variables with a kernel per expert, each with the index of the dimension to shard.

    In (experts, inputs, outputs), this is inputs or outputs: whichever is not the model's width.
    """
    for variable in _list_own(layer):
        if len(variable.shape) == 3 and list(variable.shape[1:]).count(width) == 1:
            yield variable, 2 if variable.shape[1] == width else 1


def _list_own(layer: keras.Layer) -> list[keras.Variable]:
    """Returns the variables of a layer, without the variables of its sublayers."""
    inner = {id(v) for one in internals.list_layers(layer) for v in one.variables}
    return [v for v in layer.variables if id(v) not in inner]
