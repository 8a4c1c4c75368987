"""Recomputes the blocks of any model in the backward pass, or runs them as a loop.

`tftpu.blocks.structure` finds the blocks. If there are none, `tftpu.blocks.segments` divides the
graph into segments. The model itself does not change.

    with running_blocks(model, remat="block", scan="none"):
        model(x, training=True)  # traced
"""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

import keras
import ml_dtypes

from tftpu import layer_internals as internals
from tftpu.blocks import JAX_REMATS, segments, structure
from tftpu.blocks.recompute import run_recomputed
from tftpu.blocks.scanned import read_values
from tftpu.blocks.segments import Segment
from tftpu.blocks.structure import Chain
from tftpu.errors import UserError
from tftpu.tensors import Nest, Tensor


@runtime_checkable
class RunsBlocks(Protocol):
    """A layer with settings for how its own blocks run, as in the models of `tftpu.models`.

    Attributes:
        remat: what the backward pass recomputes, as for `BlockModel`.
        scan: whether the blocks run as a loop: "auto", "none" or "block".
    """

    remat: str
    scan: str


@contextlib.contextmanager
def running_blocks(model: keras.Model, remat: str, scan: str) -> Iterator[None]:
    """Makes a model recompute or loop over its blocks in the context; the results are the same.

    Args:
        model: the model.
        remat: what the backward pass recomputes, as `TrainConfig.remat`.
        scan: "block" for one loop over the blocks of each chain, on JAX; or "none".
    """
    if remat == "none" and scan == "none":
        yield
        return
    replacements: dict[int, Callable[..., Any]] = {}
    blocks, cut = _find_recomputed(model) if remat != "none" else ([], {})
    for block in blocks:
        replacements[id(block)] = functools.partial(_recompute, [block], remat)
    if scan != "none":
        for chain in structure.find_chains(model):
            replacements |= {id(block): functools.partial(_skip, chain) for block in chain.blocks}
            replacements[id(chain.blocks[0])] = functools.partial(_loop, chain, remat)
            if blocks and blocks[-1] in chain.rest:
                # Recomputing these last blocks would not lower the peak memory: the backward pass
                # begins with them and reaches its peak later, in a group of the loop.
                for block in chain.rest:
                    replacements.pop(id(block))
    graphs = {key: functools.partial(_run_segments, parts, remat) for key, parts in cut.items()}
    with internals.replacing_calls(replacements), internals.replacing_graphs(graphs):
        yield


def _run_segments(
    parts: Sequence[Segment],
    remat: str,
    values: dict[int, Any],
    run: Callable[..., None],
) -> None:
    """Computes the tensors of a graph so that the backward pass recomputes its segments.

    Args:
        parts: the segments of the graph, in order.
        remat: what the backward pass recomputes, as for `running_blocks`.
        values: the values of the graph's inputs by tensor id; this adds all other values.
        run: a function that takes nodes and `values`, and adds the nodes' outputs to `values`.
    """
    for part in parts:
        if part.recomputed:
            compute = functools.partial(_compute_segment, part, run)
            given = [values[key] for key in part.inputs]
            found = _recompute(part.layers, remat, compute, given)
            values |= dict(zip(part.outputs, found))
        else:
            run(part.nodes, values)


def _compute_segment(
    part: Segment, run: Callable[..., None], _: keras.Layer, given: Sequence[Any]
) -> list[Any]:
    """Returns the values of a segment's outputs, given the values of its inputs."""
    values = dict(zip(part.inputs, given))
    run(part.nodes, values)
    return [values[key] for key in part.outputs]


def _recompute(
    layers: Sequence[keras.Layer],
    remat: str,
    plain: Callable,
    *args: Any,
    **kwargs: Any,
) -> Nest:
    """Calls a block, or the layers of a segment, so that the backward pass recomputes them."""
    inputs, context = _Inputs(args, kwargs), internals.read_call_context()

    def part(floats: list[Tensor]) -> tuple[Nest, list[Tensor | None]]:
        args, kwargs = inputs.replace(floats)
        # TensorFlow recomputes after the model's call has ended: restore the context of the call.
        with internals.entering_call(context):
            y = plain(layers[0], *args, **kwargs)
        return y, [internals.read_mask(tensor) for tensor in keras.tree.flatten(y)]

    y, masks = run_recomputed(part, layers, inputs.floats, remat)
    for tensor, mask in zip(keras.tree.flatten(y), masks):
        internals.attach_mask(tensor, mask)
    return y


def _loop(chain: Chain, remat: str, plain: Callable, *args: Any, **kwargs: Any) -> Tensor:
    """Runs all blocks of a chain as one loop over its groups; replaces the first block's call."""
    from tftpu.kernels.jax_checkpoint import scan

    size = chain.period
    groups = [chain.blocks[i : i + size] for i in range(0, len(chain.blocks), size)]
    variables = [[v for block in group for v in block.variables] for group in groups]
    changed: list[int] = []
    inputs = _Inputs(args, kwargs)

    def body(x: Tensor, values: list[Tensor]) -> tuple[Tensor, Nest]:
        mapping = list(zip(variables[0], values))
        with keras.StatelessScope(state_mapping=mapping, collect_losses=True) as scope:
            for block in groups[0]:
                args, kwargs = inputs.replace_one(chain.carry, x)
                x = plain(block, *args, **kwargs)
            after = [scope.get_current_value(v) for v in variables[0]]
        changed[:] = [i for i, (old, new) in enumerate(zip(values, after)) if new is not old]
        return x, (scope.losses, [after[i] for i in changed])

    columns = [[v for block in group for v in read_values(block)] for group in groups]
    weights = [list(same) for same in zip(*columns)]
    x, (losses, values) = scan(body, inputs.find(chain.carry), weights, remat)
    for place, stacked in zip(changed, values):
        for group, value in zip(variables, stacked):
            group[place].assign(value)
    for loss in losses:
        groups[0][0].add_loss(keras.ops.sum(loss))
    return inputs.keep_mask(chain.carry, x)


