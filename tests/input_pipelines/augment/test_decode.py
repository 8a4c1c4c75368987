"""Decoding, random crops and resizing, against Pillow and the distribution of crops."""

import io
import math
import zlib

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image, ImageOps
from scipy import stats

from tests.support.data import photos
from tftpu.input_pipelines.augment import decode, draws

SIZE = 64


def seeds(count: int, salt: int = 0) -> tf.Tensor:
    return tf.random.stateless_uniform((count, 2), (salt, 2), -(2**31), 2**31 - 1, tf.int32)


def fixed(*window: int):
    return lambda height, width: tuple(map(tf.constant, window))


def by_pillow(image: Image.Image, window: tuple, size: int = SIZE) -> np.ndarray:
    """Crops and resizes, bilinear between four pixels and unfiltered, as `crop_and_resize` does."""
    top, left, height, width = window
    part = image.crop((left, top, left + width, top + height))
    made = part.transform(
        (size, size), Image.Transform.EXTENT, (0, 0, width, height), Image.Resampling.BILINEAR
    )
    return np.asarray(made).astype(int)


def opened(data: bytes, mode: str = "RGB") -> Image.Image:
    return Image.open(io.BytesIO(data)).convert(mode)


@pytest.mark.parametrize("window", [(40, 61, 100, 120), (0, 0, 127, 200), (13, 7, 31, 25)])
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "BMP"])
def test_a_resized_crop_equals_pillows(kind, window):
    # With colours at half the resolution the last column of a crop lacks its neighbour.
    whole = {"subsampling": 0} if kind == "JPEG" else {}
    data = photos.encoded(photos.pixels(150, 200), kind, **whole)
    ours = decode.crop_and_resize(tf.constant(data), fixed(*window), SIZE, 3).numpy().astype(int)
    # Pillow fills the edges if bilinear needs a neighbour outside.
    difference = np.abs(ours - by_pillow(opened(data), window))[2:-2, 2:-2]
    assert difference.max() <= 1
    assert difference.mean() < 0.6  # Pillow truncates instead of rounding


def test_the_fused_decoder_gives_the_pixels_of_the_complete_image():
    image = photos.encoded(photos.pixels(150, 200))
    window = fixed(21, 33, 99, 78)
    fused = decode.crop_and_resize(tf.constant(image), window, SIZE, 3)
    whole = decode.crop_and_resize(decode.decode_image(tf.constant(image), 3), window, SIZE, 3)
    after_the_end = decode.crop_and_resize(tf.constant(image + b"\0\0"), window, SIZE, 3)
    assert (fused.numpy() == whole.numpy()).all()
    assert (fused.numpy() == after_the_end.numpy()).all()


@pytest.mark.medium
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_images_are_turned_upright_as_their_exif_data_say(kind):
    """Complete ones, crops of them, and a JPEG that is decoded completely and then cropped."""
    window = fixed(13, 7, 61, 43)
    crop = tf.function(
        lambda data: decode.crop_and_resize(data, window, SIZE, 3),
        input_signature=[tf.TensorSpec((), tf.string)],
    )
    for orientation in range(1, 9):
        exif = Image.Exif()
        exif[0x0112] = orientation
        data = photos.encoded(
            photos.pixels(80, 100),
            kind,
            exif=exif,
            **({"subsampling": 0} if kind == "JPEG" else {"lossless": True}),
        )
        upright = np.asarray(ImageOps.exif_transpose(opened(data)))
        assert upright.shape == ((80, 100, 3) if orientation < 5 else (100, 80, 3))
        assert (decode.decode_image(tf.constant(data), 3).numpy() == upright).all()
        expected = decode.crop_and_resize(tf.constant(upright), window, SIZE, 3).numpy().astype(int)
        assert np.abs(crop(data) - expected).max() <= 1
        assert np.abs(crop(data + b"\0") - expected).max() <= 1


XMP = b"http://ns.adobe.com/xap/1.0/\0<x:xmpmeta xmlns:x='adobe:ns:meta/'>%s</x:xmpmeta>"
COMMENT = b"\xff\xfe\x00\x04hi"


def segment(content: bytes) -> bytes:
    return b"\xff\xe1" + (len(content) + 2).to_bytes(2, "big") + content


def chunk(name: bytes, content: bytes) -> bytes:
    check = zlib.crc32(name + content).to_bytes(4, "big")
    return len(content).to_bytes(4, "big") + name + content + check


