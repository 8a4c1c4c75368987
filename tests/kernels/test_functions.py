"""Which attention `auto` computes: by the kernel where it costs less, and never with an error."""

import numpy as np
import pytest

from tftpu import sharding
from tftpu.errors import UserError
from tftpu.kernels import functions
from tftpu.kernels.attention import attention, choose_rotation_kernel, choose_whole_kernel


@pytest.fixture
def kernels(monkeypatch):
    """Records the calls of the kernel `flash`, while a program for a TPU is traced: a list."""
    calls = []

    def record(query, *others):
        calls.append(query.shape)
        return query

    monkeypatch.setattr(functions, "flash_attention", record)
    with sharding.compiling_for("tpu"):
        yield calls


def attend(time=1024, head_dim=64, key_time=None, heads=1, implementation="auto", causal=True):
    query = np.zeros((1, time, heads, head_dim), "float32")
    key = np.zeros((1, key_time or time, heads, head_dim), "float32")
    return attention(query, key, key, causal=causal, implementation=implementation)


@pytest.mark.parametrize("time", [1024, 2048, 4096])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_auto_takes_the_kernel_where_a_step_costs_less(kernels, time, head_dim):
    attend(time, head_dim)
    assert len(kernels) == 1


@pytest.mark.parametrize(
    "shape",
    [
        {"time": 512},
        {"head_dim": 256},
        {"head_dim": 96},
        {"key_time": 2048, "causal": False},
    ],
    ids=str,
)
def test_auto_takes_plain_attention_elsewhere(kernels, shape):
    shape = {"time": 1024, **shape}
    assert attend(**shape).shape[1] == shape["time"]
    assert kernels == []


def test_auto_takes_plain_attention_of_more_tokens_than_the_older_generations_have_room_for():
    assert functions.is_cheaper(4096, 64, causal=True)
    assert not functions.is_cheaper(8192, 64, causal=True)


def test_what_the_kernel_does_not_take_is_an_error_of_flash_alone(monkeypatch):
    with sharding.compiling_for("tpu"):
        attend(512, 96)
        with pytest.raises(UserError, match=r"divides 128 or is a multiple of 128, not 96"):
            attend(512, 96, implementation="flash")


def test_auto_is_plain_where_no_kernel_can_run(kernels, monkeypatch):
    with sharding.compiling_for("cpu"):
        attend()

    def fail():
        raise UserError("There is no jax.")

    monkeypatch.setattr(functions, "_import_kernel", fail)
    attend()
    assert kernels == []


def test_auto_has_the_kernels_of_short_sequences_and_of_rotations():
    tokens = np.zeros((1, 197, 384), "float32")
    longer = np.zeros((1, 1024, 256), "float32")
    with sharding.compiling_for("tpu"):
        assert choose_whole_kernel("auto", tokens, 6) is functions.whole_attention
        assert choose_whole_kernel("plain", tokens, 6) is None
        assert choose_rotation_kernel("auto", longer, 2) is functions.rotate_pairs
        assert choose_rotation_kernel("auto", longer[:, :128], 2) is None
    assert choose_whole_kernel("auto", tokens, 6) is None
