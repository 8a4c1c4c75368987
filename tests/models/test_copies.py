"""Models of the zoo that Keras saved and loaded, or cloned, train as the original."""

import collections
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support import warm
from tests.support.models import zoo
from tests.support.models.strategies import relative
from tests.support.steps.stepping import train_step
from tftpu.models.blocks.token_model import FactoredTokenModel
from tftpu.models.layers.pixels import standardize_pixels

PRODUCTS = ("MatMul", "BatchMatMulV2", "Conv2D", "DepthwiseConv2dNative", "Einsum", "Erf", "Rsqrt")
USUAL, RARE = ("gpt", "resnet"), pytest.mark.exhaustive
# The tied head of Llama makes another class of model than the untied one.
CASES = [
    *(pytest.param(family, {}, marks=() if family in USUAL else RARE) for family in zoo.TINY),
    pytest.param("llama", {"tied": True}, marks=RARE),
]


def original(family: str, remat: str, fields: dict) -> keras.Model:
    model = zoo.build(family, remat=remat, **fields)
    for weight in model.weights:  # a branch that starts at zero would pass no gradient
        noise = np.random.default_rng(0).normal(size=weight.shape)
        weight.assign(weight + 0.1 * np.abs(noise))
    # Plain descent: a weight moves by its gradient.
    model.compile(keras.optimizers.SGD(0.5), keras.losses.SparseCategoricalCrossentropy(True))
    return model


def copied(model: keras.Model, path) -> keras.Model:
    """Returns the clone of the model that was saved and loaded."""
    model.save(path)
    loaded = keras.models.load_model(path)
    assert type(loaded) is type(model)
    assert_same_weights(loaded, model)
    clone = keras.models.clone_model(loaded)
    clone.set_weights(loaded.get_weights())
    return clone


def assert_same_weights(actual: keras.Model, expected: keras.Model, bound: float = 0.0) -> None:
    # Keras may name a model's layers anew, but keeps the order.
    assert [v.path for v in actual.weights] == [v.path for v in expected.weights]
    for a, e in zip(actual.weights, expected.weights):
        assert relative(a, e) <= bound, a.path


def step(model: keras.Model, family: str) -> collections.Counter:
    """Takes one step of training; returns the number of operations of each type in it."""
    x, y = zoo.batch(family)
    specs = (tf.TensorSpec(x.shape, x.dtype), tf.TensorSpec(y.shape, y.dtype))
    train = train_step(model, specs, seed=3).train
    function = tf.function(lambda batch: train(batch)).get_concrete_function(specs)
    function((tf.constant(x), tf.constant(y)))
    return collections.Counter(op.type for op in function.graph.get_operations())


@pytest.mark.slow
@pytest.mark.parametrize(("family", "fields"), CASES, ids=str)
def test_a_copy_has_the_outputs_and_class_and_remat_and_step_of_the_original(
    family, fields, tmp_path
):
    x, _ = zoo.batch(family)
    products = {}
    for remat in ("none", "block"):
        model = original(family, remat, fields)
        copy = copied(model, tmp_path / "model.keras")
        assert type(copy) is type(model)
        assert copy.hyperparameters == model.hyperparameters
        np.testing.assert_array_equal(copy(x), model(x))
        if isinstance(model, FactoredTokenModel):
            for a, e in zip(copy.factored_logits(x), model.factored_logits(x)):
                np.testing.assert_array_equal(a, e)
        operations = step(model, family)
        assert step(copy, family) == operations
        assert_same_weights(copy, model, bound=1e-6)
        products[remat] = sum(operations[kind] for kind in PRODUCTS)
    assert products["block"] > 1.1 * products["none"], products


@pytest.mark.slow
def test_the_copy_of_a_tied_model_learns_one_matrix(tmp_path):
    for family, fields in (("bert", {}), ("gpt", {}), ("llama", {"tied": True})):
        copy = copied(original(family, "none", fields), tmp_path / "model.keras")
        matrix = copy.get_layer("tokens_embed").embeddings
        assert copy.get_layer("head").embedding.embeddings is matrix
        assert [v.shape for v in copy.weights].count(matrix.shape) == 1


@pytest.mark.medium
def test_a_copy_takes_optional_features_and_leaves_them_out(tmp_path):
    x, _ = zoo.batch("llama")
    model = original("llama", "block", {})
    copy = copied(model, tmp_path / "model.keras")
    features = {"tokens": x, "segments": np.repeat([[1, 2]], 6, axis=1).repeat(len(x), axis=0)}
    np.testing.assert_array_equal(copy(features), model(features))
    assert relative(copy(x), model(features)) > 1e-4


@pytest.mark.medium
def test_a_copy_of_the_model_behind_uint8_pixels_keeps_the_hyperparameters(tmp_path):
    model = standardize_pixels(original("resnet", "block", {}))
    copy = copied(model, tmp_path / "model.keras")
    assert copy.hyperparameters == zoo.build("resnet", remat="block").hyperparameters
    pixels = np.random.default_rng(0).integers(0, 256, (4, 8, 8, 3), np.uint8)
    np.testing.assert_array_equal(copy(pixels), model(pixels))


def test_a_file_of_unknown_hyperparameters_fails_with_a_clear_error():
    config = zoo.build("vit").get_layer("structure").get_config()
    config["hyperparameters"]["class"] = "os.system"
    with pytest.raises(TypeError, match=r"os\.system, which this version of tftpu does not"):
        type(zoo.build("vit").get_layer("structure")).from_config(config)


@pytest.mark.slow
def test_a_new_process_loads_a_model(tmp_path):
    original("gpt", "block", {}).save(tmp_path / "model.keras")
    code = "import sys, tftpu; print(type(tftpu.models.load_model(sys.argv[1])).__name__)"
    command = [sys.executable, "-c", code, str(tmp_path / "model.keras")]
    done = warm.run(command, check=True, capture_output=True, text=True)
    assert done.stdout.split()[-1] == "FactoredTokenModel"
