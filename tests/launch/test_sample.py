"""Samples of byte models."""

import types
from typing import Any

import numpy as np

from tftpu.launch import config_flags, sample


def test_a_vocabulary_larger_than_bytes_is_sampled_as_bytes():
    """The extra tokens, however likely, stand for no byte."""
    experiment = config_flags.load("python_gpt", ["--config.model.vocabulary=512"])
    logits = np.zeros((1, experiment.data.context, 512), np.float32)
    logits[..., 300], logits[..., ord("x")] = 200.0, 100.0
    one_host = types.SimpleNamespace(count=1)
    trainer: Any = types.SimpleNamespace(predict_same=lambda batch: logits, hosts=one_host)
    assert sample.text(experiment, trainer, 5) == "def xxxxx"
