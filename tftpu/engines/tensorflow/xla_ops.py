"""Rejects, before training on a TPU, ops that XLA cannot compile; reads the graphs of steps."""

from collections.abc import Iterator

import tensorflow as tf

from tftpu.engines.tensorflow import internals
from tftpu.errors import UserError

# Advice by the type of an op that XLA cannot compile.
_INSTEAD = {
    "CTCLoss": "Use keras.losses.CTC(), which is made of ops that XLA can compile.",
    "CTCLossV2": "Use keras.losses.CTC(), which is made of ops that XLA can compile.",
    # Used by Keras's layers that rotate, zoom, shift or shear images.
    "ImageProjectiveTransformV3": "Use the JAX engine, with tftpu.connect(engine='jax') or "
    "--config.cluster.engine=jax, or move the layer to the input pipeline (tf.data).",
}


def check_ops(ops: list[tf.Operation]) -> None:
    """Raises `UserError`, naming the layer, if there is an op that XLA cannot compile."""
    for op in ops:
        if not internals.has_xla_kernel(op.type) and not internals.is_call(op):
            layer = internals.find_layer(op)
            instead = _INSTEAD.get(
                op.type, "Move it to the input pipeline (tf.data), or remove the layer."
            )
            raise UserError(
                f"The layer {layer!r} uses the op {op.type}, which XLA cannot compile, so no TPU "
                f"can run it. {instead}"
            )


def is_computed_from(tensor: tf.Tensor, inputs: list[tf.Tensor]) -> bool:
    """Returns whether a tensor of a graph is computed from any of the given tensors."""
    given = {id(one.op) for one in inputs}
    return any(id(op) in given for op in _iterate_sources(tensor))


def is_drawn(tensor: tf.Tensor) -> bool:
    """Returns whether a tensor depends on stateful ops of `tf.random`, which vary by device."""
    known = internals.list_functions(tensor.graph)
    for op in _iterate_sources(tensor):
        bodies = internals.list_called_functions(known, op)
        if any(map(_is_drawing, [op, *(one for body in bodies for one in list_graph_ops(body))])):
            return True
    return False


def _is_drawing(op: tf.Operation) -> bool:
    return op.op_def.is_stateful and any(attr.name == "seed" for attr in op.op_def.attr)


def _iterate_sources(tensor: tf.Tensor) -> Iterator[tf.Operation]:
    """Yields the ops from which a tensor of a graph is computed."""
    todo, seen = [tensor.op], {id(tensor.op)}
    while todo:
        op = todo.pop()
        yield op
        before = [one for one in (t.op for t in op.inputs) if id(one) not in seen]
        seen.update(map(id, before))
        todo += before


def list_graph_ops(graph: tf.Graph) -> list[tf.Operation]:
    """Returns the ops of a graph and of all the functions that it calls."""
    ops: list[tf.Operation] = []
    seen: set[int] = set()
    todo = [graph]
    while todo:
        here = todo.pop()
        known = internals.list_functions(here)
        for op in here.get_operations():
            ops.append(op)
            for body in internals.list_called_functions(known, op):
                if id(body) not in seen:
                    seen.add(id(body))
                    todo.append(body)
    return ops
