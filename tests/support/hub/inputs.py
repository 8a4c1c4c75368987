"""Draws the inputs of a backbone by their names, shapes and dtypes."""

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.support.hub.sizes import PIXELS, TOKENS, VOCABULARY

# The shapes of one example that a backbone leaves open, where they are not `(TOKENS,)`.
_SHAPES: dict[str, dict[str, tuple[int, ...]]] = {
    "Gemma3Backbone": {"images": (1, PIXELS, PIXELS, 3), "vision_indices": (4,)},
    "MoonshineBackbone": {"encoder_input_values": (2048, 1), "encoder_padding_mask": (2048,)},
    "SAM3PromptableConceptBackbone": {"boxes": (1, 5), "box_labels": (1,)},
    "SAMBackbone": {
        "points": (1, 2),
        "labels": (1,),
        "boxes": (1, 2, 2),
        "masks": (1, PIXELS // 2, PIXELS // 2, 1),
    },
    "WhisperBackbone": {"encoder_features": (2 * TOKENS, 8)},
}
_IMAGE_TOKENS = slice(2, 6)  # where a text has the four tokens of its image


def draw_inputs(name: str, tensors: dict[str, Any], examples: int) -> dict[str, np.ndarray]:
    """Returns inputs by name. Texts are of several lengths, with zeros after their ends.

    Args:
        name: of the backbone's class.
        tensors: the inputs by name, with their shapes and dtypes.
        examples: the number of rows.
    """
    rng = np.random.default_rng(0)
    shapes = _SHAPES.get(name, {})
    found = {}
    for key, tensor in tensors.items():
        shape = shapes.get(key, [TOKENS if size is None else size for size in tensor.shape[1:]])
        found[key] = _find_rule(key)(rng, (examples, *shape)).astype(tensor.dtype)
    return found


def _find_rule(name: str) -> Callable[..., np.ndarray]:
    """Returns the function that draws an input: that of the longest name which ends its own."""
    ends = [end for end in _RULES if name.endswith(end)]
    return _RULES[max(ends, key=len)] if ends else _draw_normal


def _draw_normal(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return rng.normal(size=shape)


def _draw_tokens(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return rng.integers(1, VOCABULARY, shape) * _mask_padding(rng, shape)


def _mask_padding(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Returns ones; of three examples, one is full, and two end a sixth and a third earlier."""
    del rng
    ends = shape[1] - shape[1] // 6 * (np.arange(shape[0]) % 3)
    return (np.arange(shape[1]) < ends[:, None]).astype(int)


def _draw_either(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return rng.integers(0, 2, shape)


def _draw_times(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return rng.uniform(size=shape)


def _give_steps(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    del rng
    return np.full(shape, 4)


def _count_positions(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    del rng
    return np.broadcast_to(np.arange(shape[1]), shape)


def _mark_image(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    mask = np.zeros(shape)
    mask[:, _IMAGE_TOKENS] = 1
    return mask


def _place_image(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return np.broadcast_to(np.arange(TOKENS)[_IMAGE_TOKENS], shape)


def _mark_response(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    mask = np.zeros(shape)
    mask[:, shape[1] // 2 :] = 1
    return mask


_RULES: dict[str, Callable[..., np.ndarray]] = {
    "token_ids": _draw_tokens,
    "segment_ids": _draw_either,
    "position_ids": _count_positions,
    "labels": _draw_either,
    "mask": _mask_padding,
    "vision_mask": _mark_image,
    "vision_indices": _place_image,
    "response_mask": _mark_response,
    "timesteps": _draw_times,
    "num_steps": _give_steps,
}
