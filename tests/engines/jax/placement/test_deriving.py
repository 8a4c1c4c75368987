"""Rules for `tensor` that are derived from layers: those that Megatron-LM's authors would write."""

import os
import re
import subprocess
import sys
from typing import Any

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
    "MiT": {"": None},  # its blocks have convolutions
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


def test_what_the_axis_does_not_divide_stays_whole():
    mesh = AbstractMesh((1, 1, 1, 4), ("data", "fsdp", "sequence", T))
    small = keras.Sequential([keras.Input((5,)), keras.layers.Dense(7), keras.layers.Dense(8)])
    layout = Layout(mesh, small)
    specs = [tuple(layout.find_weight_sharding(v).spec) for v in small.variables]
    assert specs == [(None, None), (None,), (None, T), (T,)]
    none = keras.Sequential([keras.Input((8, 8, 3)), keras.layers.Conv2D(8, 3)])
    with pytest.raises(UserError, match=r"no layer of the Sequential .* whose number 4 divides"):
        Layout(mesh, none)


GRADIENT = """
import os
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

def loss(kernel, x):
    numbers = ("NHWC", "HWIO", "NHWC")
    return jnp.sum(jax.lax.conv_general_dilated(
        x, kernel, (1, 1), "SAME", dimension_numbers=numbers, feature_group_count=8) ** 2)

mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("data", "tensor"))
x, kernel = np.ones((4, 8, 8, 8), "float32"), np.ones((3, 3, 1, 8), "float32")
whole = jax.jit(jax.grad(loss))(kernel, x)
x, kernel = (
    jax.device_put(value, NamedSharding(mesh, spec))
    for value, spec in ((x, P("data")), (kernel, P()))
)
print(float(jnp.max(jax.jit(jax.grad(loss))(kernel, x) / whole)))
"""


def test_grouped_convolutions_are_refused():
    mesh = AbstractMesh((2, 1, 1, 2), ("data", "fsdp", "sequence", T))
    for layer in keras.layers.DepthwiseConv2D(3), keras.layers.Conv2D(8, 3, groups=4):
        model: Any = keras.Sequential([keras.Input((8, 8, 8)), layer, keras.layers.Dense(8)])
        with pytest.raises(UserError, match=f"tensor:2, and the layer {layer.name!r} convolves"):
            Layout(mesh, model)
        model.sharding_rules = [("dense.*/kernel", (None, T))]
        with pytest.raises(UserError, match="multiply the gradient of its kernel by 2"):
            Layout(mesh, model)
        Layout(AbstractMesh((2, 2, 1, 1), ("data", "fsdp", "sequence", T)), model)


@pytest.mark.slow
def test_xla_multiplies_the_gradient_of_grouped_convolutions():
    """If this fails, XLA is repaired, and they need not be refused."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", GRADIENT], env=environment, stdout=subprocess.PIPE, check=True
    )
    assert float(done.stdout) == pytest.approx(2.0)
