"""Published step times of public runs, with the workloads that they are compared with."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from tests.benchmarks.calibration import workloads
from tests.benchmarks.calibration.operations import ArrayCopy, Exchange, MatrixProduct
from tests.benchmarks.calibration.workloads import Workload
from tftpu.tpu.slices import parse_slice

_MLPERF = "MLPerf training v{}"  # Google's results
_CHAT = "vorushin.github.io, 2026"  # "LLM pretraining for the TPU-poor", February 2026
_FUSED = "EfficientNetV2, Table 3"  # arXiv:2104.00298
_QK = "no norm of queries and keys, no soft cap; tftpu's kernel for attention"
_MAXTEXT = "MaxText, configs/tpu/{}/README.md"  # https://github.com/AI-Hypercomputer/maxtext
_RS = "tensorflow/tpu, resnet_rs/README.md"
_RECIPES = "tpu-recipes, {}"  # https://github.com/AI-Hypercomputer/tpu-recipes
_WIDER_MEMORY = {"xla_tpu_scoped_vmem_limit_kib": "65536"}
_Sizes = dict[str, Any]
_LLAMA_22B: _Sizes = {"layers": 48, "width": 6144, "heads": 24, "kv_heads": 24, "hidden": 16384}
_LLAMA_32B: _Sizes = {"layers": 32, "width": 8192, "heads": 64, "kv_heads": 64, "hidden": 28672}
_LLAMA_70B: _Sizes = {"layers": 80, "width": 8192, "heads": 64, "kv_heads": 8, "hidden": 28672}

_MIXTRAL_8X22B = {
    **{"layers": 56, "width": 6144, "heads": 48, "kv_heads": 8, "hidden": 16384},
    **{"experts": 8, "vocabulary": 32768},
}


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
    workload: Workload | MatrixProduct | ArrayCopy | Exchange
    step_ms: float
    source: str
    differs: str = ""

    @property
    def is_step(self) -> bool:
        """True for a train step, False for a single operation."""
        return isinstance(self.workload, Workload)


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
    mesh: str = "fsdp:-1",
    shares: int | None = None,
    **sizes: Any,
) -> Row:
    """Returns a row of a decoder, given its TFLOP/s a chip as MaxText counted them.

    It counts 6 FLOPs a token for each weight in a product, and attention without its mask.

    Args:
        name: of the model.
        slice_name: of the slice.
        tflops: a chip.
        examples: of a share of the batch.
        tokens: of an example.
        remat: what the backward pass recomputes.
        differs: how the workload differs from the published run.
        mesh: as for `tftpu.connect`.
        shares: of the batch, where they are fewer than the chips.
        sizes: of the model.
    """
    width, layers = sizes["width"], sizes["layers"]
    shared = width // sizes["heads"] * sizes["kv_heads"]
    weights = layers * (2 * width**2 + 2 * width * shared + 3 * width * sizes["hidden"])
    weights += width * sizes["vocabulary"]
    flops = examples * tokens * (6 * weights + 12 * layers * tokens * width)
    if shares is not None:
        flops *= shares / parse_slice(slice_name).chips
    return Row(
        name=f"{name}-{slice_name}",
        model=name,
        slice=slice_name,
        workload=workloads.build_llama(examples, tokens, remat, mesh, **sizes),
        step_ms=flops / tflops / 1e9,
        source=_MAXTEXT.format(parse_slice(slice_name).generation.name),
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

    Products of 1,024 columns and fewer, also published, take microseconds, most of them to begin.
    """
    return Row(
        name=f"product_{width}-tpu7x-8",
        model="product",
        slice="tpu7x-8",
        workload=MatrixProduct(width),
        step_ms=2 * width**3 / tflops / 1e9,
        source=_RECIPES.format("microbenchmarks/ironwood/README.md"),
    )


def _build_copy_row(size: int, gbps: float) -> Row:
    """Returns a row of a copy on each core of a TPU7x, given the bytes read and written a second.

    Copies of 16 MiB and less, also published, are mostly the time to begin.
    """
    return Row(
        name=f"copy_{size >> 20}m-tpu7x-8",
        model="copy",
        slice="tpu7x-8",
        workload=ArrayCopy(size),
        step_ms=2 * size / gbps / 1e6,
        source=_RECIPES.format("microbenchmarks/ironwood/hbm/hbm.md"),
    )


