"""The engine for the TPU of a machine."""

import pytest

import tftpu
from tftpu.config import ClusterConfig
from tftpu.engines import selection
from tftpu.errors import UserError
from tftpu.tpu import environment


@pytest.fixture
def tpu7x(monkeypatch):
    """A machine with a TPU7x, whose packages would let TensorFlow use an older TPU."""
    monkeypatch.setattr(environment, "has_tpu", lambda: True)
    monkeypatch.setattr(environment, "can_jax_drive_tpus", lambda: False)
    monkeypatch.setenv("TPU_ACCELERATOR_TYPE", "tpu7x-8")


def test_auto_takes_jax_where_tensorflow_does_not_support_the_tpu(tpu7x, monkeypatch):
    assert selection.choose_engine(ClusterConfig()) == "jax"
    assert "does not support tpu7x" in selection.find_reason_for_jax(ClusterConfig())
    assert selection.choose_engine(ClusterConfig(tpu="none")) == "tensorflow"
    monkeypatch.setenv("TPU_ACCELERATOR_TYPE", "v5litepod-8")
    assert selection.choose_engine(ClusterConfig()) == "tensorflow"


def test_tensorflow_is_refused_there_and_allowed_on_the_cpu_beside(tpu7x):
    with pytest.raises(UserError, match="tpu7x: use the JAX engine, with --config"):
        tftpu.connect(engine="tensorflow")
    assert tftpu.connect(tpu="none", engine="tensorflow").data_shards == 1
