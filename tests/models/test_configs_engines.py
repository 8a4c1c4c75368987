"""Every config of the zoo trains on both engines, with the same losses."""

import json

import numpy as np
import pytest

import tftpu
from tests.support.models import zoo_configs
from tests.support.programs import jax_process

pytestmark = pytest.mark.exhaustive  # tests/engines/jax compares the families


@pytest.fixture(scope="module")
def on_jax() -> dict[str, list[float]]:
    """Returns the losses of each config on two by two devices, of which two share the model."""
    return json.loads(jax_process.output("models.zoo_configs"))


@pytest.mark.parametrize("config", zoo_configs.NAMES)
def test_a_config_trains_on_both_engines(config, on_jax):
    losses = zoo_configs.losses(config, tftpu.connect("none", virtual_devices=1))
    assert len(losses) == zoo_configs.STEPS and np.isfinite(losses).all()
    np.testing.assert_allclose(on_jax[config], losses, rtol=1e-4)
