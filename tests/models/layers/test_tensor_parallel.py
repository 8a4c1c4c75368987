"""The rules by which a mesh's `tensor` axis cuts a transformer."""

import re

from tests.support.models import zoo
from tftpu.models.layers.tensor_parallel import select_rules


def cuts(family: str) -> dict[str, tuple[str | None, ...]]:
    """Returns the axes of each variable of a model that a rule cuts."""
    shapes = {v.path: tuple(v.shape) for v in zoo.build(family).trainable_variables}
    rules = select_rules(shapes)
    found = {}
    for path, shape in shapes.items():
        axes = next((axes for pattern, axes in rules if re.search(pattern, path)), None)
        if axes is not None:
            assert len(axes) == len(shape)
            found[path] = axes
    return found


def test_a_language_model_is_cut_by_heads_hidden_units_and_vocabulary():
    found = cuts("llama")
    assert found["tokens_embed/embeddings"] == ("tensor?", None)
    assert found["head/kernel"] == (None, "tensor?")
    for name in ("query", "key", "value"):
        assert found[f"block1_attention/{name}/kernel"] == (None, "tensor")
    assert found["block1_attention/out/kernel"] == ("tensor", None)
    assert found["block2_gate/kernel"] == found["block2_expand/kernel"] == (None, "tensor")
    assert found["block2_contract/kernel"] == ("tensor", None)


def test_classes_are_not_a_vocabulary():
    found = cuts("vit")
    assert "block1_attention/qkv/kernel" in found
    assert not any(path.startswith("head") for path in found)


def test_a_model_without_attention_has_no_rules():
    assert cuts("resnet") == {}
