"""`connect`: the devices it chooses, and its error when they are missing."""

import socket
import time

import pytest
import tensorflow as tf

import tftpu
from tftpu.engines.tensorflow import cluster
from tftpu.errors import UserError


def test_without_accelerators_auto_is_the_cpu(monkeypatch):
    monkeypatch.delenv("TPU_NAME", raising=False)
    engine = tftpu.connect()
    assert engine.data_shards == 1
    assert not engine.hardware.is_tpu


@pytest.mark.parametrize("count", [1, 2, 8])
def test_replicas_split_the_cpu(count):
    assert tftpu.connect(virtual_devices=count).data_shards == count


def test_more_replicas_than_were_set_up_fails_with_a_clear_error():
    tf.config.list_logical_devices()
    with pytest.raises(UserError, match=r"call tftpu.connect\(\) before"):
        tftpu.connect(virtual_devices=9)


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        ({"virtual_devices": 0}, "virtual_devices is 0: it must be 1 or more"),
        ({"virtual_devices": 2.5}, r"virtual_devices is 2\.5: its type must be int"),
        ({"virtual_devices": 2, "tpu": "local"}, "set only one of the two"),
    ],
)
def test_devices_that_cannot_be_meant_fail(devices, message):
    with pytest.raises(UserError, match=message):
        tftpu.connect(**devices)


@pytest.mark.parametrize("name", ["local", "my-tpu"])
def test_a_requested_tpu_that_is_missing_fails_with_the_likely_cause(name):
    with pytest.raises(UserError) as caught:
        tftpu.connect(tpu=name)
    assert f"tpu={name!r} was requested" in str(caught.value)
    assert "does not support TPUs" in str(caught.value)  # plain wheels have no TPU kernels
    assert not cluster.has_tpu_kernels()


def test_a_tpu_at_an_address_that_does_not_answer_fails_at_once():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and listens to nobody
        address = f"grpc://127.0.0.1:{taken.getsockname()[1]}"
        started = time.monotonic()
        with pytest.raises(UserError, match="nothing answered at grpc://127"):
            tftpu.connect(tpu=address)
    assert time.monotonic() - started < 10


def test_auto_connects_to_tpu_name(monkeypatch):
    monkeypatch.setenv("TPU_NAME", "local")
    assert cluster.find_tpu() == "local"
    with pytest.raises(UserError, match="tpu='local'"):
        tftpu.connect()


@pytest.mark.parametrize(
    ("name", "replicas"), [("v3-8", 8), ("v5e-4", 4), ("v5litepod-8", 8), ("v5p-8", 4)]
)
def test_a_simulated_slice_is_the_real_strategy(name, replicas):
    strategy = tftpu.simulated_slice(name).strategy
    assert isinstance(strategy, tf.distribute.TPUStrategy)
    assert strategy.num_replicas_in_sync == replicas
    with strategy.scope():
        variable = tf.Variable(1.0)
    assert type(variable).__name__ == "TPUDistributedVariable"


@pytest.mark.parametrize("name", ["v3", "v9-8", "8", "v3-0", "v3-8x"])
def test_an_unknown_slice_fails_with_a_clear_error(name):
    with pytest.raises(UserError, match=r"is not a TPU slice|There is no"):
        tftpu.simulated_slice(name)


def test_precision_by_name():
    import keras

    assert tftpu.set_precision("auto") == "float32"
    tftpu.set_precision("mixed_bfloat16")
    assert keras.layers.Dense(1).compute_dtype == "bfloat16"
    with pytest.raises(UserError, match="Did you mean 'mixed_bfloat16'"):
        tftpu.set_precision("bfloat16")