def test_an_orientation_is_found_wherever_pillow_finds_it():
    exif = Image.Exif()
    exif[0x0112] = 6
    image, stated = photos.pixels(40, 50), exif.tobytes()
    jpeg, png = photos.encoded(image), photos.encoded(image, "PNG")
    of_xmp = XMP % b'<rdf:Description tiff:Orientation="6"/>'
    profile = np.random.default_rng(0).bytes(9_000)
    late = png[:-12] + chunk(b"eXIf", stated.removeprefix(b"Exif\0\0")) + png[-12:]
    kinds = {
        "after XMP": jpeg[:2] + segment(XMP % b"") + segment(stated) + jpeg[2:],
        "after a JFIF segment and a comment": jpeg[:20] + COMMENT + segment(stated) + jpeg[20:],
        "after much XMP": jpeg[:2]
        + segment(XMP % (b" " * 65_000)) * 2
        + segment(stated)
        + jpeg[2:],
        "in XMP": jpeg[:20] + segment(of_xmp) + jpeg[20:],
        "after a long profile": photos.encoded(image, "PNG", exif=exif, icc_profile=profile),
        "after the pixels": late,
    }
    turned = {}
    for kind, data in kinds.items():
        upright = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB"))
        assert upright.shape == (50, 40, 3), kind
        ours = decode.decode_image(tf.constant(data), 3).numpy()
        turned[kind] = ours.shape == upright.shape and np.abs(ours - upright.astype(int)).max() < 3
    assert turned == dict.fromkeys(kinds, True)


def test_a_png_with_a_long_profile_is_decoded():
    profile = np.random.default_rng(0).bytes(9_000)
    image = photos.pixels(40, 50)
    data = photos.encoded(image, "PNG", icc_profile=profile)
    assert (decode.decode_image(tf.constant(data), 3).numpy() == np.asarray(opened(data))).all()


@pytest.mark.parametrize(
    "damage", [b"Exif\0\0", b"Exif\0\0MM\0*\0\0\xff\xff", b"Exif\0\0II*\0" * 9]
)
def test_damaged_exif_data_turn_nothing(damage):
    data = photos.encoded(photos.pixels(40, 50), exif=damage)
    ours = decode.decode_image(tf.constant(data), 3).numpy()
    assert (ours == np.asarray(opened(data))).all()


@pytest.mark.parametrize("ratio", [2, 4, 8])
def test_a_crop_much_larger_than_the_result_is_averaged(ratio):
    image = photos.pixels(16 * 40, 16 * 48)
    data = photos.encoded(image, quality=97, subsampling=0)
    side = 32 * ratio
    ours = decode.crop_and_resize(tf.constant(data), fixed(16, 32, side, side), 32, 3).numpy()
    part = np.asarray(opened(data))[16 : 16 + side, 32 : 32 + side].astype(float)
    means = part.reshape(32, ratio, 32, ratio, 3).mean((1, 3))
    assert np.abs(ours - means).mean() < 1.5
    assert np.abs(part[::ratio, ::ratio] - means).mean() > 3  # picking pixels would not give this


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_grey_files_become_colour_images_and_colour_files_grey_ones(kind):
    colour = photos.pixels(80, 90)
    grey_file = photos.encoded(colour[..., :1], kind)
    window = fixed(0, 0, 80, 90)
    ours = decode.crop_and_resize(tf.constant(grey_file), window, SIZE, 3).numpy()
    assert (ours == ours[..., :1]).all()
    theirs = by_pillow(opened(grey_file, "L"), (0, 0, 80, 90))
    assert np.abs(ours[..., 0] - theirs)[2:-2, 2:-2].max() <= 1
    made_grey = decode.crop_and_resize(tf.constant(photos.encoded(colour, kind)), window, SIZE, 1)
    theirs = by_pillow(opened(photos.encoded(colour, kind), "L"), (0, 0, 80, 90))
    # A JPEG stores brightness; Pillow computes it from colours clipped to [0, 255].
    assert np.abs(made_grey.numpy()[..., 0] - theirs)[2:-2, 2:-2].mean() < 1


def test_a_transparent_and_a_16_bit_png_are_read_as_8_bit_colours():
    colour = photos.pixels(70, 60)
    clear = np.concatenate([colour, np.full((70, 60, 1), 200, np.uint8)], -1)
    plain = decode.crop_and_resize(
        tf.constant(photos.encoded(colour, "PNG")), fixed(3, 4, 50, 50), 50, 3
    )
    made = decode.crop_and_resize(
        tf.constant(photos.encoded(clear, "PNG")), fixed(3, 4, 50, 50), 50, 3
    )
    assert (made.numpy() == plain.numpy()).all()
    deep = tf.io.encode_png(tf.cast(colour, tf.uint16) * 257)
    made = decode.crop_and_resize(deep, fixed(3, 4, 50, 50), 50, 3)
    assert (made.numpy() == colour[3:53, 4:54]).all()


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
@pytest.mark.parametrize("left_over", [0.02, 0.5, 0.98])
def test_a_truncated_file_is_an_error_for_any_crop(kind, left_over):
    data = photos.encoded(photos.pixels(150, 200), kind)
    cut = tf.constant(data[: int(len(data) * left_over)])
    with pytest.raises(tf.errors.InvalidArgumentError):
        decode.crop_and_resize(cut, fixed(0, 0, 20, 20), SIZE, 3)


def test_an_image_of_the_target_size_is_unchanged():
    image = photos.pixels(SIZE, SIZE)
    made = decode.crop_and_resize(tf.constant(image), fixed(0, 0, SIZE, SIZE), SIZE, 3)
    assert (made.numpy() == image).all()


