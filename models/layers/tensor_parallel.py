"""The dimensions of a transformer's weights that a mesh's `tensor` axis cuts.

As in Megatron-LM (Shoeybi et al. 2019, https://arxiv.org/abs/1909.08053): the first product of
attention and of the MLP by its outputs, the second by its inputs, so that a block has one exchange
for each pair.
"""

import re
from collections.abc import Sequence

Rule = tuple[str, tuple[str | None, ...]]
_AXIS = "tensor"

TRANSFORMER: tuple[Rule, ...] = (
    (r"_attention/(query|key|value|qkv)/kernel$", (None, _AXIS)),
    (r"_attention/(query|key|value|qkv)/bias$", (_AXIS,)),
    (r"_attention/out/kernel$", (_AXIS, None)),
    (r"_(gate|expand)/kernel$", (None, _AXIS)),
    (r"_(gate|expand)/bias$", (_AXIS,)),
    (r"_contract/kernel$", (_AXIS, None)),
)


def rules_for(paths: Sequence[str]) -> tuple[Rule, ...]:
    """Returns the rules that the variables of a model have a use for.

    Args:
        paths: of the variables. Of a model without attention none is returned.
    """
    if not any("_attention/" in path for path in paths):
        return ()
    return tuple(rule for rule in TRANSFORMER if any(re.search(rule[0], path) for path in paths))
