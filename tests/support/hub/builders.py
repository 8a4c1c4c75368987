"""Builds each backbone of KerasHub small, with random weights.

Most need the arguments of `sizes.py` alone. For those that are made of other models, a function
here builds these.
"""

import inspect
from collections.abc import Callable
from typing import Any

import keras_hub

from tests.support.hub.sizes import HEADS, HIDDEN, PIXELS, TOKENS, choose_arguments

# `Backbone` and `FeaturePyramidBackbone` are what the others derive from.
ABSTRACT = (keras_hub.models.Backbone, keras_hub.models.FeaturePyramidBackbone)


def list_backbones() -> dict[str, type]:
    """Returns the backbones by the names of their classes, each once: some have a second name."""
    found = dict(inspect.getmembers(keras_hub.models, inspect.isclass))
    kinds = {kind for name, kind in found.items() if name.endswith("Backbone")}
    named = {kind.__name__: kind for kind in kinds - {*ABSTRACT}}
    return dict(sorted(named.items(), key=lambda entry: entry[0].lower()))


def build_backbone(name: str) -> Any:
    """Returns the small backbone of a class's name."""
    parts = _PARTS.get(name, dict)()
    return _build(list_backbones()[name], **parts)


def _build(kind: Any, **given: Any) -> Any:
    return kind(**choose_arguments(kind, **given))


def _build_resnet(stages: int) -> Any:
    """Returns a ResNet whose last features are 2 ** (stages + 1) times smaller than its images."""
    return _build(
        keras_hub.models.ResNetBackbone,
        stackwise_num_filters=[64] * stages,
        stackwise_num_blocks=[1] * stages,
        stackwise_num_strides=[1] + [2] * (stages - 1),
        block_type="basic_block",
        input_conv_filters=[64],
        image_shape=(None, None, 3),
    )


def _give_basnet() -> dict[str, Any]:
    # Its last stages divide the images by 32.
    encoder = _build(
        keras_hub.models.ResNetBackbone,
        stackwise_num_filters=[64, 64, 64, 64],
        stackwise_num_blocks=[2, 2, 2, 2],
        stackwise_num_strides=[1, 2, 2, 2],
        block_type="basic_block",
        input_conv_filters=[64],
        image_shape=(None, None, 3),
    )
    return {
        "image_encoder": encoder,
        "num_classes": 1,
    }


def _give_blip2() -> dict[str, Any]:
    models = keras_hub.models
    flags = ("use_patch_bias", "use_class_token", "use_mha_bias", "use_mlp_bias")
    vision = _build(
        models.BLIP2VisionEncoder,
        **dict.fromkeys(flags, True),
        layer_norm_epsilon=1e-6,
        initializer_range=0.02,
    )
    former = _build(
        models.BLIP2QFormer,
        num_query_tokens=4,
        vision_dim=HIDDEN,
        cross_attention_frequency=1,
        layer_norm_epsilon=1e-6,
    )
    language = _build(models.BLIP2CustomOPT, num_query_tokens=4, qformer_hidden_dim=HIDDEN)
    return {"vision_encoder": vision, "qformer": former, "language_model": language}


def _give_pair(family: str) -> Callable[[], dict[str, Any]]:
    """Returns a function that builds the two encoders of an image with its text."""

    def give() -> dict[str, Any]:
        parts = {}
        for part in ("Vision", "Text"):
            kind = getattr(keras_hub.models, f"{family}{part}Encoder")
            name = f"{part.lower()}_encoder"
            parts[name] = (
                _build(kind, max_sequence_length=TOKENS, name=name)
                if part == "Text"
                else _build(kind, name=name)
            )
        return parts if family == "SigLIP" else {**parts, "projection_dim": HIDDEN}

    return give


def _give_deeplab() -> dict[str, Any]:
    return {
        "image_encoder": _build_resnet(3),
        "spatial_pyramid_pooling_key": "P4",
        "low_level_feature_key": "P2",
        "upsampling_size": 4,
        "dilation_rates": [1, 2, 3],
        "projection_filters": 16,
    }


def _give_depth_anything() -> dict[str, Any]:
    encoder = _build(
        keras_hub.models.DINOV2Backbone,
        num_layers=4,
        patch_size=4,
        apply_layernorm=True,
        name="image_encoder",
    )
    return {
        "image_encoder": encoder,
        "reassemble_factors": [4, 2, 1, 0.5],
        "neck_hidden_dims": [16, 16, 32, 32],
        "fusion_hidden_dim": 32,
        "head_hidden_dim": 16,
        "head_in_index": -1,
        "feature_keys": ["stage1", "stage2", "stage3", "stage4"],
    }


