"""Compiles the train step with the real TPU compiler, before a TPU is rented.

`check` takes a Keras model; `tftpu preflight` takes a config. Importing this package loads neither
TensorFlow nor JAX, because the compiler's process imports it as well.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tftpu.preflight.examining.checking import check
    from tftpu.preflight.options import PreflightOptions
    from tftpu.preflight.report import Report
    from tftpu.preflight.simulated import simulated_slice
    from tftpu.preflight.slice_report import SliceReport

_LAZY = {
    "PreflightOptions": "options",
    "Report": "report",
    "SliceReport": "slice_report",
    "check": "examining.checking",
    "simulated_slice": "simulated",
}

__all__ = ["PreflightOptions", "Report", "SliceReport", "check", "simulated_slice"]


if not TYPE_CHECKING:  # with `__getattr__`, type checkers would accept any name

    def __getattr__(name: str) -> Any:
        if name in _LAZY:
            return getattr(importlib.import_module(f"tftpu.preflight.{_LAZY[name]}"), name)
        raise AttributeError(f"module 'tftpu.preflight' has no attribute {name!r}")
