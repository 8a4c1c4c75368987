"""A tiny model of each family of the zoo, and batches for it."""

import dataclasses
from typing import Any

import keras
import numpy as np

from tftpu import models
from tftpu.models import sizes

VARIANTS = ("vit_mean", "bert_classes")  # second models of a family

TINY = {
    "resnet": sizes.ResNet(
        "resnet", blocks=(1, 1), width=8, stem="small", image_size=8, num_classes=5, norm_batch=4
    ),
    "convnext": sizes.ConvNeXt(
        "convnext", blocks=(1, 2), widths=(8, 16), image_size=16, num_classes=5, layer_scale=1.0
    ),
    "efficientnetv2": sizes.EfficientNetV2(
        "efficientnetv2",
        blocks=(1, 2, 2),
        widths=(8, 8, 16),
        strides=(1, 2, 2),
        expand=(1, 2, 2),
        fused_stages=2,
        stem_width=8,
        head_width=32,
        image_size=16,
        num_classes=5,
        norm_batch=4,
        dropout=0.0,
        stochastic_depth=0.0,
    ),
    "vit": sizes.ViT("vit", patch=4, layers=2, width=16, heads=2, image_size=8, num_classes=5),
    "vit_mean": sizes.ViT(
        "vit_mean",
        patch=4,
        layers=2,
        width=16,
        heads=2,
        image_size=8,
        num_classes=5,
        pooling="mean",
    ),
    "bert": sizes.BERT("bert", vocabulary=20, context=12, layers=2, width=16, heads=2, dropout=0.0),
    "bert_classes": sizes.BERT(
        "bert_classes",
        vocabulary=20,
        context=12,
        layers=2,
        width=16,
        heads=2,
        head="classes",
        num_classes=5,
        dropout=0.0,
    ),
    "gpt": sizes.GPT("gpt", vocabulary=20, context=12, layers=2, width=16, heads=2),
    "llama": sizes.Llama(
        "llama", vocabulary=20, context=12, layers=2, width=16, heads=4, kv_heads=2, hidden=32
    ),
}


def build(family: str, **fields: Any) -> keras.Model:
    """Builds the tiny model of a family, with `fields` replaced in its hyper-parameters."""
    return models.build(dataclasses.replace(TINY[family], **fields))


def compiled(family: str, **fields: Any) -> keras.Model:
    """Builds and compiles the tiny model of a family."""
    model = build(family, **fields)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01), loss)
    return model


def batch(family: str, examples: int = 8) -> tuple[np.ndarray, np.ndarray]:
    """Returns random features and labels, the same at every call."""
    config = TINY[family]
    rng = np.random.default_rng(5)
    if hasattr(config, "image_size"):
        shape = (examples, config.image_size, config.image_size, 3)
        return rng.normal(size=shape).astype("float32"), rng.integers(0, 5, examples, "int32")
    tokens = rng.integers(0, config.vocabulary, (examples, config.context), "int32")
    if family == "bert_classes":
        return tokens, rng.integers(0, 5, examples, "int32")
    return tokens, (3 * tokens + 1) % config.vocabulary


def weights_alone(mode: str) -> Any:
    """Returns a config of Keras's `quantize` that rounds weights by channel, and no activations."""
    if mode == "int8":
        return keras.quantizers.Int8QuantizationConfig(activation_quantizer=None)
    return keras.quantizers.Int4QuantizationConfig(block_size=-1)