def _skip(chain: Chain, plain: Callable, *args: Any, **kwargs: Any) -> Tensor:
    """Returns a block's input unchanged: the loop has already computed the block."""
    return _Inputs(args, kwargs).find(chain.carry)


class _Inputs:
    """The arguments of a call, in which tensors can be replaced.

    Attributes:
        floats: the float tensors among the arguments.
    """

    def __init__(self, args: Any, kwargs: Any):
        self._structure = (args, kwargs)
        self._leaves = dict(keras.tree.flatten_with_path(self._structure))
        self._floats = {path: leaf for path, leaf in self._leaves.items() if _is_float(leaf)}
        self.floats = list(self._floats.values())

    def find(self, path: tuple[Any, ...]) -> Any:
        """Returns the argument at a path."""
        return self._leaves[path]

    def replace(self, floats: list[Tensor]) -> Any:
        """Returns the positional and the keyword arguments with other float tensors."""
        return self._replace(dict(zip(self._floats, floats)))

    def replace_one(self, path: tuple[Any, ...], tensor: Tensor) -> Any:
        """Returns the positional and the keyword arguments with another tensor at a path."""
        return self._replace({path: tensor})

    def keep_mask(self, path: tuple[Any, ...], tensor: Tensor) -> Tensor:
        """Returns a tensor with the mask of the argument at a path."""
        internals.attach_mask(tensor, internals.read_mask(self._leaves[path]))
        return tensor

    def _replace(self, tensors: dict[tuple[Any, ...], Tensor]) -> Any:
        kept = {path: self.keep_mask(path, tensor) for path, tensor in tensors.items()}
        return keras.tree.pack_sequence_as(self._structure, list((self._leaves | kept).values()))


def _is_float(leaf: Any) -> bool:
    is_tensor = keras.ops.is_tensor(leaf)
    return is_tensor and keras.backend.is_float_dtype(keras.backend.standardize_dtype(leaf.dtype))


def has_blocks(model: keras.Model) -> bool:
    """Returns whether `running_blocks` can recompute a model; False with `RunsBlocks` layers."""
    return not _runs_blocks(model) and any(_find_recomputed(model))


def _find_recomputed(model: keras.Model) -> tuple[list[keras.Layer], dict[int, list[Segment]]]:
    """Returns the blocks to recompute; if there are none, the segments of graphs, by graph id.

    If there are no segments either, returns the layers made of layers whose class occurs several
    times, even if the shapes of their weights differ.
    """
    blocks = structure.find_blocks(model)
    cut = {} if blocks else segments.find_segments(model)
    return blocks if blocks or cut else structure.find_blocks(model, same_weights=False), cut


def _runs_blocks(model: keras.Model) -> bool:
    return any(isinstance(layer, RunsBlocks) for layer in internals.flatten_layers(model))


def check_blocks(model: keras.Model, remat: str, scan: str) -> None:
    """Raises `UserError` if `running_blocks` cannot recompute or loop over a model's blocks.

    Args: as for `running_blocks`.
    """
    asked = [f"train.{k}={v!r}" for k, v in (("remat", remat), ("scan", scan)) if v != "none"]
    if not asked:
        return
    wanted, fields = " and ".join(asked), " and ".join(one.split("=")[0] for one in asked)
    if _runs_blocks(model):
        raise UserError(
            f"{wanted} does not apply to tftpu's own models: set "
            f"{fields.replace('train.', 'model.')} instead."
        )
    backend = keras.config.backend()
    if backend != "jax" and (remat in JAX_REMATS or scan == "block"):
        raise UserError(
            f"{wanted} works only on the JAX engine, but Keras runs on {backend}: set "
            "engine=jax, or use only train.remat='block'."
        )
    if remat != "none" and not any(_find_recomputed(model)):
        raise UserError(
            f"train.remat={remat!r} needs a model with several blocks (layers made of layers) of "
            f"one class, or a functional model of several layers, but {model.name!r} has none: use "
            "train.remat='none'."
        )
    if scan != "none" and not structure.find_chains(model):
        raise UserError(
            f"train.scan={scan!r} needs a functional model with a chain of equal blocks, each "
            f"called on the output of the block before, but {model.name!r} has none: use "
            "train.scan='none'."
        )


def count_input_bytes(model: keras.Model, length: int) -> int:
    """Returns the bytes per example of the blocks' inputs, which the backward pass needs.

    Ignores blocks outside of chains, except those of `tftpu.models`, and inputs with more than one
    unknown dimension.

    Args:
        model: the model.
        length: the size to assume for an unknown dimension, such as the tokens of a text.
    """
    own = [layer for layer in internals.flatten_layers(model) if isinstance(layer, RunsBlocks)]
    entering = [border for layer in own for border in layer.input[:-1]]
    if not own:
        chains = structure.find_chains(model)
        paths = {id(block): chain.carry for chain in chains for block in chain.blocks}
        calls = [call for call in internals.read_calls(model) if id(call.operation) in paths]
        entering = [call.arguments[paths[id(call.operation)]] for call in calls]
    known = [tensor for tensor in entering if tensor.shape[1:].count(None) <= 1]
    return sum(
        math.prod(size or length for size in tensor.shape[1:])
        * (ml_dtypes.finfo(tensor.dtype).bits // 8)
        for tensor in known
    )
