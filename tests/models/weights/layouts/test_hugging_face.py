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
from tftpu import models
from tftpu.config import Model
from tftpu.models import sizes
from tftpu.models.weights.layouts import hugging_face

os.environ["HF_HUB_OFFLINE"] = "1"
torch = pytest.importorskip("torch", reason="make test-parity installs it")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.parity

TINY = {
    **zoo.TINY,
    "resnet": sizes.ResNet(
        "resnet", blocks=(1, 2, 1), width=8, image_size=40, num_classes=5, norm_batch=4
    ),
    "resnet_basic": sizes.ResNet(
        "resnet_basic", blocks=(2, 1), width=8, bottleneck=False, image_size=40, num_classes=5
    ),
    "llama_tied": sizes.Llama(
        "llama_tied", vocabulary=20, width=32, heads=2, kv_heads=1, hidden=24, layers=2, tied=True
    ),
    "llama_scaled": sizes.Llama(
        "llama_scaled",
        vocabulary=20,
        context=131072,
        width=64,
        heads=2,
        kv_heads=2,
        hidden=24,
        layers=1,
        rope_base=500000.0,
        rope_scaling=32.0,
    ),
}
del TINY["efficientnetv2"], TINY["vit_mean"]  # there are none in Transformers
PUBLISHED = ["gpt2_small", "llama_110m", "bert_base", "vit_s16", "convnext_tiny", "resnet50"]


def configuration(name: str) -> Model:
    config = TINY.get(name) or models.config(name)
    for field in ("dropout", "stochastic_depth"):
        if hasattr(config, field):
            setattr(config, field, 0.0)
    return config


def peer(config: Model):
    """Returns the model of Transformers of the same shape, with random weights."""
    torch.manual_seed(0)
    model = _peer(config).eval()
    scale = 0.5 if config.name in TINY else 0.05
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if "running_var" in name:
                tensor.uniform_(0.5, 2.0)
            elif tensor.is_floating_point() and "inv_freq" not in name:
                tensor.normal_(0.0, scale)
                if tensor.ndim == 1 and "bias" not in name and "mean" not in name:
                    tensor.add_(1.0)  # the factor of a norm
    return model


def _peer(c: Model):
    t = transformers
    if isinstance(c, sizes.GPT):
        return t.GPT2LMHeadModel(
            t.GPT2Config(
                vocab_size=c.vocabulary,
                n_positions=c.context,
                n_layer=c.layers,
                n_embd=c.width,
                n_head=c.heads,
                bos_token_id=0,
                eos_token_id=0,
            )
        )
    if isinstance(c, sizes.Llama):
        rope = {"rope_type": "default", "rope_theta": c.rope_base}
        if c.rope_scaling > 1:
            rope |= {
                "rope_type": "llama3",
                "factor": c.rope_scaling,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            }
        return t.LlamaForCausalLM(
            t.LlamaConfig(
                vocab_size=c.vocabulary,
                hidden_size=c.width,
                intermediate_size=c.hidden,
                num_hidden_layers=c.layers,
                num_attention_heads=c.heads,
                num_key_value_heads=c.kv_heads,
                max_position_embeddings=c.context,
                rms_norm_eps=c.epsilon,
                rope_parameters=rope,
                tie_word_embeddings=c.tied,
                bos_token_id=0,
                eos_token_id=0,
            )
        )
    if isinstance(c, sizes.BERT):
        settings = t.BertConfig(
            vocab_size=c.vocabulary,
            hidden_size=c.width,
            intermediate_size=4 * c.width,
            num_hidden_layers=c.layers,
            num_attention_heads=c.heads,
            max_position_embeddings=c.context,
            num_labels=c.num_classes,
        )
        masked = c.head == "masked_lm"
        return (t.BertForMaskedLM if masked else t.BertForSequenceClassification)(settings)
    if isinstance(c, sizes.ViT):
        return t.ViTForImageClassification(
            t.ViTConfig(
                hidden_size=c.width,
                intermediate_size=4 * c.width,
                num_hidden_layers=c.layers,
                num_attention_heads=c.heads,
                image_size=c.image_size,
                patch_size=c.patch,
                num_labels=c.num_classes,
                layer_norm_eps=1e-6,
            )
        )
    if isinstance(c, sizes.ConvNeXt):
        return t.ConvNextForImageClassification(
            t.ConvNextConfig(
                num_stages=len(c.blocks),
                hidden_sizes=list(c.widths),
                depths=list(c.blocks),
                num_labels=c.num_classes,
                layer_norm_eps=1e-6,
            )
        )
    out = 4 if c.bottleneck else 1
    return t.ResNetForImageClassification(
        t.ResNetConfig(
            embedding_size=c.width,
            hidden_sizes=[out * c.width * 2**stage for stage in range(len(c.blocks))],
            depths=list(c.blocks),
            layer_type="bottleneck" if c.bottleneck else "basic",
            num_labels=c.num_classes,
        )
    )


def features(config: Model) -> np.ndarray:
    rng = np.random.default_rng(3)
    if hasattr(config, "image_size"):
        shape = (2, config.image_size, config.image_size, 3)
        return rng.normal(size=shape).astype("float32")
    # Not 0: Transformers gives BERT's padding token no gradient.
    return rng.integers(1, config.vocabulary, (2, min(config.context, 24)), "int32")


def logits_there(model, x: np.ndarray, **more):
    if x.ndim == 4:
        return model(torch.from_numpy(x.transpose(0, 3, 1, 2).copy()), **more).logits
    return model(torch.from_numpy(x).long(), **more).logits


def both(name: str, folder, **saving) -> tuple:
    """Returns config, their model, our model with their weights, and the report of loading."""
    config = configuration(name)
    theirs = peer(config)
    theirs.save_pretrained(folder, **saving)
    ours = models.build(config)
    return config, theirs, ours, models.load_weights(ours, folder)


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
    for entry in hugging_face.layout(config):
        names = [hugging_face.current_name(n) for n in entry.theirs]
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
