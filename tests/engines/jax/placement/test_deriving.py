"""Rules for `tensor` that are derived from layers: those that Megatron-LM's authors would write."""

import re

import keras
import pytest
from jax.sharding import AbstractMesh

from tests.support.hub import builders
from tftpu import models
from tftpu.engines.jax.placement.deriving import derive_axes
from tftpu.engines.jax.placement.sharding import Layout
from tftpu.errors import UserError

T = "tensor"
# By the family: patterns of paths, and the sharded dimension; None: whole.
EXPECTED = {
    "Llama3": {
        "token_embedding/embeddings$": 0,
        "token_embedding/reverse_embeddings$": 1,
        "(query|key|value)/kernel$": 1,
        "attention_output/kernel$": 0,
        "(intermediate|gate)_dense/kernel$": 1,
        "feedforward_output_dense/kernel$": 0,
        "scale$": None,
    },
    "Gemma3": {
        "token_embedding/embeddings$": 0,
        "attention/(query|key|value)/kernel$": 0,
        "attention_output/kernel$": 0,
        "ffw_gating(_2)?/kernel$": 1,
        "ffw_linear/kernel$": 0,
        "(query|key|value)_proj/kernel$": 1,  # square, of the image encoder
        "out_proj/kernel$": 0,
    },
    "Bert": {
        "self_attention_layer/(query|key|value)/kernel$": 1,
        "self_attention_layer/(query|key|value)/bias$": 0,
        "attention_output/kernel$": 0,
        "attention_output/bias$": None,
        "intermediate_dense/(kernel)$": 1,
        "intermediate_dense/(bias)$": 0,
        "feedforward_output_dense/kernel$": 0,
        "feedforward_output_dense/bias$": None,
    },
    "T5": {
        "(query|key|value)_projector/kernel$": 1,
        "attention/output_projector/kernel$": 0,
        "layer_./(input|gate)_projector/kernel$": 1,
        "layer_./output_projector/kernel$": 0,
    },
    "Mixtral": {
        "experts/expert_feedforward_(gate|intermediate)_dense": 2,
        "experts/expert_feedforward_output_dense": 1,
    },
    "ViT": {"patch_embedding/kernel$": None, "mha/query/kernel$": 1, "mlp/dense_2/kernel$": 0},
    "MiT": {"conv2d.*/kernel$": None},  # it has more products than convolutions
    "ResNet": {"conv/kernel$": 3, "gamma$": None},
}


@pytest.mark.medium
@pytest.mark.parametrize("family", EXPECTED)
def test_products_alternate_between_their_outputs_and_inputs(family):
    model = builders.build_backbone(f"{family}Backbone")
    derived = derive_axes(model, T)
    for pattern, dimension in EXPECTED[family].items():
        found = [v for v in model.variables if re.search(pattern, v.path)]
        assert found, pattern
        for variable in found:
            rank = len(variable.shape)
            expected = None if dimension is None else (None,) * dimension + (T,)
            axes = derived.get(variable.path)
            assert axes == (expected and expected + (None,) * (rank - len(expected))), variable.path


def test_a_kernel_of_4_bits_is_sharded_as_the_matrix_that_is_stored():
    model = builders.build_backbone("Gemma3Backbone")
    models.enable_lora(model, 2, "*attention/query", base="int4")
    [kernel] = [v for v in model.variables if v.path == "decoder_block_0/attention/query/kernel"]
    assert len(kernel.shape) == 2 and derive_axes(model, T)[kernel.path] == (None, T)


def test_layers_of_the_users_own_are_sharded_by_what_they_are_made_of():
    class Block(keras.Layer):
        def __init__(self):
            super().__init__()
            self.up, self.down = keras.layers.Dense(64), keras.layers.Dense(16)
            self.scale = keras.layers.LayerNormalization()

        def call(self, x):
            return x + self.down(keras.ops.relu(self.up(self.scale(x))))

    model = keras.Sequential([keras.Input((16,)), Block(), Block(), keras.layers.Dense(10)])
    derived = derive_axes(model, T)
    assert len(model.variables) == 14 and len(derived) == 8
    kernels = [derived[v.path] for v in model.variables if v.name == "kernel"]
    assert kernels == [(None, T), (T, None)] * 2 + [(None, T)]


def test_channels_stay_sharded_between_two_products():
    given = keras.Input((8, 8, 16))
    wide = keras.layers.Dense(64, name="up")(given)
    convolved = keras.layers.DepthwiseConv2D(3, padding="same", name="apart")(wide)
    narrow = keras.layers.Dense(16, name="down")(convolved)
    derived = derive_axes(keras.Model(given, narrow), T)
    assert derived == {"up/kernel": (None, T), "up/bias": (T,), "down/kernel": (T, None)}


def test_convolutions_beside_more_products_stay_whole():
    given = keras.Input((8, 16))
    convolved = keras.layers.Conv1D(16, 3, groups=2, padding="same", name="apart")(given)
    for number in range(3):
        convolved = keras.layers.Dense(16, name=f"dense{number}")(convolved)
    derived = derive_axes(keras.Model(given, convolved), T)
    assert derived and not any(path.startswith("apart") for path in derived)


def test_what_the_axis_does_not_divide_stays_whole():
    mesh = AbstractMesh((1, 1, 1, 4), ("data", "fsdp", "sequence", T))
    small = keras.Sequential([keras.Input((5,)), keras.layers.Dense(7), keras.layers.Dense(8)])
    layout = Layout(mesh, small)
    specs = [tuple(layout.find_weight_sharding(v).spec) for v in small.variables]
    assert specs == [(None, None), (None,), (None, T), (T,)]
    none = keras.Sequential([keras.Input((8, 8, 3)), keras.layers.Conv2D(6, 3)])
    with pytest.raises(UserError, match=r"no layer of the Sequential .* whose number 4 divides"):
        Layout(mesh, none)
