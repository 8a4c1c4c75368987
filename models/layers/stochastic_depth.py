"""Stochastic depth that drops the same examples for any number of replicas."""

import random
from typing import Any

import keras
from keras import layers

from tftpu.tensors import Tensor, ops

_ENDLESS = 2**31 - 1  # more consecutive examples than in any batch


@keras.saving.register_keras_serializable("tftpu")
class StochasticDepth(layers.Layer):
    """Dropout of a residual branch, per example (Huang et al. 2016).

    Follows https://arxiv.org/abs/1603.09382. Examples that are kept are scaled by 1 / (1 - rate),
    so that the layer is the identity in evaluation. An example's random number depends on its
    position in the global batch.

    Args:
        rate: probability that an example is dropped.
        seed: the seed of the random numbers; None picks one at random.
    """

    def __init__(self, rate: float, seed: int | None = None, **kwargs: Any):
        super().__init__(**kwargs)
        self.rate = rate
        self.seed = seed
        self.seed_generator = ExampleSeed(seed)
        self.built = True

    def call(self, x: Tensor, training: bool | None = False) -> Tensor:
        if not training:
            return x
        examples = ops.shape(x)[0]
        keep = self.seed_generator.draw_uniform(examples) >= self.rate  # (batch,)
        scale = ops.cast(keep, x.dtype) / ops.cast(1.0 - self.rate, x.dtype)
        return x * ops.reshape(scale, (examples, *([1] * (len(x.shape) - 1))))

    def compute_output_shape(self, input_shape: Any) -> Any:
        return input_shape

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "rate": self.rate, "seed": self.seed}


class ExampleSeed(keras.random.SeedGenerator):
    """A generator whose random numbers each belong to one example of the global batch.

    Its state is five integers: seed, number of calls so far, position of the first local example in
    the global batch, number of local examples that are consecutive there, and distance from the
    start of these to the start of the next ones. The engine finds the state by the variable's
    name and sets it, so that an example gets the same number on any device.

    Args:
        seed: the seed of the random numbers; None picks one at random.
        name: the name of the generator.
    """

    def __init__(self, seed: int | None = None, name: str | None = None):
        super().__init__(seed, name)
        seed = random.randint(1, 10**9) if seed is None else seed
        self.state = keras.Variable(
            lambda shape, dtype: ops.convert_to_tensor([seed, 0, 0, _ENDLESS, 0], dtype),
            shape=(5,),
            dtype=self.state.dtype,
            trainable=False,
            aggregation="none",
            name="example_seed",
        )

    def draw_uniform(self, examples: int) -> Tensor:
        """Returns a random number in [0, 1) for each example, (examples,) float32."""
        state = ops.convert_to_tensor(self.state.value)
        seed, draws, first, run, stride = ops.unstack(state, num=5)
        self.state.assign(ops.stack([seed, draws + 1, first, run, stride]))
        place = ops.cast(ops.arange(examples), state.dtype)
        place = first + place // run * stride + place % run
        bits = _mix_bits(_extract_word(seed))
        for data in (draws, place):
            bits = _mix_bits(ops.bitwise_xor(bits, _extract_word(data)))
        # A float32 holds 24 bits exactly.
        return ops.cast(ops.right_shift(bits, _make_constant(8)), "float32") * 2.0**-24


def _extract_word(x: Tensor) -> Tensor:
    """Returns the low 32 bits: the state is int64 under TensorFlow, uint32 under JAX."""
    if keras.backend.standardize_dtype(x.dtype) == "int64":
        x = ops.bitwise_and(x, 0xFFFFFFFF)
    return ops.cast(x, "uint32")


def _mix_bits(x: Tensor) -> Tensor:
    """Hashes 32 bits to 32 by multiplications and shifts, which spread each bit to all others."""
    x = _fold_bits(x, 16) * _make_constant(0x7FEB352D)
    x = _fold_bits(x, 15) * _make_constant(0x846CA68B)
    return _fold_bits(x, 16)


def _fold_bits(x: Tensor, bits: int) -> Tensor:
    return ops.bitwise_xor(x, ops.right_shift(x, _make_constant(bits)))


def _make_constant(x: int) -> Tensor:
    return ops.convert_to_tensor(x, "uint32")
