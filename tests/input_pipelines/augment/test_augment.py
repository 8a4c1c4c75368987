"""Flip, colours, erasing, MixUp, CutMix: against Pillow, closed forms and the papers."""

import colorsys
import dataclasses

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image, ImageEnhance
from scipy import stats

from tests.support.data import photos
from tftpu.errors import UserError
from tftpu.input_pipelines.augment import colors, draws, image_ops, mix
from tftpu.input_pipelines.sources import Augment

NOTHING = Augment(crop=False, flip=False)
EVERYTHING = Augment(randaugment=2, jitter=0.4, hue=0.1, erasing=0.5, mixup=0.2, cutmix=1.0)


def seeds(count: int, salt: int = 0) -> tf.Tensor:
    return tf.random.stateless_uniform((count, 2), (salt, 3), -(2**31), 2**31 - 1, tf.int32)


def over(seeds: tf.Tensor, function) -> np.ndarray:
    """Returns the results of a function for each seed, in a tf.data pipeline."""
    dataset = tf.data.Dataset.from_tensor_slices(seeds).map(function, tf.data.AUTOTUNE)
    return np.array(list(dataset.as_numpy_iterator()))


def _flipped(image: np.ndarray, seed: tf.Tensor) -> tf.Tensor:
    size = image.shape[0]
    settings = dataclasses.replace(NOTHING, flip=True)
    return image_ops.build_training_augmentation(settings, size, 3)(
        {"image": tf.constant(image)}, seed
    )["image"]


@pytest.mark.slow
def test_half_of_the_images_are_flipped_and_the_others_are_not():
    image = photos.pixels(6, 6)
    made = over(seeds(2000), lambda seed: _flipped(image, seed))
    flipped = (made == image[:, ::-1]).all((1, 2, 3))
    still = (made == image).all((1, 2, 3))
    assert (flipped ^ still).all()
    assert stats.binomtest(int(flipped.sum()), 2000).pvalue > 1e-3


@pytest.mark.parametrize("factor", [0.0, 0.4, 1.0, 1.7])
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (colors.brightness, ImageEnhance.Brightness),
        (colors.contrast, ImageEnhance.Contrast),
        (colors.saturation, ImageEnhance.Color),
        (colors.sharpness, ImageEnhance.Sharpness),
    ],
)
def test_colours_change_as_in_pillow(ours, theirs, factor):
    image = photos.pixels(40, 50)
    made = ours(tf.constant(image), tf.constant(factor)).numpy().astype(int)
    expected = np.asarray(theirs(Image.fromarray(image)).enhance(factor))
    assert np.abs(made - expected).max() <= 1


@pytest.mark.parametrize("turn", [-0.3, 0.0, 0.1, 0.5])
def test_the_hue_turns_as_on_the_circle_of_python(turn):
    image = photos.pixels(12, 10)
    made = colors.hue(tf.constant(image), tf.constant(turn)).numpy().astype(int)
    for pixel, after in zip(image.reshape(-1, 3), made.reshape(-1, 3)):
        hue, saturation, value = colorsys.rgb_to_hsv(*(pixel / 255))
        expected = np.array(colorsys.hsv_to_rgb((hue + turn) % 1, saturation, value)) * 255
        assert np.abs(after - expected).max() <= 1.01


def test_jitter_is_drawn_from_its_ranges_and_applied_in_its_order():
    image = photos.pixels(16, 16)
    for seed in seeds(20):
        made = colors.jitter(tf.constant(image), seed, 0.4, 0.0).numpy().astype(int)
        factors = 0.6 + 0.8 * draws.uniform(seed, 4, "colors").numpy()[:3]
        expected = Image.fromarray(image)
        for kind, factor in zip(
            (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color), factors
        ):
            expected = kind(expected).enhance(factor)
        assert np.abs(made - np.asarray(expected)).max() <= 2
    grey = tf.constant(image[..., :1])
    assert colors.jitter(grey, seeds(1)[0], 0.4, 0.1).shape == (16, 16, 1)


@pytest.mark.slow
def test_a_rectangle_is_erased_as_often_and_as_large_as_the_paper_says():
    image = np.zeros((100, 100, 3), np.uint8)
    made = over(seeds(2000), lambda seed: image_ops.erase(tf.constant(image), seed, 0.25))
    changed = (made != 0).any(-1)  # noise of three channels is almost never 0
    erased = changed.any((1, 2))
    assert stats.binomtest(int(erased.sum()), 2000, 0.25).pvalue > 1e-3
    areas = []
    for mask in changed[erased]:
        rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
        height, width = np.ptp(rows) + 1, np.ptp(columns) + 1
        assert mask[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1].mean() > 0.98
        assert mask.sum() > 0.98 * height * width  # it is a rectangle, full of noise
        assert max(height / width, width / height) < 1 / 0.3 + 0.25
        areas.append(height * width / 1e4)
    # Uniform from 2 to 40 %, given that they fit into the image.
    rng = np.random.default_rng(0)
    area = rng.uniform(0.02, 0.4, 50_000)
    aspect = np.exp(rng.uniform(np.log(0.3), -np.log(0.3), 50_000))
    kept = (np.sqrt(area / aspect) <= 1) & (np.sqrt(area * aspect) <= 1)
    assert stats.ks_2samp(areas, area[kept]).pvalue > 1e-3


