"""Adapters written for PEFT give the same logits there.

`make test-parity`; needs torch, transformers and peft. The weights are random.
"""

import keras
import numpy as np
import pytest

from tests.support.models.adapted import stir
from tests.support.models.strategies import relative
from tftpu import models
from tftpu.models.weights import peft as writing

torch = pytest.importorskip("torch", reason="make test-parity installs it")
peft = pytest.importorskip("peft", reason="make test-parity installs it")
pytestmark = pytest.mark.parity


@pytest.mark.parametrize("name", ["gpt", "llama", "bert", "bert_classes", "convnext", "vit"])
def test_peft_adds_the_adapters_to_the_same_base(name, tmp_path):
    from tests.support.models.transformers import both, features, logits_there

    config, theirs, ours, _ = both(name, tmp_path / "base")
    x = features(config)
    keras.utils.set_random_seed(1)
    models.enable_lora(ours, 3)
    stir(ours)
    for variable in ours.trainable_variables:
        if variable.path.startswith("head/"):  # trained as a whole
            variable.assign(variable + 0.1)
    writing.save_adapters(ours, str(tmp_path / "adapters"), base="base")
    with torch.no_grad():
        before = logits_there(theirs, x).numpy()
        adapted = peft.PeftModel.from_pretrained(theirs, str(tmp_path / "adapters")).eval()
        found = logits_there(adapted, x).numpy()
    assert relative(found, before) > 0.01
    assert relative(np.asarray(ours(x)), found) < 1e-4
