"""A peer for `tpu_cost`: the ResNet-50 v1.5 of Flax's ImageNet example, with SGD momentum.

Flax is not a dependency of tftpu: only the benchmark imports this file, after installing it.
"""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

_CONV = functools.partial(nn.Conv, use_bias=False, dtype=jnp.bfloat16)
_NORM = functools.partial(nn.BatchNorm, momentum=0.9, epsilon=1e-5, dtype=jnp.bfloat16)


class Bottleneck(nn.Module):
    width: int
    stride: int

    @nn.compact
    def __call__(self, x, train: bool):
        norm = functools.partial(_NORM, use_running_average=not train)
        y = nn.relu(norm()(_CONV(self.width, (1, 1))(x)))
        y = nn.relu(norm()(_CONV(self.width, (3, 3), (self.stride, self.stride))(y)))
        y = norm(scale_init=nn.initializers.zeros_init())(_CONV(4 * self.width, (1, 1))(y))
        if x.shape != y.shape:
            x = norm()(_CONV(4 * self.width, (1, 1), (self.stride, self.stride))(x))
        return nn.relu(x + y)


class ResNet50(nn.Module):
    @nn.compact
    def __call__(self, x, train: bool = True):
        x = _CONV(64, (7, 7), (2, 2), padding=[(3, 3), (3, 3)])(x)
        x = nn.relu(_NORM(use_running_average=not train)(x))
        x = nn.max_pool(x, (3, 3), strides=(2, 2), padding="SAME")
        for stage, blocks in enumerate((3, 4, 6, 3)):
            for block in range(blocks):
                stride = 2 if stage > 0 and block == 0 else 1
                x = Bottleneck(64 * 2**stage, stride)(x, train)
        x = jnp.mean(x, axis=(1, 2))
        return nn.Dense(1000, dtype=jnp.bfloat16)(x).astype(jnp.float32)


def init(key: jax.Array) -> dict[str, Any]:
    """Returns weights, batch statistics and momentum."""
    variables = ResNet50().init(key, jnp.zeros((1, 224, 224, 3), jnp.bfloat16))
    momentum = jax.tree.map(jnp.zeros_like, variables["params"])
    return {**variables, "momentum": momentum}


def train_step(state: dict[str, Any], images: jax.Array, labels: jax.Array) -> tuple:
    """Returns the new state and the loss."""

    def loss_fn(params):
        variables = {"params": params, "batch_stats": state["batch_stats"]}
        logits, new = ResNet50().apply(variables, images, mutable=["batch_stats"])
        log_probabilities = jax.nn.log_softmax(logits)
        true = jnp.take_along_axis(log_probabilities, labels[:, None], axis=-1)
        return -jnp.mean(true), new["batch_stats"]

    (loss, statistics), grads = jax.value_and_grad(loss_fn, has_aux=True)(state["params"])
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, state["momentum"], grads)
    params = jax.tree.map(lambda p, m: p - 0.1 * m, state["params"], momentum)
    return {"params": params, "batch_stats": statistics, "momentum": momentum}, loss
