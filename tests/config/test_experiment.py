"""An experiment takes models and data of anybody, and says what to write instead of others."""

import dataclasses
import json
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tftpu
from tftpu.config import Function, KerasObject, from_json, to_json, to_plain
from tftpu.errors import UserError
from tftpu.input_pipelines.sources import Synthetic


@dataclasses.dataclass
class Mine(tftpu.Model):
    sizes: list[int] = dataclasses.field(default_factory=lambda: [3, 4])
    names: dict[str, int] = dataclasses.field(default_factory=lambda: {"a": 1})
    pair: tuple[int, float] = (1, 0.5)


class Plain(tftpu.Model):
    width: int = 8

    def build(self) -> keras.Model:
        return keras.Sequential([keras.layers.Dense(self.width)])


def experiment(**fields: Any) -> tftpu.Experiment:
    return tftpu.Experiment(**{"model": Mine(), "data": Synthetic(), **fields})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model": keras.Sequential()}, "is a Keras object (Sequential). A config describes how"),
        ({"model": Mine}, "is the class Mine, not an object: write Mine()"),
        ({"model": "resnet50"}, "write tftpu.models.config('resnet50')"),
        ({"model": Plain()}, "@dataclasses.dataclass above `class Plain(tftpu.Model)`"),
        ({"data": tf.data.Dataset.range(3)}, "class MyData(tftpu.Data)"),
        ({"data": (np.zeros(3), np.zeros(3))}, "is a tuple. A config describes how to read"),
    ],
)
def test_anything_else_than_a_model_or_data_says_what_to_write(fields, message):
    with pytest.raises(UserError) as error:
        experiment(**fields)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("cls", "call", "message"),
    [
        (tftpu.Model, lambda m: m.build(), "has no method build(self)"),
        (tftpu.Data, lambda d: d.training(None), "has no method training(self, context)"),
    ],
)
def test_a_missing_method_is_named(cls, call, message):
    with pytest.raises(UserError) as error:
        call(cls())
    assert message in str(error.value)


def test_an_experiment_of_own_classes_survives_json():
    before = experiment(
        model=Mine(sizes=[1], names={"b": 2}, pair=(3, 1)),
        optimizer=KerasObject({"class_name": "Adam", "config": {"betas": [0.9, 0.99]}}),
        loss={"out": Function("losses.half")},
        metrics=("mae", KerasObject({"class_name": "AUC", "config": {}})),
        train=tftpu.Train(epochs=3),
    )
    before.validate()
    after = from_json(to_json(before))
    assert after == before
    assert after.model.sizes == [1]
    assert after.optimizer.description["config"]["betas"] == [0.9, 0.99]


def test_a_config_json_from_before_a_field_existed_is_read():
    plain = json.loads(to_json(experiment()))
    for field in ("loss", "metrics", "config_file"):
        del plain[field]
    assert from_json(json.dumps(plain)) == experiment()


def test_what_json_cannot_hold_is_named():
    with pytest.raises(UserError, match=r"config\.loss\['a'\] is a object, which cannot be"):
        to_plain(experiment(loss={"a": object()}))


@pytest.mark.parametrize(
    ("fields", "wrong"),
    [
        ({"sizes": (1,)}, "sizes"),
        ({"sizes": ["x"]}, "sizes"),
        ({"pair": (1,)}, "pair"),
        ({"pair": (0.5, 0.5)}, "pair"),
        ({"names": 3}, "names"),
    ],
)
def test_the_types_of_own_fields_are_checked(fields, wrong):
    experiment().validate()
    with pytest.raises(UserError, match=rf"model\.{wrong} is .*its type must be"):
        experiment(model=Mine(**fields)).validate()


def test_steps_or_epochs_give_the_length():
    assert tftpu.Train().steps == 1000
    assert tftpu.Train(epochs=3).steps is None
    with pytest.raises(UserError, match=r"set only one of them"):
        experiment(train=tftpu.Train(steps=5, epochs=3)).validate()
    with pytest.raises(UserError, match=r"depends on the data"):
        _ = tftpu.Train(epochs=3).length


@pytest.mark.parametrize("optimizer", ["adam", "RMSprop", "lars"])
def test_optimizers_go_by_keras_names(optimizer):
    experiment(optimizer=optimizer).validate()
    with pytest.raises(UserError, match="Did you mean"):
        experiment(optimizer=f"{optimizer}x").validate()


def test_smoothing_without_the_default_loss_is_refused():
    experiment(train=tftpu.Train(label_smoothing=0.1)).validate()
    with pytest.raises(UserError, match="set it there"):
        experiment(loss="mse", train=tftpu.Train(label_smoothing=0.1)).validate()
