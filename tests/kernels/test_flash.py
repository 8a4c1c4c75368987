"""The flash kernel computes what plain attention does, and the TPU compiler accepts it.

Evidence: executed (interpreted on a CPU) and compiled. Nothing here ran on a TPU.
"""

import builtins

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support.models.kernels import interpreted
from tests.support.steps.lowering import lower
from tftpu import models, preflight, sharding
from tftpu.errors import UserError
from tftpu.kernels import flash, functions, internals
from tftpu.kernels.attention import attention, choose_rotation_kernel
from tftpu.models.families import llama
from tftpu.preflight.compiling import compiler
from tftpu.preflight.pricing import cost
from tftpu.tpu.slices import parse_slice

__all__ = ["interpreted"]  # a fixture


def test_a_jax_too_new_for_tensorflow_fails_with_the_versions_to_install(monkeypatch):
    query = tf.zeros((1, 128, 1, 128))
    if internals.can_embed_jax():  # like TensorFlow 2.19 with jax 0.10
        from jax import export

        monkeypatch.setattr(export, "maximum_supported_calling_convention_version", 99)
    message = r"cannot read the programs that this jax writes.*jax==0\.6\.0"
    with sharding.compiling_for("tpu"), pytest.raises(UserError, match=message):
        attention(query, query, query, implementation="flash")


def arrays(time, heads, head_dim, key_heads=None, dtype="float32"):
    rng = np.random.default_rng(0)
    shapes = [(2, time, n, head_dim) for n in (heads, key_heads or heads, key_heads or heads)]
    return [tf.cast(rng.normal(size=shape), dtype) for shape in shapes]


def with_gradients(implementation, given, weight, sinks=None, **options):
    if sinks is not None:
        given, sinks = [*given, tf.constant(sinks)], len(given)
    with tf.GradientTape() as tape:
        tape.watch(given)
        if sinks is not None:
            options["sinks"] = given[sinks]
        found = attention(*given[:3], implementation=implementation, **options)
        loss = tf.reduce_sum(tf.cast(found, "float32") * weight)
    return [found, *tape.gradient(loss, given)]


SEGMENTS = np.sort(np.random.default_rng(1).integers(0, 3, (2, 256)), axis=1)
LENGTHS = np.array([[150], [200]])


def see_window(time, window, lengths=((10**9,), (10**9,))):
    """Which keys each query sees, (2, time, time) bool: earlier ones in a window, no padding."""
    distance = np.arange(time)[:, None] - np.arange(time)[None]
    near = (distance >= 0) & (distance < window)
    return near & (np.arange(time) < np.asarray(lengths))[:, None]


@pytest.mark.medium
@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((256, 2, 64), {}),
        ((256, 2, 64), {"causal": True}),
        ((256, 1, 128), {"causal": True, "segment_ids": SEGMENTS}),
        ((256, 4, 64, 2), {"causal": True, "mask": np.arange(256)[None] < LENGTHS}),
        ((256, 4, 128, 2), {"causal": True, "segment_ids": SEGMENTS}),
        ((256, 3, 128, 1), {}),
        ((512, 2, 64), {"mask": see_window(512, 1)}),
        ((512, 2, 64), {"causal": True, "mask": see_window(512, 130)}),
        ((500, 4, 128, 2), {"mask": see_window(500, 128, 2 * LENGTHS + 100)}),
        ((512, 2, 128), {"mask": see_window(512, 300), "soft_cap": 1.5}),
        ((256, 2, 64), {"soft_cap": 1.5}),
        ((256, 3, 64), {"causal": True, "sinks": [-1.0, 0.5, 2.0]}),
        ((256, 2, 128, 1), {"mask": see_window(256, 100), "soft_cap": 2.0, "sinks": [1.0, 40.0]}),
        ((197, 3, 64), {}),
        ((200, 2, 64), {"mask": np.arange(200)[None] < LENGTHS}),
    ],
    ids=[
        *("all", "causal", "packed", "grouped-padded", "grouped-packed", "one-key-head"),
        *("window-of-one", "window", "window-of-a-block-padded", "window-capped", "capped"),
        *("sinks", "window-capped-sinks", "odd-length-and-heads", "padded"),
    ],
)
def test_flash_gives_the_output_and_gradients_of_plain_attention(interpreted, shape, options):
    given = arrays(*shape)
    weight = np.random.default_rng(2).normal(size=given[0].shape)
    plain = with_gradients("plain", given, weight, **options)
    fast = with_gradients("flash", given, weight, **options)
    for a, b in zip(plain, fast):
        np.testing.assert_allclose(a, b, atol=2e-5)