def test_erased_pixels_become_uniform_noise():
    noise = draws.draw_pixels(seeds(1)[0], (61, 67, 3), "noise").numpy()
    counts = np.bincount(noise.ravel(), minlength=256)
    assert stats.chisquare(counts).pvalue > 1e-3
    other = draws.draw_pixels(seeds(2)[1], (61, 67, 3), "noise").numpy()
    assert (noise == other).mean() < 0.01


def batch(count: int = 8, size: int = 24) -> np.ndarray:
    return np.stack([photos.pixels(size, size, seed) for seed in range(count)])


NEIGHBOUR = [1, 0, 3, 2, 5, 4, 7, 6]


def test_mixup_is_the_weighted_sum_of_two_neighbours():
    images = batch()
    mixed, shares = mix.mix(tf.constant(images), seeds(8), 0.4, 0.0)
    share = shares.numpy().astype(float)[:, None, None, None]
    expected = share * images + (1 - share) * images[NEIGHBOUR]
    assert np.abs(mixed.numpy() - expected).max() <= 0.51
    assert len(set(shares.numpy())) == 8


@pytest.mark.medium
def test_cutmix_pastes_a_rectangle_of_the_area_that_the_label_loses():
    images = np.stack([np.full((24, 24, 3), 20 * i, np.uint8) for i in range(8)])
    for salt in range(20):
        mixed, shares = mix.mix(tf.constant(images), seeds(8, salt), 0.0, 1.0)
        for i in range(8):
            mask = (mixed.numpy()[i] == 20 * NEIGHBOUR[i]).all(-1)
            assert ((mixed.numpy()[i] == 20 * i).all(-1) == ~mask).all()
            assert mask.mean() == pytest.approx(1 - shares.numpy()[i], abs=1e-6)
            rows, columns = mask.any(1), mask.any(0)
            assert (mask == np.outer(rows, columns)).all()
            assert np.abs(np.diff(rows.astype(int))).sum() <= 2  # in one piece


@pytest.mark.medium
def test_cutmix_draws_its_rectangles_by_the_law_of_the_paper():
    images = tf.zeros((2000, 32, 32, 1), tf.uint8)
    _, shares = tf.function(mix.mix)(images, seeds(2000), 0.0, 1.0)
    # Yun et al., algorithm 1, by NumPy's own numbers.
    rng = np.random.default_rng(0)
    side = 32 * np.sqrt(1 - rng.beta(1, 1, 50_000))[:, None]
    centre = rng.uniform(0, 32, (50_000, 2))
    low, high = np.clip(centre - side / 2, 0, 32).round(), np.clip(centre + side / 2, 0, 32).round()
    assert stats.ks_2samp(shares.numpy(), 1 - np.prod(high - low, 1) / 32**2).pvalue > 1e-3


@pytest.mark.medium
def test_with_both_each_image_draws_one_of_the_two():
    images = np.stack([np.full((16, 16, 1), 255 * (i % 2), np.uint8) for i in range(400)])
    mixed, _ = mix.mix(tf.constant(images), seeds(400), 8.0, 1.0)
    blended = [((image > 0) & (image < 255)).all() for image in mixed.numpy()]
    assert stats.binomtest(sum(blended), 400).pvalue > 1e-3


def test_soft_labels_match_the_shares_of_the_image():
    labels = np.array([3, 1, 2, 2, 0, 4, 1, 3])
    shares = np.linspace(0, 1, 8, dtype=np.float32)
    soft = mix.compute_soft_labels(tf.constant(labels), tf.constant(shares), 5).numpy()
    expected = shares[:, None] * np.eye(5)[labels]
    expected += (1 - shares)[:, None] * np.eye(5)[labels[NEIGHBOUR]]
    np.testing.assert_allclose(soft, expected, atol=1e-7)
    np.testing.assert_allclose(soft.sum(1), 1, atol=1e-6)