def _build_gather_row(slice_name: str, elements: int, gbps: float) -> Row:
    """Returns a row of a gather by one core of each of four chips, given what leaves a chip.

    Its two cores each send three quarters of what they hold in the end. Gathers of fewer elements,
    also published, are mostly the time to begin.
    """
    return Row(
        name=f"gather_{elements >> 20}m-{slice_name}",
        model="exchange",
        slice=slice_name,
        workload=Exchange(
            *("all_gather", (elements // 1024, 8, 128), "float32"),
            mesh=(parse_slice(slice_name).replicas // 8, 4, 2),
        ),
        step_ms=2 * 3 * 4 * elements / gbps / 1e6,
        source=_RECIPES.format("microbenchmarks/ironwood/collectives/all_gather.md"),
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
        _RECIPES.format("microbenchmarks/README.md"),
    ),
    Row(
        *("copy-v6e-1", "copy", "v6e-1", ArrayCopy(33_554_432), 0.0494),
        _RECIPES.format("microbenchmarks/README.md"),
    ),
    _build_resnet_rs_row(50, 160, 70, (3, 4, 6, 3)),
    _build_product_row(2048, 679.3),
    _build_product_row(4096, 892.9),
    _build_product_row(16384, 950.1),
    _build_product_row(32768, 956.4),
    _build_copy_row(1 << 25, 3009.8),
    _build_copy_row(1 << 26, 3097.2),
    _build_copy_row(1 << 28, 3167.1),
    _build_copy_row(1 << 30, 3198.4),
    _build_copy_row(1 << 33, 3210.5),
    *(
        _build_gather_row(slice_name, elements, gbps)
        for slice_name, elements, gbps in (
            *(("tpu7x-8", 1 << 20, 161.90), ("tpu7x-16", 1 << 20, 162.09)),
            *(("tpu7x-8", 1 << 22, 174.77), ("tpu7x-16", 1 << 22, 174.67)),
            *(("tpu7x-8", 1 << 24, 178.77), ("tpu7x-16", 1 << 24, 178.76)),
        )
    ),
    Row(
        *("psum-v6e-256", "exchange", "v6e-256"),
        Exchange("psum", (17408, 17408), "bfloat16", (1, 256, 1)),
        2 * 255 / 256 * 2 * 17408**2 / 235.76e6,
        _RECIPES.format("microbenchmarks/trillium/collectives/README.md"),
    ),
    _build_maxtext_row(
        *("llama_22b", "v4-128", 156, 13, 2048, "block"),
        "SwiGLU of width 16,384 for ReLU of 24,576, which has as many weights",
        **_LLAMA_22B,
        vocabulary=32000,
    ),
    *(
        _build_maxtext_row(
            *("llama_22b", f"{slices}xv4-128", tflops, 13, 2048, "block"),
            "SwiGLU of width 16,384 for ReLU of 24,576, which has as many weights",
            mesh=f"data:{slices},fsdp:-1",
            **_LLAMA_22B,
            vocabulary=32000,
        )
        for slices, tflops in ((2, 152), (4, 149), (8, 146))
    ),
    _build_maxtext_row(
        *("llama_32b", "v5e-256", 132, 4, 2048, "block", ""), **_LLAMA_32B, vocabulary=32000
    ),
    *(
        _build_maxtext_row(
            *("llama_32b", f"{slices}xv5e-256", tflops, 4, 2048, "block", ""),
            mesh=f"data:{slices},fsdp:-1",
            **_LLAMA_32B,
            vocabulary=32000,
        )
        for slices, tflops in ((2, 128), (4, 126), (8, 125), (16, 123), (32, 119))
    ),
    *(
        _build_maxtext_row(
            *("llama_32b", slice_name, tflops, 24, 2048, "products", ""),
            mesh=f"{data}fsdp:-1,tensor:4",
            shares=shares,
            **_LLAMA_32B,
            vocabulary=32000,
        )
        for slice_name, data, shares, tflops in (
            *(("v5p-128", "", 16, 328), ("2xv5p-128", "data:2,", 32, 319)),
        )
    ),
    _build_maxtext_row(
        *("llama_70b", "v5p-128", 298, 4, 4096, "block"),
        "what the backward pass recomputes",
        **_LLAMA_70B,
        vocabulary=32000,
    ),
    *(
        _build_maxtext_row(
            *(name, "v5p-1024", tflops, examples, 2048, remat, ""),
            mesh="fsdp:-1,tensor:8",
            shares=64,
            **{"layers": layers, "width": 16384, "heads": 128, "kv_heads": 128, "hidden": 57344},
            vocabulary=32000,
        )
        for name, tflops, examples, remat, layers in (
            ("llama_256b", 308, 8, "products", 64),
            ("llama_512b", 294, 16, "block", 128),
        )
    ),
    Row(
        *("llama3_70b-tpu7x-128", "llama3_70b", "tpu7x-128"),
        workloads.build_llama(2, 8192, "block", vocabulary=128256, **_LLAMA_70B),
        12200,
        _RECIPES.format("training/ironwood/llama3.1-70b"),
        "queries, keys, values and the output of attention are computed again, which were kept",
    ),
    Row(
        *("flux-v5p-8", "flux", "v5p-8", workloads.build_flux(2, "products"), 1769),
        "MaxDiffusion, README.md",
        "weights in float32; in the single blocks, the products before attention are kept, too",
    ),
    Row(
        *("mixtral_8x22b-v6e-256", "mixtral", "v6e-256"),
        workloads.build_mixtral(8, 4096, "offload", **_MIXTRAL_8X22B),
        24706,
        _RECIPES.format("training/trillium/Mixtral-8x22B-MaxText"),
        "experts are gathered, not divided among four chips; attention and its projections are "
        "computed again, which were kept on the host; weights in float32",
    ),
)
