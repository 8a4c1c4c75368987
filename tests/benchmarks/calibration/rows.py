"""Published step times of public runs, with the workloads that they are compared with."""

import dataclasses
from collections.abc import Sequence

from tests.benchmarks.calibration import workloads
from tests.benchmarks.calibration.workloads import ArrayCopy, MatrixProduct, Workload

_MLPERF = "MLPerf training v{}, Google's results"
_CHAT = "vorushin.github.io, LLM pretraining for the TPU-poor, February 2026"
_FUSED = "EfficientNetV2, Table 3 (arXiv:2104.00298)"
_QK = "no norm of queries and keys, no soft cap; tftpu's kernel for attention"
_MAXTEXT = "MaxText, configs/tpu/{}/README.md"
_RS = "tensorflow/tpu, models/official/resnet/resnet_rs/README.md"
_RECIPES = "AI-Hypercomputer/tpu-recipes, {}"
_WIDER_MEMORY = {"xla_tpu_scoped_vmem_limit_kib": "65536"}
_IRONWOOD = "AI-Hypercomputer/tpu-recipes, microbenchmarks/ironwood/README.md"


@dataclasses.dataclass(frozen=True)
class Row:
    """A published step time.

    Attributes:
        name: of the row.
        model: that it is of; all rows of a model are left out of a fit together.
        slice: name of the slice.
        workload: the step that is compared with it.
        step_ms: milliseconds per step.
        source: publication.
        differs: how the workload differs from the published run, as far as that is known.
    """

    name: str
    model: str
    slice: str
    workload: Workload | MatrixProduct | ArrayCopy
    step_ms: float
    source: str
    differs: str = ""


def _build_fused_row(stages: int, images_per_second: float) -> Row:
    """Returns a row of EfficientNet-B4, given images per second and core."""
    return Row(
        name=f"efficientnet_b4-fused{stages}",
        model="efficientnet_b4",
        slice="v3-8",
        workload=workloads.build_efficientnet_b4(stages),
        step_ms=128e3 / images_per_second,
        source=_FUSED,
        differs="the batch, 128 images a core, is that of the paper's training; no moving averages",
    )


def _build_maxtext_row(
    name: str,
    slice_name: str,
    tflops: float,
    examples: int,
    tokens: int,
    remat: str,
    differs: str,
    **sizes: int,
) -> Row:
    """Returns a row of a decoder, given its TFLOP/s a chip as MaxText counted them.

    It counts 6 FLOPs a token for each weight in a product, and attention without its mask.
    """
    width, layers = sizes["width"], sizes["layers"]
    shared = width // sizes["heads"] * sizes["kv_heads"]
    weights = layers * (2 * width**2 + 2 * width * shared + 3 * width * sizes["hidden"])
    weights += width * sizes["vocabulary"]
    flops = examples * tokens * (6 * weights + 12 * layers * tokens * width)
    return Row(
        name=f"{name}-{slice_name}",
        model=name,
        slice=slice_name,
        workload=workloads.build_llama(examples, tokens, remat, **sizes),
        step_ms=flops / tflops / 1e9,
        source=_MAXTEXT.format(slice_name.split("-")[0]),
        differs=differs,
    )  # fmt: skip


def _build_resnet_rs_row(depth: int, pixels: int, ms: float, blocks: Sequence[int]) -> Row:
    """Returns a row of a ResNet-RS on one core of v3, 128 images of this many pixels."""
    return Row(
        name=f"resnet_rs{depth}_{pixels}-v3-8",
        model="resnet_rs",
        slice="v3-8",
        workload=workloads.build_resnet_rs(blocks, pixels),
        step_ms=ms,
        source=_RS,
        differs="published for one core, without the exchange of gradients; no moving averages",
    )


def _build_product_row(width: int, tflops: float) -> Row:
    """Returns a row of a product of square matrices on each device, given a device's TFLOP/s.

    Products of 2,048 columns and fewer, also published, take microseconds, much of them to begin.
    """
    return Row(
        name=f"product_{width}-tpu7x-8",
        model="product",
        slice="tpu7x-8",
        workload=MatrixProduct(width),
        step_ms=2 * width**3 / tflops / 1e9,
        source=_IRONWOOD,
    )


ROWS = (
    Row(
        "resnet50-v2-8",
        "resnet50",
        "v2-8",
        workloads.build_resnet50("sgd"),
        228.9,
        _MLPERF.format(0.5),
    ),
    Row(
        "resnet50-v3-8",
        "resnet50",
        "v3-8",
        workloads.build_resnet50("sgd"),
        137.3,
        _MLPERF.format(0.5),
    ),
    Row(
        *("resnet50-v3-32", "resnet50", "v3-32", workloads.build_resnet50("lars"), 125.6),
        _MLPERF.format(0.7),
    ),
    Row(
        *("resnet50-v4-16", "resnet50", "v4-16", workloads.build_resnet50("lars", 256), 73.6),
        _MLPERF.format(0.7),
        "its time includes an evaluation every four epochs",
    ),
    Row(
        *("bert_large-v3-32", "bert_large", "v3-32", workloads.build_bert_large(), 460.3),
        _MLPERF.format(0.7),
        "no dropout of attention; the update is not divided over the cores",
    ),
    _build_fused_row(0, 262),
    _build_fused_row(3, 362),
    _build_fused_row(5, 327),
    _build_fused_row(7, 254),
    Row("chat_164m-v5e-1", "chat_164m", "v5e-1", workloads.build_chat_164m(), 880.7, _CHAT, _QK),
    Row("chat_164m-v6e-1", "chat_164m", "v6e-1", workloads.build_chat_164m(), 302.3, _CHAT, _QK),
    Row("product-v6e-1", "product", "v6e-1", MatrixProduct(8192), 1.72, _CHAT),
    Row(
        *("product_vmem-v6e-1", "product", "v6e-1", MatrixProduct(8192, _WIDER_MEMORY), 1.3288),
        _RECIPES.format("microbenchmarks"),
    ),
    Row(
        *("copy-v6e-1", "copy", "v6e-1", ArrayCopy(33_554_432), 0.0494),
        _RECIPES.format("microbenchmarks"),
    ),
    _build_resnet_rs_row(50, 160, 70, (3, 4, 6, 3)),
    _build_product_row(4096, 892.9),
    _build_product_row(16384, 950.1),
    _build_product_row(32768, 956.4),
    _build_maxtext_row(
        *("llama_22b", "v4-128", 156, 13, 2048, "block"),
        "SwiGLU of width 16,384 for ReLU of 24,576, which has as many weights",
        **{"layers": 48, "width": 6144, "heads": 24, "kv_heads": 24, "hidden": 16384},
        vocabulary=32000,
    ),
    _build_maxtext_row(
        *("llama_32b", "v5e-256", 132, 4, 2048, "block", ""),
        **{"layers": 32, "width": 8192, "heads": 64, "kv_heads": 64, "hidden": 28672},
        vocabulary=32000,
    ),
    _build_maxtext_row(
        *("llama_70b", "v5p-128", 298, 4, 4096, "block"),
        "what the backward pass recomputes",
        **{"layers": 80, "width": 8192, "heads": 64, "kv_heads": 8, "hidden": 28672},
        vocabulary=32000,
    ),
)
