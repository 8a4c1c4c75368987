"""Finds the repeated blocks of any model from its layers, its graph and its weights.

A block is a layer made of layers, such as a decoder layer of KerasHub, that a model has several
times with weights of the same shapes. It may be of any class.
"""

import collections
import types
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np

from tftpu import layer_internals as internals
from tftpu.layer_internals import GraphCall


class Chain(NamedTuple):
    """Blocks in a row, each called on the output of the block before, with equal other arguments.

    Attributes:
        blocks: the blocks, which form a whole number of equal groups.
        period: the number of blocks in a group. Blocks within a group may differ, for example in
            alternating attention windows.
        carry: path of the previous block's output among the arguments, as in a `GraphCall`.
        rest: the blocks that continue the chain, too few for another group.
    """

    blocks: tuple[keras.Layer, ...]
    period: int
    carry: tuple[Any, ...]
    rest: tuple[keras.Layer, ...]


def find_blocks(model: keras.Model, same_weights: bool = True) -> list[keras.Layer]:
    """Returns the blocks of a model, the outermost ones; [] if there are none.

    Args:
        model: the model.
        same_weights: whether blocks count as repeated only if their weights have the same shapes;
            if False, the same class is enough.
    """

    def identify(layer: keras.Layer) -> Any:
        kind = _identify(layer)
        return kind if same_weights or kind is None else kind[0]

    kinds = [identify(layer) for layer in internals.flatten_layers(model)]
    counts = collections.Counter(kind for kind in kinds if kind)
    found: list[keras.Layer] = []

    def descend(layer: keras.Layer) -> None:
        for inner in internals.list_layers(layer):
            kind = identify(inner)
            if kind and counts[kind] > 1:
                found.append(inner)
            else:
                descend(inner)

    descend(model)
    return found


def find_chains(model: keras.Model) -> list[Chain]:
    """Returns the chains of at least two groups of blocks in the graphs of a functional model."""
    known = {id(block) for block in find_blocks(model)}
    alike: dict[Any, list[GraphCall]] = {}
    for call in internals.read_calls(model):
        if id(call.operation) in known:
            alike.setdefault(_identify(call.operation), []).append(call)
    found = []
    for calls in alike.values():
        for run in _split_runs(calls):
            blocks = tuple(call.operation for call in run)
            period = _find_period(blocks)
            size = len(blocks) // period * period
            if size > period:
                carry = _find_carry(run[0], run[1])
                found.append(Chain(blocks[:size], period, carry, blocks[size:]))
    return found


def _identify(layer: keras.Layer) -> Any:
    """Returns a block's class and its variables' shapes, to compare; None if it is not a block."""
    if isinstance(layer, keras.Model) or not layer.trainable_variables:
        return None
    if len(internals.flatten_layers(layer)) == 1:
        return None
    return type(layer), tuple((tuple(v.shape), v.dtype, v.trainable) for v in layer.variables)


def _split_runs(calls: Sequence[GraphCall]) -> Iterator[list[GraphCall]]:
    """Yields runs of calls; each call of a run takes the output of the call before it.

    All other arguments of the calls in a run are the same. A run may be a single call.
    """
    run, carry = [calls[0]], ()
    for call in calls[1:]:
        found = _find_carry(run[-1], call)
        if found and carry in ((), found):
            run, carry = [*run, call], found
        else:
            yield run
            run, carry = [call], ()
    yield run


def _find_carry(before: GraphCall, after: GraphCall) -> tuple[Any, ...]:
    """Returns the path of one call's only output among the arguments of the next call.

    Returns () if there are several outputs, or if the calls differ in any other argument.
    """
    if len(before.outputs) != 1 or before.arguments.keys() != after.arguments.keys():
        return ()
    differing = [
        path
        for path, argument in after.arguments.items()
        if not _is_same(before.arguments[path], argument)
    ]
    if len(differing) == 1 and after.arguments[differing[0]] is before.outputs[0]:
        return differing[0]
    return ()


def _is_same(one: Any, other: Any) -> bool:
    plain = (int, float, str, bool)
    return one is other or (isinstance(one, plain) and type(one) is type(other) and one == other)


def _find_period(blocks: Sequence[keras.Layer]) -> int:
    """Returns the number of blocks after which their settings repeat, at most `len(blocks)`."""
    known = [_describe(block) for block in blocks]
    for period in range(1, len(blocks)):
        if all(known[i] == known[i - period] for i in range(period, len(blocks))):
            return period
    return len(blocks)


def _describe(block: keras.Layer) -> list[Any]:
    """Returns the classes and settings of all layers in a block, which determine what it does."""
    return [
        (type(layer), {k: describe_value(v) for k, v in internals.read_settings(layer).items()})
        for layer in internals.flatten_layers(block)
    ]


def describe_value(value: Any) -> Any:
    """Returns a comparable description of a setting, equal for settings with the same effect."""
    known = (keras.Variable, keras.KerasTensor, keras.Layer, keras.random.SeedGenerator)
    if isinstance(value, known):
        return type(value).__name__  # shapes, and settings of sublayers, are compared separately
    if isinstance(value, keras.initializers.Initializer):
        return type(value).__name__  # an initializer has no effect on a built layer
    if isinstance(value, (list, tuple)):
        return [describe_value(item) for item in value]
    if isinstance(value, dict):
        return {key: describe_value(item) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        return value.shape, str(value.dtype), value.tobytes()
    if isinstance(value, (types.FunctionType, types.BuiltinFunctionType, type)):
        return value
    if isinstance(value, types.MethodType):
        return value.__func__
    if hasattr(value, "get_config"):
        return type(value), describe_value(value.get_config())
    plain = (int, float, str, bool, bytes, type(None))
    return value if isinstance(value, plain) else Unknown()


class Unknown:
    """The description of a value that cannot be compared; an instance equals only itself."""
