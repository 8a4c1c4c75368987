"""RandAugment's operations against Pillow's, and how they are drawn."""

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image, ImageEnhance, ImageOps
from scipy import ndimage, stats

from tftpu.input_pipelines.augment import randaugment as ra

STRENGTHS = (-1.0, -0.5, 0.3, 0.9, 1.5)


def photo(height: int = 60, width: int = 80, channels: int = 3, seed: int = 0) -> np.ndarray:
    """Returns smooth colours with some noise, not over the whole range of levels."""
    rng = np.random.default_rng(seed)
    smooth = ndimage.gaussian_filter(rng.normal(size=(height, width, channels)), (6, 6, 0))
    smooth = 120 + 45 * smooth / smooth.std() + rng.normal(size=smooth.shape) * 6
    return smooth.clip(9, 240).astype(np.uint8)


def pillow(image: np.ndarray) -> Image.Image:
    return Image.fromarray(image if image.shape[-1] == 3 else image[..., 0])


def enhanced(kind):
    return lambda image, s: kind(image).enhance(max(1 + 0.9 * s, 0))


def moved(image: Image.Image, a, b, c, d, right=0.0, down=0.0) -> Image.Image:
    """Applies Pillow's affine transform about the image's middle; pixel centres are at halves."""
    x, y = image.width / 2, image.height / 2
    matrix = (a, b, x - a * x - b * y + right, c, d, y - c * x - d * y + down)
    fill = (ra.FILL,) * len(image.getbands())
    return image.transform(image.size, Image.Transform.AFFINE, matrix, fillcolor=fill)


PILLOW = {
    "identity": lambda image, s: image,
    "auto_contrast": lambda image, s: ImageOps.autocontrast(image),
    "equalize": lambda image, s: ImageOps.equalize(image),
    "rotate": lambda image, s: image.rotate(30 * s, fillcolor=(ra.FILL,) * len(image.getbands())),
    "solarize": lambda image, s: ImageOps.solarize(image, max(round(256 * (1 - abs(s))), 0)),
    "color": enhanced(ImageEnhance.Color),
    "posterize": lambda image, s: ImageOps.posterize(image, max(8 - round(4 * abs(s)), 1)),
    "contrast": enhanced(ImageEnhance.Contrast),
    "brightness": enhanced(ImageEnhance.Brightness),
    "sharpness": enhanced(ImageEnhance.Sharpness),
    "shear_x": lambda image, s: moved(image, 1, 0.3 * s, 0, 1),
    "shear_y": lambda image, s: moved(image, 1, 0, 0.3 * s, 1),
    "translate_x": lambda image, s: moved(image, 1, 0, 0, 1, right=round(0.45 * s * image.width)),
    "translate_y": lambda image, s: moved(image, 1, 0, 0, 1, down=round(0.45 * s * image.height)),
}
GEOMETRIC = {"rotate", "shear_x", "shear_y"}


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("name", ra.OPERATIONS)
def test_an_operation_equals_pillows(name, channels):
    image = photo(channels=channels)
    for strength in STRENGTHS:
        ours = ra.OPERATIONS[name](tf.constant(image), tf.constant(strength)).numpy()
        theirs = np.asarray(PILLOW[name](pillow(image), strength)).reshape(ours.shape)
        difference = np.abs(ours.astype(int) - theirs)
        if name in GEOMETRIC:  # ties of the nearest pixel, and the sine's last bits
            assert (difference == 0).mean() > 0.995
        else:
            assert difference.max() <= (1 if name == "sharpness" else 0)
        if name != "identity" and channels == 3:
            assert (ours != image).any()


def test_a_rotation_equals_scipys():
    image = photo(61, 61)
    ours = ra.rotate(tf.constant(image), tf.constant(0.7)).numpy()
    theirs = ndimage.rotate(image, 21, reshape=False, order=0, mode="constant", cval=ra.FILL)
    y, x = np.ogrid[-30:31, -30:31]
    inside = y**2 + x**2 < 29**2  # scipy fills pixels that are half a pixel outside
    assert (ours == theirs)[inside].mean() > 0.998


@pytest.mark.parametrize("name", ["auto_contrast", "equalize"])
def test_an_image_of_one_level_is_unchanged(name):
    image = np.full((8, 9, 3), 77, np.uint8)
    assert (ra.OPERATIONS[name](tf.constant(image)).numpy() == image).all()


@pytest.mark.slow
def test_the_operations_are_drawn_uniformly_in_both_directions():
    seeds = tf.random.stateless_uniform((4000, 2), (1, 2), -(2**31), 2**31 - 1, tf.int32)
    mark = photo(12, 12)
    outcomes = {}
    for name, operation in ra.OPERATIONS.items():
        for sign in (-1.0, 1.0):
            made = operation(tf.constant(mark), tf.constant(sign * 0.9)).numpy().tobytes()
            outcomes.setdefault(made, []).append((name, sign))
    drawn = tf.data.Dataset.from_tensor_slices(seeds).map(
        lambda seed: ra.randaugment(tf.constant(mark), seed, 1, 9.0)
    )
    counts = dict.fromkeys(outcomes, 0)
    for image in drawn.as_numpy_iterator():
        counts[image.tobytes()] += 1
    expected = [4000 * len(names) / 2 / len(ra.OPERATIONS) for names in outcomes.values()]
    assert len(outcomes) > 20
    assert stats.chisquare(list(counts.values()), expected).pvalue > 1e-3


def test_layers_follow_one_another_and_zero_magnitude_changes_almost_nothing():
    image = tf.constant(photo())
    one = ra.randaugment(image, tf.constant([3, 4]), 1, 9.0).numpy()
    two = ra.randaugment(image, tf.constant([3, 4]), 2, 9.0).numpy()
    assert (one != two).any()
    still = {"identity", *GEOMETRIC, "translate_x", "translate_y", "color", "contrast"}
    still |= {"brightness", "sharpness", "posterize", "solarize"}
    for name in still:
        assert (ra.OPERATIONS[name](image, tf.constant(0.0)).numpy() == image.numpy()).all()
