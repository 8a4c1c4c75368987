"""Models that tftpu was not written for: Keras's, KerasHub's, and some as users write them."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

import tftpu
from tftpu.engines.lowered import ObjectivesOf


class Foreign(NamedTuple):
    """A model, and what it is trained on.

    Attributes:
        build: returns the compiled model.
        x: shapes and dtypes of one example.
        y: those of its target.
        objectives: of a model with several losses.
    """

    build: Callable[[], keras.Model]
    x: Any
    y: Any
    objectives: ObjectivesOf | None = None

    def batch(self, examples: int) -> Any:
        """Returns the spec of a batch."""

        def spec(one: tf.TensorSpec) -> tf.TensorSpec:
            return tf.TensorSpec((examples, *one.shape), one.dtype)

        return keras.tree.map_structure(spec, (self.x, self.y))


def small(name: str) -> Foreign:
    """Returns a model on small inputs."""
    return _MAKERS[name](**_SMALL.get(name, {}))


def full(name: str) -> Foreign:
    """Returns a model of the size in which it is trained."""
    return _MAKERS[name](**_FULL.get(name, {}))


def _image(*shape: int) -> tf.TensorSpec:
    return tf.TensorSpec(shape, tf.float32)


def _ids(*shape: int) -> tf.TensorSpec:
    return tf.TensorSpec(shape, tf.int32)


def _compiled(model: keras.Model, loss: str = "sparse_categorical_crossentropy") -> keras.Model:
    model.compile("adam", loss)
    return model


def application(kind: str, pixels: int = 64) -> Foreign:
    """Returns an image classifier of `keras.applications`."""
    shape = (pixels, pixels, 3)

    def build() -> keras.Model:
        maker: Any = getattr(keras.applications, kind)
        return _compiled(maker(weights=None, input_shape=shape))

    return Foreign(build, _image(*shape), _ids())


def bert(
    size: int = 1, width: int = 32, heads: int = 2, tokens: int = 12, vocabulary: int = 50
) -> Foreign:
    """Returns KerasHub's BERT with a classifier."""
    import keras_hub

    def build() -> Any:
        backbone = keras_hub.models.BertBackbone(
            vocabulary, size, heads, width, 4 * width, max_sequence_length=tokens
        )
        return _compiled(keras_hub.models.BertTextClassifier(backbone, 3, preprocessor=None))

    names = ("token_ids", "segment_ids", "padding_mask")
    return Foreign(build, dict.fromkeys(names, _ids(tokens)), _ids())


def gpt2(
    size: int = 1, width: int = 32, heads: int = 2, tokens: int = 12, vocabulary: int = 50
) -> Foreign:
    """Returns KerasHub's GPT-2, whose head is its embedding."""
    import keras_hub

    def build() -> Any:
        backbone = keras_hub.models.GPT2Backbone(
            vocabulary, size, heads, width, 4 * width, max_sequence_length=tokens
        )
        model: Any = keras_hub.models.GPT2CausalLM(backbone)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("adam", loss)
        return model

    x = dict.fromkeys(("token_ids", "padding_mask"), _ids(tokens))
    return Foreign(build, x, _ids(tokens))


def vit(
    size: int = 1, width: int = 32, heads: int = 2, pixels: int = 32, patch: int = 8
) -> Foreign:
    """Returns KerasHub's vision transformer with a classifier."""
    import keras_hub

    shape = (pixels, pixels, 3)

    def build() -> Any:
        backbone = keras_hub.models.ViTBackbone(shape, patch, size, heads, width, 4 * width)
        return _compiled(keras_hub.models.ViTImageClassifier(backbone, 10, preprocessor=None))

    return Foreign(build, _image(*shape), _ids())


