"""MixUp, CutMix, soft labels and space-to-depth: operations on a batch.

An example is mixed with its neighbour, j with j XOR 1, using random numbers from its own seed.
Shuffling gives random neighbours, new ones each epoch. A host with a shard of a batch, of any even
size, computes the same as one host with the whole batch.
"""

from collections.abc import Callable

import tensorflow as tf

from tftpu.input_pipelines.augment import draws
from tftpu.input_pipelines.augment.image_ops import mask_rectangle
from tftpu.input_pipelines.augment.settings import Augment
from tftpu.input_pipelines.tensors import Batch, Tensor


def build_augmentation(
    settings: Augment, classes: int, space_to_depth: bool = False
) -> Callable[[Batch, Tensor], Batch]:
    """Returns the augmentation of a batch, for `tf.data.Dataset.map`.

    Args:
        settings: only `mixup` and `cutmix` are used; with both, each example gets one, at random.
        classes: number of classes, for soft labels.
        space_to_depth: whether images are rearranged by `to_depth`.

    Returns:
        `({"image": (batch, size, size, channels) uint8, "label": (batch,) int32}, seeds (batch, 2)
        int32) -> {"image": uint8, "label": ...}`; labels are (batch, classes), float32, if
        images are mixed.
    """

    def mix_batch(batch: Batch, seeds: Tensor) -> Batch:
        images, labels = batch["image"], batch["label"]
        if settings.mixup or settings.cutmix:
            images, shares = mix(images, seeds, settings.mixup, settings.cutmix)
            labels = compute_soft_labels(labels, shares, classes)
        if space_to_depth:
            images = to_depth(images)
        return {**batch, "image": images, "label": labels}

    return mix_batch


def mix(images: Tensor, seeds: Tensor, mixup: float, cutmix: float) -> tuple[Tensor, Tensor]:
    """Applies MixUp (Zhang et al. 2017, https://arxiv.org/abs/1710.09412), CutMix (Yun et al. 2019,
    https://arxiv.org/abs/1905.04899), or one of them for each example.

    Args:
        images: (batch, height, width, channels), uint8; the batch size is even.
        seeds: (batch, 2), int32.
        mixup, cutmix: alpha of the Beta(alpha, alpha) distribution of an example's share; 0: do
            not use this operation.

    Returns:
        The mixed images, uint8, and each image's own share of the result, (batch,), float32.
    """
    count = images.shape[0]
    if count % 2:
        raise ValueError(f"{count} examples cannot be mixed in pairs: use an even batch size")
    numbers = draws.uniform(seeds, 6, "mix")
    height, width = images.shape[1:3]
    shares: Tensor = draws.beta(mixup, numbers[:, :3]) if mixup else None
    if not cutmix:
        cut = tf.zeros((count,), tf.bool)
        box = tf.zeros((count, 4), tf.int32)
    else:
        box = _draw_boxes(draws.beta(cutmix, numbers[:, :3]), numbers[:, 3:5], height, width)
        area: Tensor = tf.cast(box[:, 2] * box[:, 3], tf.float32)
        left = 1.0 - area / float(height * width)
        cut = numbers[:, 5] < 0.5 if mixup else tf.ones((count,), tf.bool)
        shares = tf.where(cut, left, shares) if mixup else left

    def mix_one(index: Tensor) -> Tensor:
        own, other = images[index], images[tf.bitwise.bitwise_xor(index, 1)]

        def blend_pair() -> Tensor:
            first: Tensor = tf.cast(own, tf.float32)
            second: Tensor = tf.cast(other, tf.float32)
            return tf.cast(second + shares[index] * (first - second) + 0.5, tf.uint8)

        def paste_box() -> Tensor:
            return tf.where(mask_rectangle(own, *tf.unstack(box[index])), other, own)

        return tf.cond(cut[index], paste_box, blend_pair)

    # Mixing one image at a time keeps it in the processor's cache.
    mixed = tf.map_fn(
        mix_one, tf.range(count), fn_output_signature=images.dtype, parallel_iterations=1
    )
    return tf.ensure_shape(mixed, images.shape), shares


def compute_soft_labels(labels: Tensor, shares: Tensor, classes: int) -> Tensor:
    """Returns each example's one-hot label mixed with its neighbour's, by their shares.

    Args:
        labels: (batch,), int32.
        shares: (batch,), float32: the share of each example's own image.
        classes: the number of classes.

    Returns:
        (batch, classes), float32; each row adds up to 1.
    """
    own: Tensor = tf.one_hot(labels, classes)
    neighbours = tf.bitwise.bitwise_xor(tf.range(labels.shape[0]), 1)
    return shares[:, None] * own + (1.0 - shares[:, None]) * tf.gather(own, neighbours)


def to_depth(images: Tensor) -> Tensor:
    """Turns each block of 2x2 pixels into one pixel of four times the channels.

    Pixel (2i + a, 2j + b), channel c goes to (i, j), channel (2a + b) x channels + c. The 7x7
    convolution of stride 2 in a ResNet's stem becomes a 4x4 one of stride 1, which fills more of a
    TPU's lanes (Ying et al. 2018, https://arxiv.org/abs/1811.06992).

    Args:
        images: (batch, height, width, channels), height and width even.
    """
    return tf.nn.space_to_depth(images, 2)


def _draw_boxes(shares: Tensor, places: Tensor, height: int, width: int) -> Tensor:
    """Returns CutMix's rectangles, (batch, 4): top, left, height, width, int32.

    Their sides are sqrt(1 - share) of the image's and their centres uniform; they are clipped to
    the image.
    """
    whole = tf.constant([height, width], tf.float32)
    half = tf.sqrt(1.0 - shares)[:, None] * whole / 2
    centre = places * whole
    start = tf.cast(tf.round(tf.maximum(centre - half, 0.0)), tf.int32)
    end = tf.cast(tf.round(tf.minimum(centre + half, whole)), tf.int32)
    return tf.concat([start, end - start], 1)
