"""Divides the graph of a functional model without repeated blocks into segments to recompute.

A segment may begin at any call; all tensors that later calls need are then kept in memory.
Following Chen et al. 2016 (https://arxiv.org/abs/1604.06174), n calls are divided into about
sqrt(n) segments of similar size, which begin where the kept tensors are smallest.
"""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import keras

from tftpu import layer_internals as internals


class Segment(NamedTuple):
    """Consecutive calls of a graph.

    Attributes:
        nodes: the calls.
        inputs: the ids of the symbolic tensors that the calls take from outside of the segment.
        outputs: the ids of the calls' outputs that later calls take or that the graph returns.
        layers: the layers that are called, and all layers inside of them.
        recomputed: whether the backward pass recomputes the calls. False if no layer is called, or
            if a called layer is or contains a model whose own graph is divided into segments.
    """

    nodes: list[Any]
    inputs: list[int]
    outputs: list[int]
    layers: list[keras.Layer]
    recomputed: bool


def find_segments(model: keras.Model) -> dict[int, list[Segment]]:
    """Returns the segments of the graphs of a model and of the models inside it, by graph id.

    Graphs that would be a single segment are left out.
    """
    found: dict[int, list[Segment]] = {}
    for layer in reversed(internals.flatten_layers(model)):  # inner models first
        graph = internals.find_graph(layer)
        if graph is not None and id(graph) not in found:
            segments = _cut(graph, found)
            if len(segments) > 1:
                found[id(graph)] = segments
    return found


def _cut(graph: Any, inner: Mapping[int, Any]) -> list[Segment]:
    nodes = internals.list_nodes(graph)
    uses: dict[int, int] = {}  # maps a tensor's id to the index of the last call that takes it
    for place, node in enumerate(nodes):
        uses |= dict.fromkeys(map(id, node.input_tensors), place)
    uses |= dict.fromkeys(map(id, graph.outputs), len(nodes))
    segments, start = [], 0
    for whole, run in itertools.groupby(nodes, lambda node: _has_graph(node.operation, inner)):
        calls = list(run)
        bounds = range(len(calls)) if whole else _choose_bounds(calls, start, uses)
        for first, last in itertools.pairwise([*bounds, len(calls)]):
            part, end = calls[first:last], start + last
            layers = _list_layers(part)
            made = {id(tensor): None for node in part for tensor in node.outputs}
            given = {id(tensor): None for node in part for tensor in node.input_tensors}
            inputs = [key for key in given if key not in made]
            outputs = [key for key in made if uses.get(key, 0) >= end]
            segments.append(Segment(part, inputs, outputs, layers, bool(layers) and not whole))
        start += len(calls)
    return segments


def _choose_bounds(calls: Sequence[Any], start: int, uses: Mapping[int, int]) -> list[int]:
    """Returns the indices of the calls with which segments begin; the first index is 0.

    Args:
        calls: consecutive calls of the graph.
        start: the index of the first of these calls in the whole graph.
        uses: maps a tensor's id to the index in the graph of the last call that takes it.
    """
    sizes = [_measure(node.outputs) for node in calls]
    done = list(itertools.accumulate(sizes))
    change = [0] * (len(calls) + 1)  # before each call: the elements newly kept minus those freed
    for place, node in enumerate(calls):
        for tensor in node.outputs:
            end = min(uses.get(id(tensor), 0) - start, len(calls) - 1)
            if end > place:
                change[place + 1] += _measure([tensor])
                change[end + 1] -= _measure([tensor])
    kept = list(itertools.accumulate(change))
    count, bounds = round(math.sqrt(len(calls))), [0]
    for number in range(1, count):
        near = [
            place
            for place in range(bounds[-1] + 1, len(calls))
            if abs(count * done[place - 1] / done[-1] - number) <= 0.5
        ]
        if near:
            bounds.append(min(near, key=lambda place: kept[place]))
    return bounds


def _measure(tensors: Iterable[Any]) -> int:
    """Returns the number of elements in tensors; an unknown dimension counts as 1."""
    return sum(math.prod(size or 1 for size in tensor.shape) for tensor in tensors)


def _has_graph(operation: Any, graphs: Mapping[int, Any]) -> bool:
    return any(id(internals.find_graph(layer)) in graphs for layer in _flatten(operation))


def _list_layers(nodes: Iterable[Any]) -> list[keras.Layer]:
    return [layer for node in nodes for layer in _flatten(node.operation)]


def _flatten(operation: Any) -> list[keras.Layer]:
    return internals.flatten_layers(operation) if isinstance(operation, keras.Layer) else []
