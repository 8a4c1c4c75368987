"""The same weights give the same logits and gradients in Hugging Face Transformers.

`make test-parity`; needs torch and transformers. The weights are random.
"""

import json
import os

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support.models import zoo
from tests.support.models.strategies import relative
from tests.support.models.transformers import (
    TINY,
    _peer,
    both,
    configuration,
    features,
    logits_there,
    peer,
    torch,
)
from tftpu import models
from tftpu.models.weights.layouts import hugging_face

os.environ["HF_HUB_OFFLINE"] = "1"
pytestmark = pytest.mark.parity

del TINY["efficientnetv2"], TINY["vit_mean"]  # there are none in Transformers
PUBLISHED = ["gpt2_small", "llama_110m", "bert_base", "vit_s16", "convnext_tiny", "resnet50"]


@pytest.mark.parametrize("name", [*TINY, *PUBLISHED])
def test_logits_are_equal_and_every_weight_is_used(name, tmp_path):
    config, theirs, ours, report = both(name, tmp_path)
    assert not (report.missing or report.unused or report.replaced)
    x = features(config)
    with torch.no_grad():
        expected = logits_there(theirs, x).numpy()
    assert relative(ours(x), expected) < 1e-4


@pytest.mark.parametrize("name", TINY)
def test_gradients_of_a_loss_are_equal(name, tmp_path):
    config, theirs, ours, _ = both(name, tmp_path)
    x = features(config)
    there = logits_there(theirs, x)
    temperature = float(there.detach().std())  # or the softmax is saturated, and no gradient left
    loss = -torch.log_softmax(there / temperature, -1)[..., 1].mean()
    loss.backward()
    with tf.GradientTape() as tape:
        loss = -tf.reduce_mean(tf.nn.log_softmax(ours(x) / temperature)[..., 1])
    values = {v.path: v.value for v in ours.trainable_variables}
    gradients = dict(zip(values, tape.gradient(loss, list(values.values()))))
    expected = {n: p.grad for n, p in theirs.named_parameters()}
    largest = max(float(np.linalg.norm(tf.convert_to_tensor(g))) for g in gradients.values())
    checked = 0
    for entry in hugging_face.build_layout(config):
        names = [hugging_face.to_current_name(n) for n in entry.theirs]
        if entry.ours in gradients:
            value = entry.read(*(expected[n].numpy() for n in names))
            error = np.linalg.norm(tf.convert_to_tensor(gradients[entry.ours]) - value)
            assert error < 1e-4 * np.linalg.norm(value) + 1e-6 * largest, entry.ours
            checked += 1
    assert checked == len(gradients)


@pytest.mark.parametrize("name", TINY)
def test_saved_weights_are_loaded_by_transformers(name, tmp_path):
    config = configuration(name)
    keras.utils.set_random_seed(4)
    ours = models.build(config)
    for variable in ours.weights:
        noise = np.random.default_rng(len(variable.path)).uniform(0.1, 0.5, variable.shape)
        variable.assign(variable + noise)
    theirs = _peer(config)
    theirs.config.save_pretrained(tmp_path)
    models.save_weights(ours, tmp_path / "model.safetensors")
    loaded, said = type(theirs).from_pretrained(tmp_path, output_loading_info=True)
    missing = [n for n in said["missing_keys"] if "num_batches_tracked" not in n]
    assert not missing and not said["unexpected_keys"] and not said["mismatched_keys"]
    x = features(config)
    with torch.no_grad():
        assert relative(ours(x), logits_there(loaded.eval(), x).numpy()) < 1e-4


def test_a_sharded_checkpoint_is_read_by_its_index(tmp_path):
    config, theirs, ours, report = both("llama", tmp_path, max_shard_size="3KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1
    assert not (report.missing or report.unused)
    x = features(config)
    assert relative(ours(x), logits_there(theirs, x).detach().numpy()) < 1e-4


def test_bfloat16_weights_are_read(tmp_path):
    config = configuration("gpt")
    theirs = peer(config).to(torch.bfloat16)
    theirs.save_pretrained(tmp_path)
    ours = models.build(config)
    models.load_weights(ours, tmp_path / "model.safetensors")
    expected = theirs.transformer.wte.weight.detach().float().numpy()
    np.testing.assert_array_equal(ours.get_layer("tokens_embed").embeddings.numpy(), expected)


@pytest.mark.parametrize("name", ["bert_classes", "vit", "gpt"])
def test_a_checkpoint_without_a_head_gives_all_but_the_head(name, tmp_path):
    config = configuration(name)
    theirs = peer(config)
    theirs.base_model.save_pretrained(tmp_path)
    report = models.load_weights(models.build(config), tmp_path)
    assert report.missing == ([] if name == "gpt" else ["head/kernel", "head/bias"])
    assert not report.unused


def test_bert_with_padding_and_sentence_types_gives_the_same_logits(tmp_path):
    _, theirs, ours, _ = both("bert_classes", tmp_path)
    x, _ = zoo.batch("bert_classes")
    types = (np.arange(12) >= 4) * np.ones_like(x)
    real = (np.arange(12) < 9) * np.ones_like(x)
    more = {"attention_mask": torch.from_numpy(real), "token_type_ids": torch.from_numpy(types)}
    expected = logits_there(theirs, x, **more).detach().numpy()
    assert relative(ours({"tokens": x, "types": types, "segments": real}), expected) < 1e-4


def test_llama_uses_given_positions(tmp_path):
    _, theirs, ours, _ = both("llama_scaled", tmp_path)
    x = features(configuration("llama_scaled"))
    # No larger positions: a float32 angle of n radians is n * 6e-8 off, in both.
    positions = np.cumsum(np.random.default_rng(0).integers(1, 200, x.shape), -1).astype("int32")
    more = {"position_ids": torch.from_numpy(positions).long()}
    expected = logits_there(theirs, x, **more).detach().numpy()
    assert relative(ours({"tokens": x, "positions": positions}), expected) < 1e-4
    assert relative(ours(x), expected) > 1e-3
