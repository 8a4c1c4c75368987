"""KerasHub's backbones train under `Trainer` as by Keras's `fit`; the page has all of them."""

import json

import numpy as np
import pytest

import tftpu
from tests.benchmarks import atlas
from tests.support.hub import builders, routes, training
from tests.support.programs import jax_process
from tftpu.errors import UserError

# A mixture of experts, images, a decoder beside an encoder.
DIFFERENT = ("Mixtral", "ViT", "T5Gemma")
# A decoder, an encoder, speech.
OTHERS = ("Qwen3", "Bert", "Whisper")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "remat"), [("GPT2Backbone", "none"), ("VGGBackbone", "none"), ("VGGBackbone", "block")]
)
def test_it_trains_as_by_keras_on_one_device(name, remat):
    found = routes.try_backbone(name, tftpu.connect("none", virtual_devices=1), remat)
    assert found.kind == "equal" and found.update > 1e-3, found


@pytest.mark.slow
@pytest.mark.parametrize(
    "kinds", [DIFFERENT, pytest.param(OTHERS, marks=pytest.mark.exhaustive)], ids="-".join
)
def test_different_ones_train_as_by_keras_on_a_mesh(kinds):
    names = [f"{name}Backbone" for name in kinds]
    printed = jax_process.output("hub.routes", "fsdp", *names).splitlines()
    found = [routes.Result(**json.loads(line)) for line in printed]
    assert [result.kind for result in found] == ["equal"] * len(names), found
    assert all(result.update > 1e-3 and result.divided > 0.9 for result in found), found


def test_a_difference_is_measured_over_the_change_by_training():
    before, expected, found = ([np.array([3.0, last])] for last in (4.0, 5.0, 5.001))
    ours, theirs = (
        training.Trained(np.array([4.0, loss]), w) for loss, w in ((2.0002, found), (2.0, expected))
    )
    compared = training.measure(ours, theirs, before)
    assert compared[:4] == pytest.approx((1e-4, 1e-3, 1 / 5, 0.0))
    assert compared.kind == "differs"
    assert compared._replace(noise=9e-5).kind == "differs"
    assert compared._replace(noise=2e-4).kind == "rounding"
    assert compared._replace(losses=1e-6, weights=1e-6).kind == "equal"


def test_an_error_is_a_result_with_its_cause(monkeypatch):
    engine = tftpu.connect("none", virtual_devices=1)
    found = routes.try_backbone("NoSuchBackbone", engine)
    assert found == routes.Result("keras", "KeyError: 'NoSuchBackbone'")

    def refuse(*_):
        raise UserError("Not so.\nThis way.")

    monkeypatch.setattr(training, "compare", refuse)
    assert routes.try_backbone("ViTBackbone", engine) == routes.Result(
        "refused", "Not so. This way."
    )


def test_the_page_has_what_was_measured_of_every_backbone():
    stored = atlas.read_results()
    if not stored["routes"]:
        pytest.skip("the page is of other versions of the packages")
    names = list(builders.list_backbones())
    assert all(found.keys() == {*names} for found in stored["routes"].values())
    assert atlas.PAGE.read_text() == atlas.render_page(names, stored)
