"""Train steps that others have published the time of, rebuilt with this zoo and with Keras."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras import layers, ops

from tests.benchmarks.calibration import flux, mixture
from tftpu import models
from tftpu.config import ClusterConfig, OptimizerConfig, TrainConfig
from tftpu.engines import selection
from tftpu.engines.lowered import LoweredStep
from tftpu.models.families.bert import TiedHeadWithBias
from tftpu.models.layers.convolution import CHANNELS_LAST, Conv2D, DepthwiseConv2D
from tftpu.models.layers.gelu import gelu
from tftpu.models.layers.normalization import GhostBatchNormalization
from tftpu.models.layers.stochastic_depth import StochasticDepth
from tftpu.optim import optimizers
from tftpu.optim.losses import SmoothedCrossentropy
from tftpu.tpu.compiler_options import ON_SPARSE_CORES
from tftpu.tpu.slices import Slice


@dataclasses.dataclass(frozen=True)
class Workload:
    """A train step in bfloat16.

    Attributes:
        model_fn: returns a newly built and compiled model.
        batch: specs of one share of the batch, (inputs, labels).
        microbatches: into which a step divides that share.
        cluster: the engine, and its mesh.
        clipnorm: bound of the gradients' global norm; None: they are not clipped.
        remat: what the backward pass recomputes of a model's equal blocks, which run as a loop;
            None: nothing, or the model says so itself.
    """

    model_fn: Callable[[], keras.Model]
    batch: Any
    microbatches: int = 1
    cluster: ClusterConfig = dataclasses.field(
        default_factory=lambda: ClusterConfig(engine="tensorflow")
    )
    clipnorm: float | None = None
    remat: str | None = None

    def lower(self, target: Slice) -> LoweredStep:
        """Lowers the step for a slice."""
        options = TrainConfig(
            gradient_accumulation_steps=self.microbatches, global_clipnorm=self.clipnorm
        )
        if self.remat:
            options = dataclasses.replace(options, remat=self.remat, scan="block")
        lowering = selection.choose_lowering(self.cluster)
        return lowering.build(
            self.model_fn, self.batch, target.replicas, "mixed_bfloat16", options
        ).lower()

    def choose_options(self, target: Slice) -> dict[str, str]:
        """Returns the compiler's options that the trainer chooses, without those for SparseCores.

        Prices were fitted to programs whose exchange is on the TensorCores of v5p and v6e.
        """
        chosen = selection.choose_lowering(self.cluster).choose_compiler_options(target)
        return {name: value for name, value in chosen.items() if name not in ON_SPARSE_CORES}


def build_resnet50(optimizer: str, images: int = 128) -> Workload:
    """Returns ResNet-50 v1.5 (He et al. 2015, arXiv:1512.03385) on images of 224 pixels.

    Groups of 32 images, instead of all 128, make the norms read their input as the published
    programs do; `models.layers.pointwise` has a faster way for whole batches.

    Args:
        optimizer: "sgd" or "lars".
        images: per device.
    """

    def build_model() -> keras.Model:
        model = models.build("resnet50", norm_batch=32)
        chosen = OptimizerConfig(optimizer, weight_decay=1e-4)
        model.compile(
            optimizer=optimizers.build(chosen, 128, 1000),
            loss=_build_crossentropy(),
            metrics=[keras.metrics.SparseCategoricalAccuracy("accuracy")],
        )
        return model

    return Workload(build_model, (_build_image_spec(images, 224), _build_id_spec(images)))


def build_bert_large() -> Workload:
    """Returns BERT-large's pretraining (Devlin et al. 2018, arXiv:1810.04805) by LAMB.

    14 sequences of 512 tokens, of which 76 positions are predicted, and whether the second sentence
    follows the first.
    """
    examples, time, predicted = 14, 512, 76

    def build_model() -> keras.Model:
        encoder: Any = models.build("bert_large", attention="plain")
        sequence = encoder.get_layer("block24_norm2").output  # (batch, time, width)
        positions: Any = keras.Input((predicted,), dtype="int32", name="predicted_positions")
        chosen = ops.take_along_axis(sequence, positions[..., None], axis=1)
        x = layers.Dense(1024, activation=gelu, name="head_transform")(chosen)
        x = layers.LayerNormalization(name="head_norm")(x)
        embed = encoder.get_layer("tokens_embed")
        words = TiedHeadWithBias(embed, dtype="float32", name="words")(x)
        pooled = layers.Dense(1024, activation="tanh", name="pool")(sequence[:, 0])
        follows = layers.Dense(2, dtype="float32", name="follows")(pooled)
        model = keras.Model({**encoder.input, positions.name: positions}, [words, follows])
        lamb = optimizers.build(OptimizerConfig("lamb", weight_decay=0.01), examples, 1000)
        model.compile(lamb, [_build_crossentropy(), _build_crossentropy()])
        return model

    tokens = {
        name: _build_id_spec(examples, time)
        for name in ("tokens", "segments", "positions", "types")
    }
    inputs = {**tokens, "predicted_positions": _build_id_spec(examples, predicted)}
    return Workload(
        build_model, (inputs, [_build_id_spec(examples, predicted), _build_id_spec(examples)])
    )


def build_chat_164m() -> Workload:
    """Returns a decoder of 163.6 M parameters on 16 microbatches of 4 sequences of 2,048 tokens."""

    def build_model() -> keras.Model:
        model = models.build(
            models.config(
                "llama_110m",
                vocabulary=32768,
                layers=8,
                width=1024,
                heads=4,
                kv_heads=1,
                hidden=3072,
                attention="flash",
            )
        )
        model.compile(keras.optimizers.AdamW(1e-3, weight_decay=0.1), _build_crossentropy())
        return model

    return Workload(
        build_model, (_build_id_spec(64, 2048), _build_id_spec(64, 2048)), microbatches=16
    )


def build_efficientnet_b4(fused_stages: int) -> Workload:
    """Returns EfficientNet-B4 (Tan & Le 2019, arXiv:1905.11946) on 128 images of 380 pixels.

    Args:
        fused_stages: the first stages, in which one convolution takes the place of an expansion
            and a depthwise convolution, as in Tan & Le 2021 (arXiv:2104.00298), Table 3.
    """

    def build_model() -> keras.Model:
        model = _build_efficientnet_b4_model(fused_stages)
        # The papers' RMSProp has momentum, too.
        model.compile(keras.optimizers.RMSprop(1e-3, momentum=0.9), _build_crossentropy())
        return model

    return Workload(build_model, (_build_image_spec(128, 380), _build_id_spec(128)))


def build_flux(images: int, remat: str) -> Workload:
    """Returns FLUX.1's training on latents of images of 1,024 pixels, on the JAX engine.

    Args:
        images: of a share of the batch.
        remat: what the backward pass recomputes, as `TrainConfig` takes it.
    """

    def build_model() -> keras.Model:
        model = flux.build_flux()
        model.compile(keras.optimizers.AdamW(1e-5), "mse")
        return model

    inputs = [
        tf.TensorSpec((images, *shape), tf.bfloat16)
        for shape in (
            (flux.SIDE**2, flux.IMAGE_CHANNELS),
            (flux.TEXT, flux.TEXT_WIDTH),
            (flux.POOLED_WIDTH,),
            (flux.FREQUENCIES,),
            (flux.FREQUENCIES,),
        )
    ]
    mesh = ClusterConfig(engine="jax", mesh="fsdp:-1")
    return Workload(build_model, (inputs, inputs[0]), cluster=mesh, clipnorm=1.0, remat=remat)


def build_llama(
    examples: int, tokens: int, remat: str, mesh: str = "fsdp:-1", **fields: Any
) -> Workload:
    """Returns a Llama on a mesh of all devices of a slice, on the JAX engine.

    Args:
        examples: of a share of the batch.
        tokens: of an example.
        remat: what the backward pass recomputes, as `models.config` takes it.
        mesh: as for `tftpu.connect`.
        fields: other fields of the model.
    """

    def build_model() -> keras.Model:
        model = models.build("llama_8b", attention="flash", remat=remat, **fields)
        model.compile(keras.optimizers.AdamW(1e-4, weight_decay=0.1), SmoothedCrossentropy())
        return model

    batch = _build_id_spec(examples, tokens), _build_id_spec(examples, tokens)
    return Workload(
        build_model, batch, cluster=ClusterConfig(engine="jax", mesh=mesh), clipnorm=1.0
    )


def build_mixtral(examples: int, tokens: int, remat: str, **sizes: int) -> Workload:
    """Returns a decoder with a mixture of experts, on the JAX engine.

    Args:
        examples: of a share of the batch.
        tokens: of an example.
        remat: what the backward pass recomputes, as `TrainConfig` takes it.
        sizes: of the model.
    """

    def build_model() -> keras.Model:
        model = mixture.build_mixtral(tokens, **sizes)
        model.compile(keras.optimizers.AdamW(1e-4, weight_decay=0.1), _build_crossentropy())
        return model

    batch = _build_id_spec(examples, tokens), _build_id_spec(examples, tokens)
    mesh = ClusterConfig(engine="jax", mesh="fsdp:-1")
    return Workload(build_model, batch, cluster=mesh, clipnorm=1.0, remat=remat)


def build_resnet_rs(blocks: Sequence[int], pixels: int) -> Workload:
    """Returns ResNet-RS (Bello et al. 2021, arXiv:2103.07579) on 128 images.

    Args:
        blocks: in each of the four stages.
        pixels: of an image's side.
    """

    def build_model() -> keras.Model:
        model = _build_resnet_rs_model(blocks, pixels)
        chosen = OptimizerConfig("sgd", weight_decay=4e-5)
        model.compile(optimizers.build(chosen, 128, 1000), _build_crossentropy())
        return model

    return Workload(build_model, (_build_image_spec(128, pixels), _build_id_spec(128)))


# Width, blocks, kernel, stride and expansion of each stage.
_B4 = (
    (24, 2, 3, 1, 1),
    (32, 4, 3, 2, 6),
    (56, 4, 5, 2, 6),
    (112, 6, 3, 2, 6),
    (160, 6, 5, 1, 6),
    (272, 8, 5, 2, 6),
    (448, 2, 3, 1, 6),
)


def _build_efficientnet_b4_model(fused_stages: int) -> keras.Model:
    images = keras.Input((380, 380, 3), name="image")
    x = _apply_norm(_apply_conv(images, 48, 3, 2, "stem"), "stem")
    for stage, (width, blocks, kernel, stride, expand) in enumerate(_B4):
        for block in range(blocks):
            name = f"stage{stage + 1}_block{block + 1}"
            strides = 1 if block else stride
            y = _apply_mobile_block(x, width, kernel, strides, expand, stage < fused_stages, name)
            if block:
                y = StochasticDepth(0.2, name=f"{name}_drop")(y)
                y = layers.Add(name=f"{name}_add")([x, y])
            x = y
    x = _apply_norm(_apply_conv(x, 1792, 1, 1, "top"), "top")
    x = layers.GlobalAveragePooling2D(CHANNELS_LAST, name="pool")(x)
    x = layers.Dropout(0.4, name="dropout")(x)
    return keras.Model(images, layers.Dense(1000, dtype="float32", name="head")(x))


def _build_resnet_rs_model(blocks: Sequence[int], pixels: int) -> keras.Model:
    """Builds ResNet-D (arXiv:1812.01187) with squeeze-and-excitation, and a stem without a pool."""
    images = keras.Input((pixels, pixels, 3), name="image")
    x = images
    for number, (width, stride) in enumerate([(32, 2), (32, 1), (64, 1), (64, 2)]):
        x = _apply_normed_conv(x, width, 3, stride, f"stem{number}", "relu")
    for stage, count in enumerate(blocks):
        for block in range(count):
            name = f"stage{stage + 1}_block{block + 1}"
            strides = 2 if stage and not block else 1
            x = _apply_resnet_rs_block(x, 64 * 2**stage, strides, not block, name)
    x = layers.GlobalAveragePooling2D(CHANNELS_LAST, name="pool")(x)
    x = layers.Dropout(0.25, name="dropout")(x)
    return keras.Model(images, layers.Dense(1000, dtype="float32", name="head")(x))


def _apply_resnet_rs_block(x: Any, width: int, stride: int, widens: bool, name: str) -> Any:
    shortcut = x
    if stride > 1:
        shortcut = layers.AveragePooling2D(2, data_format=CHANNELS_LAST, name=f"{name}_pool")(
            shortcut
        )
    if widens:
        shortcut = _apply_normed_conv(shortcut, 4 * width, 1, 1, f"{name}_shortcut")
    x = _apply_normed_conv(x, width, 1, 1, f"{name}_first", "relu")
    x = _apply_normed_conv(x, width, 3, stride, f"{name}_second", "relu")
    x = _apply_normed_conv(x, 4 * width, 1, 1, f"{name}_third")
    y = ops.mean(x, axis=(1, 2), keepdims=True)
    y = Conv2D(width, 1, activation="relu", name=f"{name}_squeeze")(y)
    y = Conv2D(4 * width, 1, activation="sigmoid", name=f"{name}_excite")(y)
    x = layers.Multiply(name=f"{name}_scale")([x, y])
    x = layers.Add(name=f"{name}_add")([x, shortcut])
    return layers.Activation("relu", name=f"{name}_relu")(x)


def _apply_normed_conv(
    x: Any, filters: int, kernel: int, stride: int, name: str, activation: str | None = None
) -> Any:
    x = GhostBatchNormalization(32, name=f"{name}_norm")(
        _apply_conv(x, filters, kernel, stride, name)
    )
    return layers.Activation(activation, name=f"{name}_{activation}")(x) if activation else x


def _apply_mobile_block(
    x: Any, width: int, kernel: int, stride: int, expand: int, fused: bool, name: str
) -> Any:
    """Applies an MBConv block, or a fused one.

    The paper's counts of parameters and FLOPs are nearest to fused blocks without squeeze, and with
    kernels of 3 x 3 up to a width of 56.
    """
    channels = x.shape[-1]
    if fused:
        kernel = 3 if width <= 56 else kernel
        x = _apply_norm(
            _apply_conv(x, expand * channels, kernel, stride, f"{name}_expand"), f"{name}_expand"
        )
    else:
        if expand > 1:
            x = _apply_norm(
                _apply_conv(x, expand * channels, 1, 1, f"{name}_expand"), f"{name}_expand"
            )
        x = DepthwiseConv2D(
            kernel, strides=stride, padding="same", use_bias=False, name=f"{name}_depthwise"
        )(x)
        x = _apply_norm(x, f"{name}_depthwise")
        y = ops.mean(x, axis=(1, 2), keepdims=True)
        squeezed = max(1, channels // 4)
        y = Conv2D(squeezed, 1, activation="silu", name=f"{name}_squeeze")(y)
        y = Conv2D(x.shape[-1], 1, activation="sigmoid", name=f"{name}_excite")(y)
        x = layers.Multiply(name=f"{name}_scale")([x, y])
    x = _apply_conv(x, width, 1, 1, f"{name}_project")
    return GhostBatchNormalization(32, epsilon=1e-3, name=f"{name}_project_norm")(x)


def _apply_conv(x: Any, filters: int, kernel: int, stride: int, name: str) -> Any:
    layer = Conv2D(
        filters, kernel, strides=stride, padding="same", use_bias=False, name=f"{name}_conv"
    )
    return layer(x)


def _apply_norm(x: Any, name: str) -> Any:
    x = GhostBatchNormalization(32, epsilon=1e-3, name=f"{name}_norm")(x)
    return layers.Activation("silu", name=f"{name}_silu")(x)


def _build_crossentropy() -> keras.losses.Loss:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def _build_image_spec(examples: int, size: int) -> tf.TensorSpec:
    return tf.TensorSpec((examples, size, size, 3), tf.bfloat16)


def _build_id_spec(*shape: int) -> tf.TensorSpec:
    return tf.TensorSpec(shape, tf.int32)
