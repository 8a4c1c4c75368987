"""The private interface of KerasHub that the kernels use: attention with sinks.

Tested with KerasHub 0.32, by the tests of Keras's own attention.
"""

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

_MODULE = "keras_hub.src.models.gpt_oss.gpt_oss_attention"


@contextlib.contextmanager
def replacing_sink_attention(attend: Callable[..., Any]) -> Iterator[None]:
    """Makes the layers of GptOss compute attention with another function within the block.

    Args:
        attend: a function of the layer's original method, its sinks, (heads,), its window, and the
            arguments of that method.
    """
    module = sys.modules.get(_MODULE)  # None: GptOss is not imported
    layer_class: Any = getattr(module, "GptOssAttention", None)
    original = getattr(layer_class, "_compute_attention", None)
    if original is None:  # not imported, or absent in this KerasHub
        yield
        return

    def compute(layer: Any, *given: Any, **named: Any) -> Any:
        own = functools.partial(original, layer)
        return attend(own, layer.sinks, layer.sliding_window or 0, *given, **named)

    layer_class._compute_attention = compute
    try:
        yield
    finally:
        layer_class._compute_attention = original
