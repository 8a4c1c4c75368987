"""Stochastic depth whose draws do not depend on how many replicas share the batch."""

import random

import keras
from keras import layers, ops


class StochasticDepth(layers.Layer):
    """Drops a residual branch for whole examples (Huang et al. 2016).

    Follows https://arxiv.org/abs/1603.09382; what is kept is scaled up by 1 / (1 - rate), so
    evaluation changes nothing. Each example draws by its place in the global batch.

    Args:
        rate: the probability of being dropped.
        seed: of the draws; None: another one each time.
    """

    def __init__(self, rate: float, seed: int | None = None, **kwargs):
        super().__init__(**kwargs)
        self.rate = rate
        self.seed = seed
        self.seed_generator = ExampleSeed(seed)
        self.built = True

    def call(self, x, training=False):
        if not training:
            return x
        examples = ops.shape(x)[0]
        keep = self.seed_generator.uniform(examples) >= self.rate  # (batch,)
        scale = ops.cast(keep, x.dtype) / ops.cast(1.0 - self.rate, x.dtype)
        return x * ops.reshape(scale, (examples, *([1] * (len(x.shape) - 1))))

    def compute_output_shape(self, input_shape):
        return input_shape

    def get_config(self):
        return {**super().get_config(), "rate": self.rate, "seed": self.seed}


class ExampleSeed(keras.random.SeedGenerator):
    """Random numbers of which each belongs to one example of the global batch.

    Its state is (seed, draws so far, place of the first example in hand), int64. `tftpu.engines.tensorflow.step` knows
    it by its name and sets it, so that an example draws the same wherever it is computed.
    """

    def __init__(self, seed: int | None = None, name: str | None = None):
        super().__init__(seed, name)
        seed = random.randint(1, 10**9) if seed is None else seed
        self.state = keras.Variable(
            lambda shape, dtype: ops.convert_to_tensor([seed, 0, 0], dtype),
            shape=(3,),
            dtype=self.state.dtype,
            trainable=False,
            aggregation="none",
            name="example_seed",
        )

    def uniform(self, examples: int):
        """One number in [0, 1) for each of so many consecutive examples, float32."""
        seed, draws, first = ops.unstack(ops.convert_to_tensor(self.state.value), num=3)
        self.state.assign(ops.stack([seed, draws + 1, first]))
        place = ops.cast(ops.arange(examples), "int64") + first
        bits = _mixed(_word(seed))
        for data in (draws, place):
            bits = _mixed(ops.bitwise_xor(bits, _word(data)))
        # 24 bits are what a float32 holds.
        return ops.cast(ops.right_shift(bits, _constant(8)), "float32") * 2.0**-24


def _word(x):
    """The low 32 bits."""
    return ops.cast(ops.bitwise_and(x, 0xFFFFFFFF), "uint32")


def _mixed(x):
    """A hash of 32 bits to 32: multiplications and shifts, of which each bit reaches all others."""
    x = _folded(x, 16) * _constant(0x7FEB352D)
    x = _folded(x, 15) * _constant(0x846CA68B)
    return _folded(x, 16)


def _folded(x, bits: int):
    return ops.bitwise_xor(x, ops.right_shift(x, _constant(bits)))


def _constant(x: int):
    return ops.convert_to_tensor(x, "uint32")