@pytest.mark.medium
@pytest.mark.parametrize(
    ("time", "heads", "head_dim", "examples"), [(200, 2, 64, 2), (300, 9, 128, 1), (256, 1, 256, 2)]
)
def test_the_kernel_for_rotary_positions_does_what_they_are_defined_to_do(
    interpreted, time, heads, head_dim, examples
):
    rng = np.random.default_rng(0)
    x, weight = (tf.cast(rng.normal(size=(2, time, heads * head_dim)), "float32") for _ in "xw")
    angles = tf.cast(rng.normal(size=(examples, time, head_dim // 2)), "float32")
    complexes = x.numpy().reshape(2, time, heads, 2, head_dim // 2)
    complexes = complexes[..., 0, :] + 1j * complexes[..., 1, :]
    turned = complexes * np.exp(1j * angles.numpy())[:, :, None]
    expected = np.stack([turned.real, turned.imag], -2).reshape(x.shape)

    assert choose_rotation_kernel("flash", x, heads) is not None

    def with_gradient(implementation):
        with tf.GradientTape() as tape:
            tape.watch(x)
            found = llama.rotate(x, angles, implementation)
            loss = tf.reduce_sum(found * weight)
        return found, tape.gradient(loss, x)

    np.testing.assert_allclose(with_gradient("flash")[0], expected, atol=1e-5)
    for fast, plain in zip(with_gradient("flash"), with_gradient("plain")):
        np.testing.assert_allclose(fast, plain, atol=1e-5)


@pytest.mark.medium
def test_in_bfloat16_flash_is_as_close_to_the_exact_result_as_plain_attention(interpreted):
    given = arrays(256, 2, 64, dtype="bfloat16")
    weight = np.ones(given[0].shape)
    exact = with_gradients("plain", [tf.cast(x, "float32") for x in given], weight, causal=True)
    plain, fast = (with_gradients(i, given, weight, causal=True) for i in ("plain", "flash"))
    for e, p, f in zip(exact, plain, fast):
        assert f.dtype == "bfloat16"
        error = [np.abs(np.asarray(x, "float32") - e).max() for x in (p, f)]
        assert error[1] < 1.5 * error[0] + 1e-3


def test_without_a_tpu_flash_is_plain_attention():
    given = arrays(16, 2, 8)
    plain, flash_ = (attention(*given, causal=True, implementation=i) for i in ("plain", "flash"))
    np.testing.assert_array_equal(plain, flash_)


def test_unsupported_shapes_fail_with_the_alternative(interpreted, monkeypatch):
    def call(query, *others):
        attention(query, *others, implementation="flash")

    with pytest.raises(UserError, match=r"not 80.*attention='plain'"):
        call(*arrays(16, 2, 80))
    with pytest.raises(UserError, match="as many keys as queries, not 8 and 16"):
        call(arrays(16, 2, 64)[0], *arrays(8, 2, 64)[1:])
    monkeypatch.setattr(flash, "LONGEST", 64)
    with pytest.raises(UserError, match="at most 64 tokens"):
        call(*arrays(128, 2, 64))


def test_without_jax_the_error_says_how_to_install_it(interpreted, monkeypatch):
    real = builtins.__import__

    def no_kernel(name, *rest, **named):
        if name == "tftpu.kernels":
            raise ImportError("No module named 'jax'")
        return real(name, *rest, **named)

    given = arrays(128, 2, 64)
    monkeypatch.setattr(builtins, "__import__", no_kernel)
    with pytest.raises(UserError, match="pip install jax"):
        functions.flash_attention(*given, True, None, None)


@pytest.mark.parametrize(
    ("key_heads", "dtype", "time", "devices", "times"),
    [
        (2, "bfloat16", 8192, 1, 1),
        (2, "bfloat16", 8192, 2, 1),
        (2, "bfloat16", 8192, 4, 2),
        (2, "bfloat16", 8192, 8, 4),
        (2, "bfloat16", 8192, 3, 8),  # which divide no number of heads
        (2, "float32", 8192, 1, 8),
        (2, "float32", 2048, 1, 1),
    ],
)
def test_keys_are_repeated_only_for_devices_and_memory(key_heads, dtype, time, devices, times):
    query = keras.KerasTensor((1, time, 16, 128), dtype)
    sharing = sharding.Sharding({sharding.HEADS: devices}, None, None, None)
    with sharding.compiling_for("tpu", sharing):
        assert functions._count_repeats(query, key_heads, flash) == times


# Compiled

BATCH, TIME, WIDTH = 2, 512, 128


def test_preflight_says_in_the_kernels_words_which_shape_it_does_not_take():
    def model():
        built = models.build("vit_s16", attention="flash", width=176, heads=2, layers=1)
        built.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return built

    images = tf.TensorSpec((8, 224, 224, 3)), tf.TensorSpec((8,), tf.int32)
    with pytest.raises(UserError, match=r"^model\.attention='flash' needs heads whose"):
        preflight.check(model, images, ["v3-8"])


def tiny_gpt(**fields):
    def model():
        sizes = {"layers": 1, "vocabulary": 512, "width": WIDTH, "heads": 2, **fields}
        built = models.build("gpt2_small", **sizes)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        built.compile(keras.optimizers.SGD(0.1), loss)
        return built

    return model


OTHERS = ("v2-8", "v3-8", "v4-8", "v5p-8", "v6e-8", "tpu7x-8")
SLICES = [
    pytest.param("v5e-8", marks=pytest.mark.slow),
    *(pytest.param(name, marks=pytest.mark.exhaustive) for name in OTHERS),
]


@pytest.mark.compiles
@pytest.mark.parametrize("name", SLICES)
def test_the_step_compiles_with_the_kernels_and_prices_them_by_their_work(name):
    slice_ = parse_slice(name)
    tokens = tf.TensorSpec((BATCH, TIME), tf.int32)
    program = lower(
        tiny_gpt(attention="flash"), (tokens, tokens), slice_.replicas, "mixed_bfloat16"
    )
    compiled = compiler.compile_program(program, slice_)
    assert not compiled.error
    found = cost.price(program, compiled, slice_).instructions
    calls = [p for p in found if p.kind == "kernel" and p.flops]
    # Forward: scores and mixed values. Backward: scores again, and four gradients. Of 2 x 2 blocks
    # of 256 the causal mask leaves 3; each of 2 heads works on 128 lanes.
    product = 2 * BATCH * 2 * 3 * 256 * 256 * 128
    assert sorted(p.flops for p in calls) == [2 * product, 5 * product]
    assert all(p.seconds > 0 for p in calls)


@pytest.mark.compiles
@pytest.mark.parametrize("name", SLICES)
def test_the_kernels_of_shared_keys_and_rotary_positions_compile(name):
    def model():
        fields = {"layers": 1, "vocabulary": 512, "width": 512, "heads": 4, "kv_heads": 2}
        built = models.build("llama_110m", hidden=512, attention="flash", **fields)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        built.compile(keras.optimizers.SGD(0.1), loss)
        return built

    slice_ = parse_slice(name)
    tokens = tf.TensorSpec((BATCH, TIME), tf.int32)
    program = lower(model, (tokens, tokens), slice_.replicas, "mixed_bfloat16")
    compiled = compiler.compile_program(program, slice_)
    assert not compiled.error
    found = cost.price(program, compiled, slice_).instructions
    work = [p.flops for p in found if p.kind == "kernel" and "pallas_call" in p.op_name]
    product = 2 * BATCH * 4 * 3 * 256 * 256 * 128  # as above, for 4 heads
    # Queries and keys are rotated, and their gradients are rotated back. One sums outputs.
    assert sorted(work) == [0, 0, 0, 0, 0, 2 * product, 5 * product]


@pytest.mark.exhaustive
@pytest.mark.compiles
def test_a_kernel_larger_than_a_cores_memory_fails_preflight_with_the_alternative():
    tokens = tf.TensorSpec((8, 8192), tf.int32)
    wide = tiny_gpt(attention="flash", width=256, heads=1, context=8192)  # a head of 256
    item = preflight.check(wide, (tokens, tokens), ["v3-8"]).slices[0]
    assert not item.compiles
    assert "VMEM" in item.error and "--config.model.attention=plain" in item.error


@pytest.mark.exhaustive
@pytest.mark.compiles
def test_flash_needs_less_memory_than_the_scores():
    tokens = tf.TensorSpec((8 * 32, 1024), tf.int32)

    def memory(implementation):
        model = tiny_gpt(attention=implementation, vocabulary=128)
        return preflight.check(model, (tokens, tokens), ["v5e-8"]).slices[0].hbm["temporaries"]

    plain, fast = memory("plain"), memory("flash")
    assert fast < plain / 2, (plain, fast)
