"""The private interface of KerasHub that the kernels use: attention that is not Keras's own.

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
    """Lets the layers of GptOss attend by another function within the block.

    Args:
        attend: a function of the layer's own method, of its sinks, (heads,), of its window, and of
            the arguments of that method.
    """
    module = sys.modules.get(_MODULE)  # None: then there is no such layer
    layer_class: Any = getattr(module, "GptOssAttention", None)
    original = getattr(layer_class, "_compute_attention", None)
    if original is None:  # of another KerasHub, whose other models work without
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
