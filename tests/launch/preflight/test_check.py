"""Checks that preflight of a config leaves the devices of its machine to others."""

import jax  # noqa: F401 (as on its engine, where Keras imports it before the check)
import pytest

from tftpu.engines.jax import cluster
from tftpu.errors import UserError
from tftpu.launch.preflight import check
from tftpu.launch.settings import config_flags


def check_text(experiment):
    check.check_text(experiment, [], 1, prices={}, verbose=False, time_limit=1.0)


@pytest.mark.parametrize("prepare", [check.prepare, check_text])
def test_no_device_of_this_machine_is_taken(prepare, monkeypatch):
    taken = []
    monkeypatch.setattr(cluster, "use_cpu", lambda: taken.append("cpu"))
    experiment = config_flags.load("python_gpt", ["--config.train.precision=mixed_float16"])
    with pytest.raises(UserError, match="mixed_bfloat16"):  # before any model is built
        prepare(experiment)
    assert taken == ["cpu"]
