"""The private interface of KerasHub that the kernels use: attention that is not Keras's own.

Tested with KerasHub 0.32, by the tests of Keras's own attention.
"""

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def replacing_sink_attention(attend: Callable[..., Any]) -> Iterator[None]:
    """Lets the layers of GptOss attend by another function within the block.

    Args:
        attend: a function of the layer's own method, of its sinks, (heads,), of its window, and of
            the arguments of that method.
    """
    module = sys.modules.get("keras_hub.src.models.gpt_oss.gpt_oss_attention")
    if module is None:  # then there is no such layer
        yield
        return
    original = module.GptOssAttention._compute_attention

    def compute(layer: Any, *given: Any, **named: Any) -> Any:
        own = functools.partial(original, layer)
        return attend(own, layer.sinks, layer.sliding_window or 0, *given, **named)

    module.GptOssAttention._compute_attention = compute
    try:
        yield
    finally:
        module.GptOssAttention._compute_attention = original
