"""The same weights in Hugging Face Transformers and in the zoo."""

import numpy as np
import pytest

from tests.support.models import zoo
from tftpu import models
from tftpu.config import ModelConfig
from tftpu.models import sizes

torch = pytest.importorskip("torch", reason="make test-parity installs it")


transformers = pytest.importorskip("transformers")


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


def configuration(name: str) -> ModelConfig:
    config = TINY.get(name) or models.config(name)
    for field in ("dropout", "stochastic_depth"):
        if hasattr(config, field):
            setattr(config, field, 0.0)
    return config


def peer(config: ModelConfig):
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


def _peer(c: ModelConfig):
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


def features(config: ModelConfig) -> np.ndarray:
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
