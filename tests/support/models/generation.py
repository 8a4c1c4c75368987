"""Continuations by small language models, with and without a cache.

    KERAS_BACKEND=jax python -m tests.support.models.generation

prints those of both families as JSON, for `tests/inference/test_generate.py`: GPT's on one device,
Llama's on two that share each weight.
"""

import contextlib
import json
from typing import Any

import keras
import numpy as np

import tftpu
from tftpu import models
from tftpu.inference.generate import generate
from tftpu.inference.sampling import Sampling
from tftpu.models.sizes import GPT, Llama

PROMPTS = [[1, 2, 3], [5] * 11, [9, 8], list(range(70))]
LENGTH = 20
SAMPLING = Sampling(0.9, top_k=20, top_p=0.9)
_SIZES = {"vocabulary": 97, "context": 128, "layers": 3, "width": 48, "heads": 4}


def language_model(family: str, **fields: Any) -> Any:
    """Returns a model of random weights, large enough that no two tokens are equally likely."""
    if family == "gpt":
        model: Any = models.build(GPT("small", **{**_SIZES, **fields}))
    else:
        model = models.build(Llama("small", **{**_SIZES, "kv_heads": 2, "hidden": 96, **fields}))
    rng = np.random.default_rng(0)
    for variable in model.trainable_variables:
        value = keras.ops.convert_to_numpy(variable)
        base = np.ones if "norm" in variable.path and "scale" in variable.path else np.zeros
        variable.assign(base(value.shape) + rng.normal(0, 0.2, value.shape))
    return model


def recomputed(model: Any, prompts: list[list[int]], length: int = LENGTH) -> list[list[int]]:
    """Returns the most likely continuations, each token by a pass over all before it."""
    rows = np.zeros((len(prompts), model.hyperparameters.context), np.int32)
    for row, prompt in zip(rows, prompts):
        row[: len(prompt)] = prompt
    ends = np.array([len(prompt) for prompt in prompts])
    for _ in range(length):
        logits = model.predict_on_batch(rows)  # what fills a row has no influence before it
        rows[range(len(rows)), ends] = logits[range(len(rows)), ends - 1].argmax(-1)
        ends += 1
    return [row[end - length : end].tolist() for row, end in zip(rows, ends)]


def main() -> None:
    """Prints, for each family, the likeliest continuations and drawn ones."""
    found = {}
    cut = tftpu.connect(engine="jax", mesh="fsdp:2", virtual_devices=2)
    for family, scope in ("gpt", contextlib.nullcontext()), ("llama", cut.scope()):
        with scope:
            model = language_model(family, scan="block")
        likeliest = generate(model, PROMPTS, length=LENGTH, sampling=Sampling(0))
        found[family] = {
            "likeliest": likeliest,
            "recomputed": recomputed(model, PROMPTS),
            "drawn": generate(model, PROMPTS, length=LENGTH, sampling=SAMPLING, seed=3),
        }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
