"""Pictures of evaluated examples: the input, its label and the prediction."""

from typing import Any

import keras
import numpy as np

COUNT = 8
_SIDE = 96  # pixels to which the shorter side of a small image is enlarged
_STRIP = 26  # height of the caption below an image, in pixels


def is_image_batch(x: Any) -> bool:
    """Returns whether features are images of at least 4 x 4: (batch, height, width, 1 or 3)."""
    return (
        not keras.tree.is_nested(x)
        and len(x.shape) == 4
        and x.shape[-1] in (1, 3)
        and min(x.shape[1:3]) >= 4
    )


def draw_captions(x: np.ndarray, y: Any, outputs: Any) -> np.ndarray:
    """Draws images with their labels and predictions in a strip below.

    Args:
        x: (count, height, width, 1 or 3), of any range.
        y: (count,) or (count, 1) classes, or (count, num_classes); other labels are left out.
        outputs: (count, num_classes) logits or probabilities; other outputs are left out.

    Returns:
        uint8, (count, height, width, 3).
    """
    from PIL import Image, ImageDraw

    x = np.asarray(x, np.float32)
    low, high = x.min(), x.max()
    grey = np.uint8(np.clip((x - low) / max(high - low, 1e-12), 0, 1) * 255)
    grey = np.broadcast_to(grey, (*grey.shape[:3], 3))
    factor = max(1, -(-_SIDE // min(grey.shape[1:3])))
    labels, guesses = find_classes(y), find_classes(outputs)
    if np.shape(outputs)[1:] in ((), (1,)):  # one number for each example is not a class
        guesses = None
    pictures = []
    for index, pixels in enumerate(grey):
        image = Image.fromarray(np.ascontiguousarray(pixels))
        image = image.resize(
            (image.width * factor, image.height * factor), Image.Resampling.NEAREST
        )
        canvas = Image.new("RGB", (image.width, image.height + _STRIP), "white")
        canvas.paste(image)
        draw = ImageDraw.Draw(canvas)
        if labels is not None:
            draw.text((2, image.height), f"label {labels[index]}", fill="black")
        if guesses is not None:
            wrong = labels is not None and guesses[index] != labels[index]
            place = (2, image.height + _STRIP // 2)
            draw.text(place, f"predicted {guesses[index]}", fill="red" if wrong else "green")
        pictures.append(np.asarray(canvas))
    return np.stack(pictures)


def find_classes(values: Any) -> np.ndarray | None:
    """Returns each example's class from labels, one-hot labels or outputs; None for others."""
    if keras.tree.is_nested(values) or values is None:
        return None
    values = np.asarray(values)
    if values.ndim == 2 and values.shape[1] > 1:
        return values.argmax(1)
    if values.ndim in (1, 2) and np.issubdtype(values.dtype, np.integer):
        return values.reshape(-1)
    return None
