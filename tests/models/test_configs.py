"""The zoo's configs are valid on the slices they name, and trace with the shapes of their data."""

import keras
import pytest
import tensorflow as tf

from tests.support.repository.cases import mostly_rare
from tests.support.steps.simulated_slice import (
    assert_one_reduction_and_no_host_op,
    traced,
)
from tftpu import input_pipelines
from tftpu.config import PerReplicaBatch
from tftpu.launch.run import experiment
from tftpu.launch.settings import config_flags

REPLICAS = {
    "bert_base_sst2": 8,
    "convnext_tiny_imagenet": 32,
    "efficientnetv2_s_imagenet": 32,
    "llama_110m_tinystories": 8,
    "vit_s16_imagenet": 8,
}
# Each kind of block once or twice: depth changes only the time that tracing takes.
SHALLOW = {
    "bert_base_sst2": ["--config.model.layers=1"],
    "convnext_tiny_imagenet": ["--config.model.blocks=(1,1,1,2)"],
    "efficientnetv2_s_imagenet": ["--config.model.blocks=(1,1,2,1,1,2)"],
    "llama_110m_tinystories": ["--config.model.layers=1"],
    "vit_s16_imagenet": ["--config.model.layers=1"],
}


@pytest.mark.parametrize("config", REPLICAS)
def test_a_config_is_valid_and_says_where_its_recipe_is_from(config):
    settings = config_flags.load(config, [])
    settings.validate(REPLICAS[config])
    assert settings.optimizer.warmup_steps < settings.train.steps
    if hasattr(settings.model, "image_size"):
        assert settings.model.image_size == settings.data.image_size
        assert settings.model.num_classes == settings.data.num_classes
    text = (config_flags.CONFIGS / f"{config}.py").read_text().split('"""')[1]
    assert f"tftpu train {config}" in text
    assert "Recipe:" in text and "Not run here" in text


@pytest.mark.slow
@pytest.mark.parametrize(
    "config", mostly_rare(REPLICAS, ("llama_110m_tinystories", "vit_s16_imagenet"))
)
def test_a_config_traces_on_a_slice(config, slice_of_eight):
    settings = config_flags.load(config, SHALLOW[config])
    keras.config.set_dtype_policy("mixed_bfloat16")
    with slice_of_eight.scope():
        model = experiment.build_model(settings)
    share = PerReplicaBatch(settings.data.global_batch_size, REPLICAS[config], 1).examples
    if settings.data.name in ("imagenet2012", "tinystories"):
        batch = input_pipelines.batch_spec(settings.data, share)
    else:  # records without files
        row = tf.TensorSpec((share, 128), tf.int32)
        batch = ({"tokens": row, "segments": row}, tf.TensorSpec((share,), tf.int32))
    step, ops = traced(model, batch, global_clipnorm=settings.train.global_clipnorm)
    assert_one_reduction_and_no_host_op(step, ops)
