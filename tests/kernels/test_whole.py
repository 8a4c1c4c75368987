"""The kernel for short sequences computes what plain attention does, and compiles for TPUs.

Evidence: executed (interpreted on a CPU) and compiled. Nothing here ran on a TPU.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support.models.kernels import interpreted
from tests.support.steps.lowering import lower
from tftpu.kernels import functions, whole
from tftpu.kernels.attention import choose_whole_kernel
from tftpu.models.layers.self_attention import SelfAttention
from tftpu.preflight.compiling import compiler
from tftpu.preflight.pricing import cost
from tftpu.tpu.slices import parse_slice

__all__ = ["interpreted"]  # a fixture


def results(implementation, x, heads, segments=None, policy="float32"):
    """Returns the output and gradients, float32, of a layer with random weights."""
    layer = SelfAttention(heads, implementation, dtype=policy)
    layer.build(x.shape)
    rng = np.random.default_rng(1)
    for variable in layer.trainable_variables:
        variable.assign(rng.normal(0.0, 0.1, variable.shape))
    upstream = rng.normal(size=x.shape)
    x = tf.constant(x, "float32")
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = layer(x, segments)
        loss = tf.reduce_sum(tf.cast(y, "float32") * upstream)
    sources = [x, *(v.value for v in layer.trainable_variables)]
    return [np.asarray(tf.cast(found, "float32")) for found in (y, *tape.gradient(loss, sources))]


def tokens(time, width):
    return np.random.default_rng(0).normal(size=(2, time, width)).astype("float32")


def segments(time):
    return np.sort(np.random.default_rng(2).integers(0, 3, (2, time)), axis=1).astype("int32")


@pytest.mark.medium
@pytest.mark.parametrize(
    ("time", "width", "heads", "packed"),
    [(197, 128, 2, False), (37, 256, 2, False), (24, 256, 8, True), (50, 256, 1, True)],
    ids=["two-heads-a-column", "one-head-a-column", "four-packed", "wide-head-packed"],
)
def test_a_layer_gives_the_output_and_gradients_of_plain_attention(
    interpreted, time, width, heads, packed
):
    given = tokens(time, width), heads, segments(time) if packed else None
    assert choose_whole_kernel("flash", given[0], heads) is functions.whole_attention
    plain, fast = results("plain", *given), results("flash", *given)
    assert len(plain) == 6  # the output; x, and kernels and biases of two projections
    for expected, found in zip(plain, fast):
        np.testing.assert_allclose(found, expected, atol=2e-5 * np.abs(expected).max())


@pytest.mark.medium
def test_in_bfloat16_the_kernel_is_as_close_to_the_exact_result_as_plain_attention(interpreted):
    given = tokens(40, 128), 2
    exact = results("plain", *given)
    plain, fast = (results(i, *given, policy="mixed_bfloat16") for i in ("plain", "flash"))
    # Without the gradient of the last bias, which does not depend on the kernel.
    for e, p, f in zip(exact[:-1], plain, fast):
        error = [np.linalg.norm(x - e) / np.linalg.norm(e) for x in (p, f)]
        assert error[1] < 1.2 * error[0] + 1e-3


def test_other_sequences_use_the_general_implementation(interpreted):
    def is_whole(time, width, heads, dtype="bfloat16"):
        x = keras.KerasTensor((2, time, width), dtype)
        return choose_whole_kernel("flash", x, heads) is not None

    assert is_whole(197, 768, 12) and is_whole(500, 768, 12) and is_whole(197, 1024, 16)
    assert not is_whole(513, 768, 12)  # longer
    assert not is_whole(512, 768, 12)  # whole blocks
    assert not is_whole(500, 1024, 16)  # too much to hold
    assert is_whole(250, 768, 12, "float32") and not is_whole(500, 768, 12, "float32")
    assert not is_whole(197, 192, 3)  # three heads of 64 fill no columns of 128 lanes
    assert not is_whole(197, 160, 2)  # heads of 80
    assert not is_whole(None, 768, 12)
    assert choose_whole_kernel("plain", tf.zeros((2, 197, 768)), 12) is None


def test_without_a_tpu_there_is_no_kernel():
    given = tokens(16, 128), 2
    assert choose_whole_kernel("flash", *given) is None
    for plain, fast in zip(results("plain", *given), results("flash", *given)):
        np.testing.assert_allclose(fast, plain, atol=1e-5 * np.abs(plain).max())


# Compiled


def compiled_for(name, time, width, heads, implementation="flash"):
    """Compiles a train step of two layers and returns its priced instructions."""

    def model():
        tokens = keras.Input((time, width))
        x = tokens
        for _ in range(2):
            x = SelfAttention(heads, implementation)(x)
        built = keras.Model(tokens, keras.layers.Dense(10, dtype="float32")(x[:, 0]))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        built.compile(keras.optimizers.SGD(0.1), loss)
        return built

    target = parse_slice(name)
    batch = tf.TensorSpec((4, time, width), tf.bfloat16), tf.TensorSpec((4,), tf.int32)
    program = lower(model, batch, target.replicas, "mixed_bfloat16")
    compiled = compiler.compile_program(program, target)
    assert not compiled.error
    return cost.price(program, compiled, target).instructions


@pytest.mark.slow
@pytest.mark.compiles
@pytest.mark.parametrize(
    "name",
    [
        "v5e-8",
        *(
            pytest.param(name, marks=pytest.mark.exhaustive)
            for name in ("v2-8", "v3-8", "v4-8", "v5p-8", "v6e-8", "tpu7x-8")
        ),
    ],
)
def test_the_step_compiles_with_the_kernels_and_prices_them_by_their_work(name):
    found = compiled_for(name, 197, 256, 4)
    calls = [p for p in found if p.kind == "kernel" and p.flops]
    # Forward: scores and mixed values. Backward: scores again, and four gradients. Of 197 tokens
    # 208 rows of 256 lanes; each of 4 heads works on 128 lanes.
    product = 2 * 4 * 4 * 208 * 256 * 128
    assert sorted(p.flops for p in calls) == [2 * product] * 2 + [5 * product] * 2
    assert all(p.seconds > 0 for p in calls)


@pytest.mark.exhaustive
@pytest.mark.compiles
def test_nothing_is_copied_between_the_products():
    def copying(implementation):
        found = compiled_for("v5e-8", 197, 256, 4, implementation)
        return sum(p.cycles for p in found if p.kind == "copy")

    assert copying("flash") < 0.1 * copying("plain")


OTHERS = (("v2-8", 448), ("v4-8", 500))


@pytest.mark.slow
@pytest.mark.compiles
@pytest.mark.parametrize(
    ("name", "time"),
    [("v3-8", 448), *(pytest.param(*one, marks=pytest.mark.exhaustive) for one in OTHERS)],
)
def test_the_largest_sequences_fit_the_smallest_cores(name, time):
    assert whole.takes(time, 768, 12, 2)
    compiled_for(name, time, 768, 12)
