"""Compiles the real train step with the real TPU compiler, before paying for a TPU.

`check` answers for a Keras model, `tftpu preflight` for a config. Nothing heavy loads until then:
the compiler's own process imports this package too.
"""

import importlib

_LAZY = {"check": "examine", "Report": "report", "SliceReport": "report"}

__all__ = ["Report", "SliceReport", "check"]


def __getattr__(name: str):
    if name in _LAZY:
        return getattr(importlib.import_module(f"tftpu.preflight.{_LAZY[name]}"), name)
    raise AttributeError(f"module 'tftpu.preflight' has no attribute {name!r}")