class TimeEmbedding(keras.Layer):
    """Sines and cosines of a time, as in diffusion models."""

    def __init__(self, width: int, **kwargs: Any):
        super().__init__(**kwargs)
        self.rates = np.exp(np.linspace(0.0, -9.2, width // 2)).astype("float32")

    def call(self, times: Any) -> Any:
        angles = ops.expand_dims(ops.cast(times, "float32"), -1) * self.rates
        return ops.concatenate([ops.sin(angles), ops.cos(angles)], axis=-1)

    def compute_output_shape(self, input_shape: Any) -> tuple:
        return (*input_shape, 2 * len(self.rates))


def _residual(x: Any, times: Any, width: int) -> Any:
    y: Any = layers.Conv2D(width, 3, padding="same")(ops.silu(layers.GroupNormalization(8)(x)))
    y = y + layers.Dense(width)(ops.silu(times))[:, None, None]
    y = layers.Conv2D(width, 3, padding="same")(ops.silu(layers.GroupNormalization(8)(y)))
    return y + (x if x.shape[-1] == width else layers.Conv2D(width, 1)(x))


def _attended(x: Any, heads: int) -> Any:
    tokens = layers.Reshape((-1, x.shape[-1]))(layers.GroupNormalization(8)(x))
    found = layers.MultiHeadAttention(heads, x.shape[-1] // heads)(tokens, tokens)
    return x + layers.Reshape(x.shape[1:])(found)


def diffusion(pixels: int = 16, width: int = 16, heads: int = 2) -> Foreign:
    """Returns a diffusion U-Net of three resolutions, with attention at the lowest one."""

    def build() -> keras.Model:
        image, time = keras.Input((pixels, pixels, 3)), keras.Input((), dtype="int32")
        times: Any = layers.Dense(4 * width, "silu")(TimeEmbedding(width)(time))
        times = layers.Dense(4 * width)(times)
        x, kept = layers.Conv2D(width, 3, padding="same")(image), []
        for factor in (1, 2):
            x = _residual(x, times, factor * width)
            kept.append(x)
            x = layers.Conv2D(factor * width, 3, strides=2, padding="same")(x)
        x = _attended(_residual(x, times, 4 * width), heads)
        for factor in (2, 1):
            x = layers.Conv2D(factor * width, 3, padding="same")(layers.UpSampling2D()(x))
            x = _residual(layers.Concatenate()([x, kept.pop()]), times, factor * width)
        return _compiled(keras.Model([image, time], layers.Conv2D(3, 3, padding="same")(x)), "mse")

    return Foreign(build, (_image(pixels, pixels, 3), _ids()), _image(pixels, pixels, 3))


def unet(pixels: int = 16, width: int = 8, depth: int = 2, classes: int = 5) -> Foreign:
    """Returns a U-Net for segmentation, which transposed convolutions bring up again."""

    def twice(x: Any, features: int) -> Any:
        for _ in range(2):
            x = layers.Conv2D(features, 3, padding="same", use_bias=False)(x)
            x = layers.ReLU()(layers.BatchNormalization()(x))
        return x

    def build() -> keras.Model:
        image = keras.Input((pixels, pixels, 3))
        x, kept = image, []
        for level in range(depth):
            x = twice(x, width << level)
            kept.append(x)
            x = layers.MaxPooling2D()(x)
        x = twice(x, width << depth)
        for level in reversed(range(depth)):
            x = layers.Conv2DTranspose(width << level, 3, strides=2, padding="same")(x)
            x = twice(layers.Concatenate()([kept.pop(), x]), width << level)
        x = layers.Conv2D(classes, 1, activation="softmax", dtype="float32")(x)
        return _compiled(keras.Model(image, x))

    return Foreign(build, _image(pixels, pixels, 3), _ids(pixels, pixels))


def atrous(pixels: int = 64, width: int = 8, classes: int = 5) -> Foreign:
    """Returns a model for segmentation as DeepLab: dilated convolutions, enlarged bilinearly."""

    def build() -> keras.Model:
        image = keras.Input((pixels, pixels, 3))
        x: Any = layers.Rescaling(1 / 255)(image)
        for level in range(4):
            x = layers.SeparableConv2D(width << level, 3, strides=2, padding="same")(x)
            x = layers.ReLU(6.0)(layers.BatchNormalization()(x))
        found = [
            layers.Conv2D(4 * width, 3, padding="same", dilation_rate=rate, activation="relu")(x)
            for rate in (1, 2, 4)
        ]
        x = layers.Conv2D(classes, 1)(layers.Concatenate()(found))
        x = layers.UpSampling2D(16, interpolation="bilinear", dtype="float32")(x)
        return _compiled(keras.Model(image, layers.Softmax(dtype="float32")(x)))

    return Foreign(build, _image(pixels, pixels, 3), _ids(pixels, pixels))


def bilstm(tokens: int = 6, width: int = 24, vocabulary: int = 50) -> Foreign:
    """Returns a classifier of texts with two masked bidirectional layers."""

    def build() -> keras.Model:
        return _compiled(
            keras.Sequential(
                [
                    keras.Input((tokens,), dtype="int32"),
                    layers.Embedding(vocabulary, width, mask_zero=True),
                    layers.Bidirectional(layers.LSTM(width, return_sequences=True)),
                    layers.Bidirectional(layers.GRU(width)),
                    layers.Dense(2, "softmax"),
                ]
            )
        )

    return Foreign(build, _ids(tokens), _ids())


def convlstm(frames: int = 5, pixels: int = 16, width: int = 8) -> Foreign:
    """Returns a predictor of the next frame of videos."""

    def build() -> keras.Model:
        return _compiled(
            keras.Sequential(
                [
                    keras.Input((frames, pixels, pixels, 1)),
                    layers.ConvLSTM2D(width, 5, padding="same", return_sequences=True),
                    layers.BatchNormalization(),
                    layers.ConvLSTM2D(width, 3, strides=2, return_sequences=True),
                    layers.Conv3DTranspose(width, 3, strides=(1, 2, 2)),
                    layers.Conv3D(1, 3, activation="sigmoid", padding="same"),
                    layers.GlobalAveragePooling3D(),
                ]
            ),
            "mse",
        )

    return Foreign(build, _image(frames, pixels, pixels, 1), _image(1))


class Gan(keras.Model):
    """A DCGAN: transposed convolutions against strided ones."""

    def __init__(self, width: int, noise: int):
        super().__init__()
        self.generator = keras.Sequential(
            [
                keras.Input((noise,)),
                layers.Dense(4 * 4 * 4 * width),
                layers.Reshape((4, 4, 4 * width)),
                layers.Conv2DTranspose(2 * width, 5, strides=2, padding="same", activation="relu"),
                layers.Conv2DTranspose(width, 5, strides=2, padding="same", activation="relu"),
                layers.Conv2DTranspose(3, 5, strides=2, padding="same", activation="tanh"),
            ],
            name="generator",
        )
        self.critic = keras.Sequential(
            [
                keras.Input((32, 32, 3)),
                layers.Conv2D(width, 5, strides=2, padding="same", activation="leaky_relu"),
                layers.Conv2D(2 * width, 5, strides=2, padding="same", activation="leaky_relu"),
                layers.Flatten(),
                layers.Dense(1),
            ],
            name="critic",
        )

    def call(self, noise: Any) -> Any:
        return self.generator(noise)


def critic_loss(model: Any, batch: Any, training: bool) -> Any:
    """Returns the hinge loss of the critic."""
    noise, real = batch
    fake = model.generator(noise, training=training)
    of_real: Any = ops.relu(1 - model.critic(real)[:, 0])
    return ops.cast(of_real + ops.relu(1 + model.critic(fake)[:, 0]), "float32")


def generator_loss(model: Any, batch: Any, training: bool) -> Any:
    """Returns the critic's view of what the generator makes."""
    found = model.critic(model.generator(batch[0], training=training))
    return ops.cast(-found[:, 0], "float32")


def _objectives(model: Any) -> list[tftpu.Objective]:
    return [
        tftpu.Objective(critic_loss, model.critic, keras.optimizers.Adam(1e-4)),
        tftpu.Objective(generator_loss, model.generator, keras.optimizers.Adam(1e-4)),
    ]


def gan(width: int = 8, noise: int = 16) -> Foreign:
    """Returns a GAN on images of 32 x 32 pixels."""
    return Foreign(
        lambda: Gan(width, noise), _image(noise), _image(32, 32, 3), objectives=_objectives
    )


_MAKERS: dict[str, Callable[..., Foreign]] = {
    "efficientnet": functools.partial(application, "EfficientNetB0"),
    "mobilenet": functools.partial(application, "MobileNetV3Large"),
    "xception": functools.partial(application, "Xception"),
    "densenet": functools.partial(application, "DenseNet121"),
    "bert": bert,
    "gpt2": gpt2,
    "vit": vit,
    "diffusion": diffusion,
    "unet": unet,
    "atrous": atrous,
    "bilstm": bilstm,
    "convlstm": convlstm,
    "gan": gan,
}
_SMALL = {"xception": {"pixels": 75}}
_FULL = {
    "efficientnet": {"pixels": 224},
    "mobilenet": {"pixels": 224},
    "xception": {"pixels": 299},
    "densenet": {"pixels": 224},
    "bert": {"size": 12, "width": 768, "heads": 12, "tokens": 128, "vocabulary": 30522},
    "gpt2": {"size": 12, "width": 768, "heads": 12, "tokens": 512, "vocabulary": 50257},
    "vit": {"size": 12, "width": 768, "heads": 12, "pixels": 224, "patch": 16},
    "diffusion": {"pixels": 64, "width": 128, "heads": 4},
    "unet": {"pixels": 256, "width": 64, "depth": 4, "classes": 21},
    "atrous": {"pixels": 512, "width": 64, "classes": 21},
    "bilstm": {"tokens": 200, "width": 128, "vocabulary": 20000},
    "convlstm": {"frames": 20, "pixels": 64, "width": 64},
    "gan": {"width": 64, "noise": 128},
}
NAMES = tuple(_MAKERS)
