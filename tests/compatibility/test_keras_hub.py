"""KerasHub's backbones train under `Trainer` as by Keras's `fit`; the page has all of them."""

import dataclasses
import json

import pytest

import tftpu
from tests.benchmarks import atlas
from tests.support.hub import builders, routes, training
from tests.support.programs import jax_process

# A decoder, an encoder, a mixture of experts, images, a decoder beside an encoder, speech.
DIFFERENT = ("Qwen3", "Bert", "Mixtral", "ViT", "T5Gemma", "Whisper")


@pytest.mark.parametrize("name", ["GPT2Backbone", "VGGBackbone"])
def test_it_trains_as_by_keras_on_one_device(name):
    found = routes.try_backbone(name, tftpu.connect("none", virtual_devices=1))
    assert found.kind == "equal" and found.update > 1e-3, found


@pytest.mark.slow
def test_different_ones_train_as_by_keras_on_a_mesh():
    names = [f"{name}Backbone" for name in DIFFERENT]
    printed = jax_process.output("hub.routes", "fsdp", *names).splitlines()
    found = [routes.Result(**json.loads(line)) for line in printed]
    assert [result.kind for result in found] == ["equal"] * len(names), found
    assert all(result.update > 1e-3 for result in found), found


def test_other_weights_are_a_difference():
    """One weight of a thousand, off by a thousandth of its update, is noticed."""
    ...


def test_the_page_has_every_backbone_and_what_was_measured():
    stored, names = atlas.read_results(), list(builders.list_backbones())
    assert stored["routes"] and all(found.keys() == {*names} for found in stored["routes"].values())
    assert atlas.PAGE.read_text() == atlas.render_page(names, stored)