def _give_dfine() -> dict[str, Any]:
    stages = ["stage1", "stage2"]
    backbone = _build(
        keras_hub.models.HGNetV2Backbone, image_shape=(None, None, 3), out_features=stages
    )
    return {
        "backbone": backbone,
        "decoder_in_channels": [HIDDEN, HIDDEN],
        "encoder_hidden_dim": HIDDEN,
        "num_labels": 4,
        "num_denoising": 4,
        "learn_initial_query": False,
        "num_queries": 8,
        "anchor_image_size": (PIXELS, PIXELS),
        "feat_strides": [4, 8],
        "num_feature_levels": 2,
        "encoder_in_channels": [32, 64],
        "encode_proj_layers": [1],
        "num_attention_heads": HEADS,
        "encoder_ffn_dim": 2 * HIDDEN,
        "num_encoder_layers": 1,
        "hidden_expansion": 0.5,
        "depth_multiplier": 0.5,
        "eval_idx": -1,
        "num_decoder_layers": 2,
        "decoder_attention_heads": HEADS,
        "decoder_ffn_dim": 2 * HIDDEN,
        "decoder_n_points": [2, 2],
        "lqe_hidden_dim": 16,
        "num_lqe_layers": 2,
        "out_features": stages,
        "seed": 0,
    }


def _give_gemma3() -> dict[str, Any]:
    vision = _build(keras_hub.models.Gemma3VisionEncoder, output_dim=HIDDEN, pool_size=2)
    return {"vision_encoder": vision, "use_sliding_window_attention": True}


def _give_parseq() -> dict[str, Any]:
    encoder = _build(keras_hub.models.ViTBackbone, use_class_token=False, name="image_encoder")
    return {
        "image_encoder": encoder,
        "max_label_length": TOKENS,
        "num_decoder_layers": 1,
        "num_decoder_heads": HEADS,
    }


def _give_retinanet() -> dict[str, Any]:
    return {"image_encoder": _build_resnet(4), "min_level": 3, "max_level": 5, "use_p5": False}


def _give_sam() -> dict[str, Any]:
    layers = keras_hub.layers
    side = PIXELS // 8  # patches of the image encoder
    return {
        "image_encoder": _build(keras_hub.models.ViTDetBackbone),
        "prompt_encoder": _build(
            layers.SAMPromptEncoder,
            hidden_size=16,
            image_embedding_size=(side, side),
            input_image_size=(PIXELS, PIXELS),
            mask_in_channels=16,
        ),
        "mask_decoder": _build(
            layers.SAMMaskDecoder, hidden_size=16, embedding_dim=16, iou_head_hidden_dim=16
        ),
    }


def _give_sam3() -> dict[str, Any]:
    layers = keras_hub.layers
    return {
        "vision_encoder": _build(
            layers.SAM3VisionEncoder,
            fpn_hidden_dim=HIDDEN,
            fpn_scale_factors=[4.0, 2.0, 1.0, 0.5],
            pretrain_image_shape=(PIXELS, PIXELS, 3),
            window_size=2,
            global_attn_indexes=[1],
        ),
        "text_encoder": _build(layers.SAM3TextEncoder, max_sequence_length=TOKENS),
        "geometry_encoder": _build(layers.SAM3GeometryEncoder, roi_size=7),
        "detr_encoder": _build(layers.SAM3DetrEncoder),
        "detr_decoder": _build(layers.SAM3DetrDecoder, num_queries=8),
        "mask_decoder": _build(layers.SAM3MaskDecoder, num_upsampling_stages=3),
    }


def _give_segformer() -> dict[str, Any]:
    return {"image_encoder": _build(keras_hub.models.MiTBackbone), "projection_filters": 16}


def _give_stable_diffusion() -> dict[str, Any]:
    from keras_hub.src.models.vae.vae_backbone import VAEBackbone

    filters, blocks = [32, 32, 32, 32], [1, 1, 1, 1]
    texts = {
        name: _build(
            keras_hub.models.CLIPTextEncoder,
            intermediate_output_index=-2,
            max_sequence_length=TOKENS,
            name=name,
        )
        for name in ("clip_l", "clip_g")
    }
    return {
        **texts,
        "vae": VAEBackbone(filters, blocks, filters, blocks, sampler_method="mode", name="vae"),
        "mmdit_patch_size": 2,
        "mmdit_hidden_dim": HIDDEN,
        "mmdit_num_layers": 2,
        "mmdit_num_heads": HEADS,
        "mmdit_position_size": 8,
        "mmdit_qk_norm": None,
        "mmdit_dual_attention_indices": None,
    }


_PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    "BASNetBackbone": _give_basnet,
    "BLIP2Backbone": _give_blip2,
    "CLIPBackbone": _give_pair("CLIP"),
    "DFineBackbone": _give_dfine,
    "DeepLabV3Backbone": _give_deeplab,
    "DepthAnythingBackbone": _give_depth_anything,
    "Gemma3Backbone": _give_gemma3,
    "MetaCLIP2Backbone": _give_pair("MetaCLIP2"),
    "PARSeqBackbone": _give_parseq,
    "RetinaNetBackbone": _give_retinanet,
    "SAM3PromptableConceptBackbone": _give_sam3,
    "SAMBackbone": _give_sam,
    "SegFormerBackbone": _give_segformer,
    "SigLIPBackbone": _give_pair("SigLIP"),
    "StableDiffusion3Backbone": _give_stable_diffusion,
}