@pytest.mark.medium
@pytest.mark.parametrize("hosts", [1, 2, 4, 8])
@pytest.mark.parametrize("settings", [Augment(mixup=0.2), Augment(cutmix=1.0), EVERYTHING])
def test_all_hosts_together_mix_like_one_host(hosts, settings):
    images, labels = batch(16), np.arange(16, dtype=np.int32)
    function = mix.build_augmentation(settings, 16)

    def mixed(part: slice) -> dict:
        examples = {"image": tf.constant(images[part]), "label": tf.constant(labels[part])}
        return function(examples, seeds(16)[part])

    whole, share = mixed(slice(None)), 16 // hosts
    parts = [mixed(slice(share * host, share * (host + 1))) for host in range(hosts)]
    for name in ("image", "label"):
        together = np.concatenate([part[name].numpy() for part in parts])
        assert (together == whole[name].numpy()).all()
    assert (whole["image"].numpy() != images).any()


def test_an_odd_batch_cannot_be_mixed():
    with pytest.raises(ValueError, match="3 examples cannot be mixed in pairs"):
        mix.mix(tf.zeros((3, 4, 4, 1), tf.uint8), seeds(3), 0.2, 0.0)


def test_space_to_depth_is_numpys_reshape():
    images = batch(2, 24)
    made = mix.to_depth(tf.constant(images)).numpy()
    blocks = images.reshape(2, 12, 2, 12, 2, 3).transpose(0, 1, 3, 2, 4, 5)
    assert (made == blocks.reshape(2, 12, 12, 12)).all()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["JPEG", None])
def test_an_example_depends_only_on_its_seed(kind):
    image = photos.pixels(90, 120)
    data = tf.constant(photos.encoded(image, kind) if kind else image)
    function = image_ops.build_training_augmentation(EVERYTHING, 32, 3)

    def once(order, workers):
        made = tf.data.Dataset.from_tensor_slices(tf.gather(seeds(12), order)).map(
            lambda seed: function({"image": data, "label": 1}, seed)["image"], workers
        )
        assert made.element_spec == tf.TensorSpec((32, 32, 3), tf.uint8)
        return np.array(list(made.as_numpy_iterator()))

    forwards, backwards = once(range(12), 1), once(range(11, -1, -1), 4)
    assert (forwards == backwards[::-1]).all()
    assert len({image.tobytes() for image in forwards}) == 12


def test_without_augmentation_training_equals_evaluation():
    example = {"image": tf.constant(photos.encoded(photos.pixels(90, 120))), "label": 1}
    settings = dataclasses.replace(NOTHING, eval_crop=0.8)
    train = image_ops.build_training_augmentation(settings, 40, 3)(example, seeds(1)[0])
    test = image_ops.build_evaluation_crop(settings, 40, 3)(example)
    assert (train["image"].numpy() == test["image"].numpy()).all()
    assert train["label"] == test["label"] == 1


@pytest.mark.parametrize(("crop", "share"), [(False, 1.0), (True, 0.875)])
def test_pictures_are_whole_in_evaluation_unless_training_crops(crop, share):
    example = {"image": tf.constant(photos.encoded(photos.pixels(90, 120)))}
    shown, expected = (
        image_ops.build_evaluation_crop(settings, 40, 3)(example)["image"]
        for settings in (Augment(crop=crop), Augment(crop=crop, eval_crop=share))
    )
    assert (shown.numpy() == expected.numpy()).all()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("min_area", 0.0), ("min_area", 1.5), ("max_aspect", 0.5), ("randaugment", -1)],
        *[("magnitude", 31.0), ("jitter", -0.1), ("hue", 0.6), ("erasing", 1.1)],
        *[("mixup", -0.2), ("cutmix", float("nan")), ("eval_crop", 0.0)],
    ],
)
def test_a_value_out_of_range_fails_with_its_name(field, value):
    with pytest.raises(UserError, match=rf"data.augment.{field} is {value}: it must be between"):
        Augment(**{field: value}).validate()


@pytest.mark.slow
def test_no_operation_makes_tensorflow_print_an_error_about_onednn():
    """TensorFlow prints one for each transposition of integers, although it works."""
    augment = image_ops.build_training_augmentation(
        dataclasses.replace(EVERYTHING, crop=True), 8, 3
    )

    @tf.function
    def read(image: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
        return augment({"image": image}, seed)["image"]

    specs = (tf.TensorSpec((), tf.string), tf.TensorSpec((2,), tf.int32))
    graph = read.get_concrete_function(*specs).graph.as_graph_def()
    nodes = [
        *graph.node,
        *(node for function in graph.library.function for node in function.node_def),
    ]
    assert {"DecodeJpeg", "Bincount"} & {node.op for node in nodes}
    assert not [node for node in nodes if node.op == "Transpose" and node.attr["T"].type != 1]
