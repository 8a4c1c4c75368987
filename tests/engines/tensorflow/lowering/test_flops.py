"""The model FLOPs of a step, where parts are frozen or pass no gradient on."""

import functools
import json

import keras
import pytest
import tensorflow as tf

import tftpu
from tests.support.models import foreign_models
from tests.support.programs import jax_process
from tests.support.steps.closed_form import real_products
from tests.support.steps.lowering import lower
from tests.support.steps.stepping import train_step
from tftpu.engines.origins import Origin, count_passes, find_argument_origins, stopped
from tftpu.engines.tensorflow.lowering import flops

DATA, FIXED, TRAINED = Origin.DATA, Origin.FIXED, Origin.TRAINED
PRODUCT = 2 * 4**3


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [
        (DATA, TRAINED, 3),  # the first layer, by the field's convention
        (TRAINED | DATA, TRAINED, 3),
        (FIXED | DATA, TRAINED, 2),  # a head on a frozen model
        (TRAINED | DATA, FIXED, 2),  # a frozen layer that a gradient goes through
        (DATA, FIXED, 1),
        (DATA, DATA, 1),
        (TRAINED | DATA, Origin.NONE, 0),  # an interpolation
    ],
)
def test_the_passes_of_a_product(left, right, expected):
    assert count_passes(left, right) == count_passes(right, left) == expected


def test_no_gradient_flows_through_what_is_stopped():
    assert [stopped(o) for o in (Origin.NONE, DATA, DATA | TRAINED)] == [
        Origin.NONE,
        DATA,
        DATA | FIXED,
    ]


def test_arguments_follow_a_choice_or_mix():
    assert find_argument_origins([DATA, FIXED], 2) == find_argument_origins(
        [TRAINED, DATA, FIXED], 2
    )
    assert find_argument_origins([DATA, FIXED], 4) == [DATA | FIXED] * 4


@pytest.mark.parametrize(
    ("frozen", "expected"),
    [
        ((), 3 * (6 * 16 + 16 * 8 + 8 * 4)),
        (("a",), 6 * 16 + 2 * 16 * 8 + 3 * 8 * 4),
        (("b",), 3 * 6 * 16 + 2 * 16 * 8 + 3 * 8 * 4),
        (("a", "b"), 6 * 16 + 16 * 8 + 2 * 8 * 4),
    ],
)
def test_frozen_layers_need_no_gradient_of_their_weights(frozen, expected):
    with tftpu.connect(virtual_devices=1).scope():
        names = {"a": 16, "b": 8, "c": 4}
        model = keras.Sequential(
            [keras.Input((6,)), *(keras.layers.Dense(n, name=name) for name, n in names.items())]
        )
        for name in frozen:
            model.get_layer(name).trainable = False
        model.compile("sgd", "mse")
        step = train_step(model, (tf.TensorSpec((16, 6)), tf.TensorSpec((16, 4))))
    assert step.model_flops == 2 * 16 * expected


def of_graph(function, *origins: Origin) -> int:
    specs = [tf.TensorSpec((4, 4))] * len(origins)
    graph = tf.function(function, autograph=False).get_concrete_function(*specs).graph
    return flops.count_step_flops(graph, origins)


def test_the_state_of_a_loop_carries_what_its_iterations_train():
    def looped(x, weights):
        return tf.while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, y @ weights), (0, x))[1]

    assert of_graph(looped, FIXED, TRAINED) == 3 * 3 * PRODUCT
    assert of_graph(looped, FIXED, FIXED) == 3 * PRODUCT
    assert of_graph(lambda x, w: tf.stop_gradient(x @ w) @ w, DATA, TRAINED) == (3 + 2) * PRODUCT


@functools.cache
def on_jax() -> dict[str, dict[str, int]]:
    return json.loads(jax_process.output("programs.jax_flops"))


def of_model(*layers: keras.Layer) -> int:
    with tftpu.connect(virtual_devices=1).scope():
        model = keras.Sequential([keras.Input((8, 8, 4)), *layers])
        model.compile("sgd", "mse")
        spec = (
            tf.TensorSpec((2, *model.input_shape[1:])),
            tf.TensorSpec((2, *model.output_shape[1:])),
        )
        return train_step(model, spec).model_flops


@pytest.mark.parametrize("options", [{"strides": 2, "padding": "same"}, {"dilation_rate": 2}])
def test_images_with_channels_first_are_the_same_work(options):
    def layers(places: str) -> list[keras.Layer]:
        first = keras.layers.Conv2D(6, 3, data_format=places, **options)
        return [first, keras.layers.DepthwiseConv2D(3, data_format=places)]

    swapped = [keras.layers.Permute((3, 1, 2)), *layers("channels_first")]
    assert of_model(*swapped) == of_model(*layers("channels_last")) > 0


def test_one_branch_of_a_choice_counts():
    def chosen(x, small):
        return tf.cond(x[0, 0] > 0, lambda: x @ small, lambda: (x @ small) @ small)

    assert of_graph(chosen, DATA, TRAINED) == 2 * 3 * PRODUCT


@pytest.mark.parametrize(("other", "passes"), [(TRAINED, 3), (FIXED, 1), (DATA | TRAINED, 0)])
def test_batched_products_count_unless_both_are_activations(other, passes):
    """Experts have weights of their own; attention multiplies activations."""

    def by_einsum(x, y):
        return tf.einsum("etd,edh->eth", tf.reshape(x, (4, 2, 2)), tf.reshape(y, (4, 2, 2)))

    def by_matmul(x, y):
        return tf.reshape(x, (4, 2, 2)) @ tf.reshape(y, (4, 2, 2))

    for product in (by_einsum, by_matmul):
        assert of_graph(product, DATA, other) == passes * 2 * 4 * 2**3


def test_noise_is_data():
    def made(_, weights):
        return tf.random.normal((4, 4)) @ weights

    assert of_graph(made, DATA, TRAINED) == 3 * PRODUCT


@pytest.mark.slow
def test_jax_counts_functions_the_same():
    # 16 outputs of 3 taps with a stride of 2 along an axis, on 8 numbers.
    products = real_products(16, 8, kernel=3, stride=2, dilation=1, same=True) ** 2
    assert on_jax()["functions"] == {
        "trained loop": 3 * 3 * PRODUCT,
        "fixed loop": 3 * PRODUCT,
        "sharded": 3 * PRODUCT,
        "stopped": 5 * PRODUCT,
        "constant": 3 * PRODUCT,
        "recomputed": PRODUCT,
        "fixed array": 3 * PRODUCT,
        "noise": 3 * PRODUCT,
        "experts": 3 * 2 * 4 * 2**3,
        "attention": 0,
        "unused": 3 * PRODUCT,
        "choice": 2 * 3 * PRODUCT,
        "transposed convolution": 2 * 2 * products * 3 * 4,
    }


@pytest.mark.slow
def test_jax_counts_the_models_of_others_the_same():
    found = on_jax()["foreign"]
    for name, count in found.items():
        model = foreign_models.small(name)
        step = lower(model.build, model.batch(2), 1, "mixed_bfloat16", objectives=model.objectives)
        assert count == pytest.approx(step.model_flops, rel=1e-3), name
    assert "gan" in found
