"""JAX's private interfaces that preflight needs, all in one place.

They were tested with jax and jaxlib 0.10.2 and libtpu 0.0.52.
"""

import importlib.metadata
import os
from typing import Any, NamedTuple

from tftpu import installation
from tftpu.errors import UserError

_TRIED = {"jax": "0.10.2", "libtpu": "0.0.52"}


class Internals(NamedTuple):
    """Modules of JAX that preflight uses."""

    ir: Any
    hlo: Any
    mlir: Any
    xla: Any
    topologies: Any
    xla_client: Any
    mosaic: Any


def load_internals() -> Internals:
    """Returns JAX's private modules; raises `UserError` if jax or a name in it is missing."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    try:
        from jax._src.interpreters import mlir

        # The type checker reports private names, and finds no types for `_jax`.
        from jax._src.lib import tpu, xla_client  # pyright: ignore[reportPrivateImportUsage]
        from jax.experimental import topologies
        from jaxlib import _jax  # pyright: ignore[reportAttributeAccessIssue]
        from jaxlib.mlir import ir
        from jaxlib.mlir.dialects import stablehlo

        # Raises AttributeError if one of these names is missing.
        _ = _jax.mlir.hlo_to_stablehlo, _jax.CompileOptions, _jax.DeviceList
        _ = stablehlo.RngBitGeneratorOp, stablehlo.slice, mlir.make_ir_context, tpu.register_dialect
    except (ImportError, AttributeError) as error:
        try:
            found = f"jax {importlib.metadata.version('jax')}"
        except importlib.metadata.PackageNotFoundError:
            raise UserError(
                f"jax, which drives the TPU compiler, is not installed. {install()}"
            ) from None
        raise UserError(
            f"Preflight does not support {found} ({error}); it was tested with "
            f"{' and '.join(f'{k} {v}' for k, v in _TRIED.items())}. {install()}"
        ) from error
    return Internals(ir, stablehlo, mlir, _jax, topologies, xla_client, tpu)


def install() -> str:
    """Returns advice to install what preflight needs."""
    command = installation.command("preflight")
    return f"Run `{command}` in an environment without tensorflow-tpu."
