"""Lowers the loop in which a language model generates tokens, on a machine without a TPU."""

from typing import Any, NamedTuple

import tensorflow as tf

from tftpu import sharding
from tftpu.engines import keras_internals
from tftpu.engines.lowered import LoweredStep, ModelFn, StateBytes
from tftpu.engines.tensorflow.lowering.lower import TensorFlowLowering, count_bytes, to_hlo
from tftpu.inference.decoding import build_decoding
from tftpu.inference.loop import Loop
from tftpu.inference.sampling import Sampling, draw_from_all, gather_rules

_TOKENS = 64  # tokens that the loop generates: enough to make the work before it negligible


class LoweredWriting(NamedTuple):
    """The loop that generates the last tokens of a context.

    Attributes:
        step: the lowered program of the loop.
        context: the length of the context in tokens.
        tokens: the number of tokens that the loop generates for each text.
    """

    step: LoweredStep
    context: int
    tokens: int


def lower_writing(model_fn: ModelFn, rows: int, precision: str) -> LoweredWriting:
    """Lowers the loop that generates the last tokens of a context.

    Args:
        model_fn: a function that returns a newly built language model.
        rows: the number of texts that are generated at once.
        precision: dtype policy under which the model is built.

    Raises:
        UserError: the model does not predict the next token, or XLA cannot compile it.
    """
    model = TensorFlowLowering().build_model(model_fn, precision)
    decoding = build_decoding(model)
    # Sampling from all tokens, so that the estimate does not include other sampling rules.
    loop, slots = Loop(decoding, draw_from_all), decoding.context
    every = min(_TOKENS, slots // 2)

    def build_spec(*shape: int, dtype: Any = tf.int32) -> tf.TensorSpec:
        return tf.TensorSpec(shape, dtype)

    def read(tokens: Any, lengths: Any, uniform: Any, given: Any) -> Any:
        return loop.read(tokens, lengths, uniform, given, slots)

    def write(state: Any, given: Any, uniform: Any) -> Any:
        first = tf.constant(slots - every)
        return loop.write(state, given, first, uniform, tf.constant(every))

    layers = {x.name: type(x).__name__ for x in keras_internals.list_layers(model)}
    lengths, chances = build_spec(rows), build_spec(rows, dtype=tf.float32)
    numbers = {
        name: build_spec(rows, dtype=x.dtype) for name, x in gather_rules([Sampling()]).items()
    }
    prompts = build_spec(rows, slots - every), lengths, chances, numbers
    with sharding.compiling_for("tpu"):
        traced: Any = tf.function(read, autograph=False).get_concrete_function(*prompts)
        state = tf.nest.map_structure(
            lambda x: tf.TensorSpec(x.shape, x.dtype), traced.structured_outputs[0]
        )
        texts = {"token": lengths, "position": lengths, "rules": numbers}
        given = state, texts, build_spec(rows, every, dtype=tf.float32)
        hlo, arguments = to_hlo(write, given, "hlo_serialized", layers)
    step = LoweredStep(
        program=hlo,
        arguments=arguments,
        layers=layers,
        precision=precision,
        state_bytes=StateBytes(count_bytes(model.variables), 0, 0),
    )
    return LoweredWriting(step, slots, every)