@pytest.mark.medium
@pytest.mark.parametrize(
    ("height", "width"), [(375, 500), (500, 375), (256, 256), (30, 900), (900, 30), (1, 1)]
)
def test_crops_follow_the_law_of_the_paper(height, width):
    count = 4000
    drawn = tf.data.Dataset.from_tensor_slices(seeds(count)).map(
        lambda seed: tf.stack(
            decode.draw_random_window(height, width, draws.uniform(seed, decode.NUMBERS, "crop"))
        )
    )
    top, left, rows, columns = np.array(list(drawn.as_numpy_iterator())).T
    assert (top >= 0).all() and (left >= 0).all()
    assert (top + rows <= height).all() and (left + columns <= width).all()
    if min(height, width) == 1:
        return
    if max(height, width) > 20 * min(height, width):  # nothing near the area asked for fits
        longest = min(height, width) * 4 / 3
        assert (np.maximum(rows, columns) <= round(longest)).all()
        return
    # The law: area and aspect drawn evenly, and kept if they fit; by NumPy's own numbers.
    rng = np.random.default_rng(0)
    area = rng.uniform(0.08, 1, 100_000) * height * width
    aspect = np.exp(rng.uniform(math.log(3 / 4), math.log(4 / 3), 100_000))
    high, wide = np.sqrt(area / aspect), np.sqrt(area * aspect)
    kept = (high <= height + 0.5) & (wide <= width + 0.5)
    assert stats.ks_2samp(rows * columns / height / width, (area / height / width)[kept]).pvalue > (
        1e-3
    )
    assert stats.ks_2samp(np.log(columns / rows), np.log(aspect)[kept]).pvalue > 1e-3
    free = height - rows >= 20  # where rounding to pixels does not matter to the test
    assert stats.kstest(((top + 0.5) / (height - rows + 1))[free], "uniform").pvalue > 1e-3
    free = width - columns >= 20
    assert stats.kstest(((left + 0.5) / (width - columns + 1))[free], "uniform").pvalue > 1e-3


@pytest.mark.parametrize(("height", "width"), [(240, 160), (128, 192), (128, 128)])
def test_evaluation_takes_the_centre_of_the_image_with_its_shorter_side_resized(height, width):
    image = photos.pixels(height, width)
    ours = decode.crop_and_resize(
        tf.constant(image), lambda h, w: decode.find_central_window(h, w, 0.875), 56, 3
    )
    # In two steps: the shorter side to 64 pixels, then the 56 in the middle.
    scale = 64 / min(height, width)
    whole = Image.fromarray(image).transform(
        (round(width * scale), round(height * scale)),
        Image.Transform.EXTENT,
        (0, 0, width, height),
        Image.Resampling.BILINEAR,
    )
    top, left = (whole.height - 56) // 2, (whole.width - 56) // 2
    theirs = np.asarray(whole)[top : top + 56, left : left + 56].astype(int)
    assert np.abs(ours.numpy() - theirs).max() <= 1


def test_random_numbers_are_uniform_and_independent():
    numbers = draws.uniform(seeds(20_000), 3, "test").numpy()
    for column in numbers.T:
        assert stats.kstest(column, "uniform").pvalue > 1e-3
    other = draws.uniform(seeds(20_000), 1, "other").numpy()
    neighbours = draws.uniform(seeds(20_000) + 1, 1, "test").numpy()
    together = np.concatenate([numbers, other, neighbours], 1)
    correlation = np.corrcoef(together.T) - np.eye(5)
    assert np.abs(correlation).max() < 4 / math.sqrt(20_000)


def test_random_numbers_of_a_batch_are_those_of_its_examples():
    batch = draws.uniform(seeds(8), 5, "test").numpy()
    alone = [draws.uniform(seed, 5, "test").numpy() for seed in seeds(8)]
    assert (batch == np.stack(alone)).all()


@pytest.mark.parametrize("alpha", [0.2, 0.4, 0.5, 0.8, 1.0, 2.0, 8.0])
def test_beta_numbers_have_the_distribution_of_scipy(alpha):
    numbers = draws.beta(alpha, draws.uniform(seeds(4000, salt=1), 3, "beta")).numpy()
    assert ((numbers >= 0) & (numbers <= 1)).all()
    # Below 2**-24 of the ends float32 holds them, but not the uniform numbers that they come from.
    inner = np.clip(numbers.astype(float), 1e-5, 1 - 1e-5)
    law = stats.beta(alpha, alpha)
    edges = np.quantile(law.rvs(100_000, random_state=0).clip(1e-5, 1 - 1e-5), np.linspace(0, 1, 9))
    counts = np.histogram(inner, edges[1:-1])[0]
    expected = np.diff(law.cdf(edges[1:-1])) * 4000
    assert stats.chisquare(counts, expected * counts.sum() / expected.sum()).pvalue > 1e-3
    assert counts.sum() == pytest.approx(expected.sum(), abs=4 * math.sqrt(4000 * 0.25))


@pytest.mark.parametrize(
    ("data", "why"), [(b"", "is empty"), (b"x", "is not an image that can be read")]
)
def test_a_file_of_no_bytes_or_one_is_named_as_such(data, why):
    with pytest.raises((ValueError, tf.errors.OpError), match=why):
        decode.crop_and_resize(tf.constant(data), decode.find_central_square, 8, 3)
