"""The model FLOPs of models that nobody wrote for tftpu, and those of their layers on paper."""

from typing import Any

import keras
import pytest
import tensorflow as tf

import tftpu
from tests.support.models import foreign_models
from tests.support.steps.closed_form import forward_flops
from tests.support.steps.lowering import lower
from tftpu.config import TrainConfig
from tftpu.engines.tensorflow.state import ModelState
from tftpu.engines.tensorflow.step.train_step import TrainStep
from tftpu.errors import UserError
from tftpu.preflight.compiling import compiler
from tftpu.tpu.slices import parse_slice

EXAMPLES = 2


def gan(model: Any, batch: Any) -> int:
    """Returns the FLOPs of a step of both objectives, layer by layer.

    The critic's: the generator forward, the critic forward and backward on real and on made images,
    whose gradient it does not need. The generator's: forward and backward, through the critic to
    its input.
    """
    noise, real = batch
    of_generator = forward_flops(lambda: model.generator(noise))
    of_critic = forward_flops(lambda: model.critic(real))
    first = forward_flops(lambda: model.critic.layers[0](real))
    return (of_generator + 3 * of_critic + 3 * of_critic - first) + (
        3 * of_generator + 2 * of_critic
    )


USUAL = ("bilstm", "gan")  # the others have hundreds of layers


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in USUAL else pytest.mark.exhaustive)
        for name in foreign_models.NAMES
    ],
)
def test_the_model_flops_are_those_of_the_layers_on_paper(name):
    model = foreign_models.small(name)
    spec = model.batch(EXAMPLES)
    with tftpu.connect(virtual_devices=1).scope():
        built = model.build()
        objectives = model.objectives(built) if model.objectives else ()
        batch: Any = keras.tree.map_structure(lambda s: tf.ones(s.shape, s.dtype), spec)

        expected = gan(built, batch) if objectives else 3 * forward_flops(lambda: built(batch[0]))
        state = ModelState(built, spec, TrainConfig(), objectives)
        trained = TrainStep(state, spec).model_flops
    step = lower(model.build, spec, 1, "mixed_bfloat16", objectives=model.objectives)
    assert expected
    assert step.model_flops == pytest.approx(expected, rel=0.02)
    assert trained == pytest.approx(expected, rel=0.02)


def resized(dtype: str | None) -> keras.Model:
    layers = [
        keras.Input((8, 8, 3)),
        keras.layers.Conv2D(5, 3, activation="relu", name="features"),
        keras.layers.UpSampling2D(2, interpolation="bilinear", dtype=dtype),
    ]
    model = keras.Sequential(layers)
    model.compile("sgd", "mse")
    return model


@pytest.mark.medium
def test_a_step_that_xla_cannot_compile_is_explained():
    # TensorFlow's gradient of a bilinear resizing is float32, where its input is bfloat16.
    spec = tf.TensorSpec((8, 8, 8, 3)), tf.TensorSpec((8, 12, 12, 5))
    step = lower(lambda: resized(None), spec, 1, "mixed_bfloat16")
    with pytest.raises(UserError, match=r"ReluGrad of the layer 'features' .* dtype='float32'"):
        compiler.compile_program(step, parse_slice("v5e-1"))


@pytest.mark.slow
@pytest.mark.compiles
def test_a_bilinear_resizing_in_float32_compiles():
    spec = tf.TensorSpec((8, 8, 8, 3)), tf.TensorSpec((8, 12, 12, 5))
    step = lower(lambda: resized("float32"), spec, 1, "mixed_bfloat16")
    assert not compiler.compile_program(step, parse_slice("v5e-1")).error
    assert step.model_flops == 3 * 2 * 8 * 6**2 * 9 * 3 * 5  # of the convolution alone


@pytest.mark.medium
def test_a_normalization_of_groups_is_no_grouped_convolution():
    def build() -> keras.Model:
        grouped = keras.layers.Conv2D(8, 3, groups=2, name="grouped")
        layers = [keras.Input((8, 8, 4)), grouped, keras.layers.GroupNormalization(2)]
        model = keras.Sequential(layers)
        model.compile("sgd", "mse")
        return model

    spec = tf.TensorSpec((8, 8, 8, 4)), tf.TensorSpec((8, 6, 6, 8))
    step = lower(build, spec, 1, "float32")
    assert step.grouped == ["grouped"]
    assert step.model_flops == 3 * 2 * 8 * 6**2 * 9 * 2 * 8
