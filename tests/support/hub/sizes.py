"""Small arguments of KerasHub's backbones, chosen by the names of their parameters."""

import inspect
from typing import Any

HIDDEN, HEADS, VOCABULARY, TOKENS, PIXELS = 32, 4, 64, 12, 32

# The value of a parameter, by its name, or by its name without `encoder_` or `decoder_`.
_BY_NAME: dict[str, Any] = {
    **dict.fromkeys(("vocabulary_size", "vocab_size", "text_vocab_size"), VOCABULARY),
    "vocab_size_per_layer_input": VOCABULARY,
    **dict.fromkeys(("hidden_dim", "hidden_size", "embedding_dim", "text_hidden_size"), HIDDEN),
    **dict.fromkeys(("intermediate_dim", "mlp_dim", "moe_intermediate_dim"), 2 * HIDDEN),
    **dict.fromkeys(("shared_expert_intermediate_dim",), HIDDEN),
    **dict.fromkeys(("shared_expert_intermediate_size",), HIDDEN),
    **dict.fromkeys(("num_heads", "num_attention_heads", "num_query_heads"), HEADS),
    "num_key_value_heads": HEADS // 2,
    **dict.fromkeys(("head_dim", "head_size"), HIDDEN // HEADS),
    **dict.fromkeys(("num_layers", "num_hidden_layers", "num_layers_enc", "num_layers_dec"), 2),
    "num_experts": 4,
    "top_k": 2,
    **dict.fromkeys(("max_sequence_length", "max_position_embeddings"), 2 * TOKENS),
    **dict.fromkeys(("sliding_window", "sliding_window_size", "bucket_size"), TOKENS // 2),
    "layer_types": ["sliding_attention", "full_attention"],
    "image_shape": (PIXELS, PIXELS, 3),
    "image_size": PIXELS,
    "patch_size": PIXELS // 4,
}

# What the rule does not find for a backbone, or finds wrong.
_OF_BACKBONE: dict[str, dict[str, Any]] = {
    "CSPNetBackbone": {
        "stem_filters": 16,
        "stem_kernel_size": 3,
        "stem_strides": 1,
        "stackwise_depth": [1, 2],
        "stackwise_strides": 2,
        "stackwise_num_filters": [16, 32],
        "block_type": "dark_block",
        "stage_type": "csp",
        "stem_padding": "same",
        "bottle_ratio": (0.5, 1.0),
        "block_ratio": (1.0, 0.5),
        "expand_ratio": (2.0, 1.0),
        "down_growth": True,
    },
    "DINOV2Backbone": {"position_embedding_shape": (PIXELS, PIXELS, 3)},
    "DenseNetBackbone": {"stackwise_num_repeats": [2, 2], "growth_rate": 8},
    "EfficientNetBackbone": {
        "stackwise_kernel_sizes": [3, 3],
        "stackwise_num_repeats": [1, 2],
        "stackwise_input_filters": [16, 16],
        "stackwise_output_filters": [16, 32],
        "stackwise_expansion_ratios": [1, 4],
        "stackwise_squeeze_and_excite_ratios": [0.0, 0.25],
        "stackwise_strides": [1, 2],
        "stackwise_block_types": ["fused", "unfused"],
        "stackwise_width_coefficients": [1.0, 1.0],
        "stackwise_depth_coefficients": [1.0, 1.0],
        "stackwise_force_input_filters": [0, 0],
        "stackwise_nores_option": [False, False],
        "input_shape": (PIXELS, PIXELS, 3),
        "num_features": 32,
    },
    "FluxBackbone": {
        "input_channels": 16,
        "hidden_size": 64,
        "mlp_ratio": 2.0,
        "depth": 2,
        "depth_single_blocks": 2,
        "axes_dim": [4, 6, 6],
        "theta": 10_000,
        "use_bias": True,
        "image_shape": (16, 16),
        "text_shape": (TOKENS, 16),
        "image_ids_shape": (16, 3),
        "text_ids_shape": (TOKENS, 3),
        "y_shape": (16,),
    },
    "Gemma3nBackbone": {
        "pad_token_id": 0,
        "intermediate_size": [64, 64],
        "hidden_activation": "gelu_approximate",
        "rope_theta": 10_000.0,
        "hidden_size_per_layer_input": 8,
        "altup_num_inputs": 2,
        "laurel_rank": 4,
    },
    "Gemma4Backbone": {"use_sliding_window_attention": True},
    "HGNetV2Backbone": {
        "depths": [1, 1],
        "embedding_size": 16,
        "hidden_sizes": [32, 64],
        "stem_channels": [3, 16, 16],
        "hidden_act": "relu",
        "use_learnable_affine_block": True,
        "stackwise_stage_filters": [[16, 16, 32, 1, 1, 3], [32, 16, 64, 1, 1, 3]],
        "apply_downsample": [False, True],
        "use_lightweight_conv_block": [False, True],
    },
    "MiTBackbone": {
        "layerwise_depths": [1, 1],
        "hidden_dims": [16, 32],
        "layerwise_num_heads": [2, 4],
        "layerwise_sr_ratios": [4, 2],
        "layerwise_patch_sizes": [7, 3],
        "layerwise_strides": [4, 2],
    },
    "MobileNetBackbone": {
        "stackwise_expansion": [[32], [48, 48]],
        "stackwise_num_blocks": [1, 2],
        "stackwise_num_filters": [[16], [24, 24]],
        "stackwise_kernel_size": [[3], [5, 5]],
        "stackwise_num_strides": [[2], [2, 1]],
        "stackwise_se_ratio": [[None], [0.25, 0.25]],
        "stackwise_activation": [["relu"], ["hard_swish", "hard_swish"]],
        "stackwise_padding": [[1], [2, 2]],
        "output_num_filters": 64,
        "depthwise_filters": 8,
        "depthwise_stride": 2,
        "depthwise_residual": False,
        "last_layer_filter": 32,
        "squeeze_and_excite": 0.5,
    },
    "MobileNetV5Backbone": {
        "stackwise_block_types": [["er"], ["uir", "mqa"]],
        "stackwise_num_blocks": [1, 2],
        "stackwise_num_filters": [[16], [32, 32]],
        "stackwise_strides": [[2], [2, 1]],
        "stackwise_act_layers": [["gelu"], ["gelu", "gelu"]],
        "stackwise_exp_ratios": [[4.0], [2.0, 1.0]],
        "stackwise_se_ratios": [[0.0], [0.0, 0.0]],
        "stackwise_dw_kernel_sizes": [[0], [5, 3]],
        "stackwise_dw_start_kernel_sizes": [[0], [0, 0]],
        "stackwise_dw_end_kernel_sizes": [[0], [0, 0]],
        "stackwise_exp_kernel_sizes": [[3], [0, 0]],
        "stackwise_pw_kernel_sizes": [[1], [0, 0]],
        "stackwise_num_heads": [[0], [0, 4]],
        "stackwise_key_dims": [[0], [0, 8]],
        "stackwise_value_dims": [[0], [0, 8]],
        "stackwise_kv_strides": [[0], [0, 1]],
        "stackwise_use_cpe": [[False], [False, False]],
        "num_features": 32,
        "use_msfa": False,
    },
    "MoonshineBackbone": {"filter_dim": HIDDEN, "partial_rotary_factor": 0.5},
    "PaliGemmaBackbone": {
        "vit_patch_size": PIXELS // 4,
        "vit_num_heads": HEADS,
        "vit_hidden_dim": HIDDEN,
        "vit_num_layers": 2,
    },
    "RWKV7Backbone": {"gate_lora": 8, "mv_lora": 8, "aaa_lora": 8, "decay_lora": 8},
    "ResNetBackbone": {
        "input_conv_filters": [16],
        "input_conv_kernel_sizes": [3],
        "stackwise_num_filters": [64, 64],  # KerasHub wants 64 first
        "stackwise_num_blocks": [1, 1],
        "stackwise_num_strides": [1, 2],
        "block_type": "bottleneck_block",
    },
    "SmolLM3Backbone": {
        "layer_types": ["attention", "attention"],
        "attention_bias": False,
        "mlp_bias": False,
        "rope_layer_enabled_list": [True, False],
        "layer_norm_epsilon": 1e-5,
        "rope_theta": 10_000.0,
        "partial_rotary_factor": 1.0,
    },
    "SwinTransformerBackbone": {
        "embed_dim": 16,
        "depths": (2, 2),
        "num_heads": (2, 4),
        "patch_size": 4,
        "window_size": 4,
    },
    "VGGBackbone": {"stackwise_num_repeats": [1, 1], "stackwise_num_filters": [16, 32]},
    "ViTDetBackbone": {
        "global_attention_layer_indices": [1],
        "num_output_channels": 16,
        "window_size": 2,
    },
    "VideoPrismBackbone": {
        "num_frames": 4,
        "num_spatial_layers": 1,
        "num_temporal_layers": 1,
        "num_auxiliary_layers": 1,
        "num_text_layers": 1,
    },
    "WhisperBackbone": {"num_mels": 8},
    "XceptionBackbone": {
        "stackwise_conv_filters": [[16, 16], [32, 32]],
        "stackwise_pooling": [True, False],
    },
}
# Qwen 3.5: layers of linear attention between those of full attention.
_OF_BACKBONE["Qwen3_5Backbone"] = _OF_BACKBONE["Qwen3_5MoeBackbone"] = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}


def choose_arguments(kind: type, **given: Any) -> dict[str, Any]:
    """Returns small arguments of a constructor, without dropout.

    Args:
        kind: a class of KerasHub.
        given: arguments that replace those of the rule.
    """
    chosen: dict[str, Any] = {}
    for name in inspect.signature(kind.__init__).parameters:
        plain = name.removeprefix("encoder_").removeprefix("decoder_")
        if "dropout" in name or "drop_path" in name:
            chosen[name] = 0.0
        elif plain in _BY_NAME:
            chosen[name] = _BY_NAME[plain]
    return {**chosen, **_OF_BACKBONE.get(kind.__name__, {}), **given}
