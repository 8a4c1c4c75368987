"""KerasHub's attention through the flash kernel, for `tests/kernels/test_dispatch.py`.

    KERAS_BACKEND=jax python -m tests.support.hub.attention

prints a line of JSON for each model: how often the kernel ran (by Pallas's interpreter), and how
far outputs and gradients are from KerasHub's own, relative to the largest number. Positions of
padding are left out.
"""

import functools
import json
from typing import Any

import jax
import keras
import keras_hub
import numpy as np

from tftpu import sharding
from tftpu.kernels import dispatch, functions

TIME = 100
SMALL = {"vocabulary_size": 64, "num_layers": 2, "intermediate_dim": 64}
GROUPED = {"num_query_heads": 4, "num_key_value_heads": 1, "hidden_dim": 256}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "windows and a soft cap": (
        "Gemma3Backbone",
        {
            **{"image_size": 16, "num_query_heads": 4, "num_key_value_heads": 2, "head_dim": 64},
            **{"hidden_dim": 64, "vision_encoder": None, "attention_logit_soft_cap": 5.0},
            **{"use_sliding_window_attention": True, "sliding_window_size": 30},
        },
    ),
    "windows": ("MistralBackbone", {**GROUPED, "sliding_window": 20}),
    "one key head": ("LlamaBackbone", GROUPED),
    "sinks and windows": (
        "GptOssBackbone",
        {
            **{"num_query_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "hidden_dim": 64},
            **{"num_experts": 4, "sliding_window": 20},
        },
    ),
}


def compute(model: keras.Model, x: dict[str, np.ndarray]) -> list[np.ndarray]:
    """Returns the outputs of a model where there is no padding, and the gradients of their sum."""
    seen = x["padding_mask"].astype(bool)

    def run(values: list[Any]) -> Any:
        with keras.StatelessScope(state_mapping=list(zip(model.trainable_variables, values))):
            y = model(x, training=True)
        return (y * seen[..., None]).sum(), y

    values = [v.value for v in model.trainable_variables]
    (_, y), gradients = jax.value_and_grad(run, has_aux=True)(values)
    return [np.asarray(y)[seen], *map(np.asarray, gradients)]


def main() -> None:
    real, calls = functions.flash_attention, []

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return real(*args, **kwargs)

    functions.flash_attention = counted
    functions._call = lambda function, *_: functools.partial(function, interpret=True)
    rng = np.random.default_rng(0)
    lengths = np.array([[TIME], [61]])
    x = {
        "token_ids": rng.integers(1, 64, (2, TIME)).astype("int32"),
        "padding_mask": (np.arange(TIME)[None] < lengths).astype("int32"),
    }
    for name, (cls, fields) in MODELS.items():
        keras.utils.set_random_seed(0)
        model = getattr(keras_hub.models, cls)(**SMALL, **fields)
        plain = compute(model, x)
        calls.clear()
        with sharding.compiling_for("tpu"), dispatch.attending_by_kernel():
            fast = compute(model, x)
        pairs = zip(plain, fast)
        difference = max(float(np.abs(a - b).max() / (np.abs(a).max() + 1e-9)) for a, b in pairs)
        print(json.dumps({"name": name, "calls": len(calls), "difference": difference}))


if __name__ == "__main__":
    main()
