"""Synthetic photographs: smooth shapes and noise like a camera's, encoded as by a camera."""

import io

import numpy as np
from PIL import Image


def pixels(height: int, width: int, seed: int = 0) -> np.ndarray:
    """Returns colours with the 1/f spectrum of natural images, (height, width, 3), uint8."""
    rng = np.random.default_rng(seed)
    frequency = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width))
    frequency[0, 0] = 1 / np.hypot(height, width)
    spectrum = np.fft.rfft2(rng.normal(size=(3, height, width))) / frequency**1.2
    light, warm, green = np.fft.irfft2(spectrum, s=(height, width))
    light, warm, green = (part / part.std() for part in (light, warm, green))
    colours = [light + 0.3 * warm, light - 0.15 * warm + 0.1 * green, light - 0.35 * warm]
    return np.clip(118 + 52 * np.stack(colours, -1), 0, 255).astype(np.uint8)


def encoded(image: np.ndarray, kind: str = "JPEG", **options) -> bytes:
    """Encodes an image as a file; (height, width, 1) becomes grey."""
    file = io.BytesIO()
    image = image[..., 0] if image.shape[-1] == 1 else image
    options = {"quality": 93, **options} if kind == "JPEG" else options
    Image.fromarray(image).save(file, kind, **options)
    return file.getvalue()
