"""An experiment takes models and data of anybody, and says what to write instead of others."""

import dataclasses
import json
import re
import sys
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
class Mine(tftpu.ModelConfig):
    sizes: list[int] = dataclasses.field(default_factory=lambda: [3, 4])
    names: dict[str, int] = dataclasses.field(default_factory=lambda: {"a": 1})
    weights: dict[int, float] = dataclasses.field(default_factory=dict)
    options: dict[int, Any] = dataclasses.field(default_factory=dict)
    pair: tuple[int, float] = (1, 0.5)
    extra: list[str] | None = None
    anything: Any = 3
    plain: list = dataclasses.field(default_factory=lambda: [1])


class Plain(tftpu.ModelConfig):
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
        ({"model": Plain()}, "@dataclasses.dataclass above `class Plain(tftpu.ModelConfig)`"),
        ({"data": tf.data.Dataset.range(3)}, "class MyData(tftpu.DataConfig)"),
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
        (tftpu.ModelConfig, lambda m: m.build(), "has no method build(self)"),
        (tftpu.DataConfig, lambda d: d.training(None), "has no method training(self, context)"),
    ],
)
def test_a_missing_method_is_named(cls, call, message):
    with pytest.raises(UserError) as error:
        call(cls())
    assert message in str(error.value)


def test_an_experiment_of_own_classes_survives_json():
    before = experiment(
        model=Mine(sizes=[1], names={"b": 2}, pair=(3, 1), extra=["x"]),
        optimizer=KerasObject({"class_name": "Adam", "config": {"betas": [0.9, 0.99]}}),
        loss={"out": Function(f"{__name__}.experiment")},
        metrics=("mae", KerasObject({"class_name": "AUC", "config": {}})),
        train=tftpu.TrainConfig(epochs=3),
    )
    before.validate()
    after = from_json(to_json(before), [__name__])
    assert after == before
    after.validate()
    assert after.model.sizes == [1]
    assert after.optimizer.description["config"]["betas"] == [0.9, 0.99]


@pytest.mark.parametrize(
    "fields",
    [
        {"model": Mine(weights={0: 1.0, 1: 5.0})},
        {"model": Mine(options={0: "a", 1: {"b": 2}})},
        {"model": Mine(names={"class": 2, "items": 3})},
        {"loss": {"class": "mse", "box": "mae"}},
        {"metrics": {"class": ("mse",)}},
        {"optimizer": KerasObject({"class_name": "Adam", "config": {"x": {"class": "y"}}})},
    ],
)
def test_any_keys_of_a_dict_survive_json(fields):
    """An output may be named "class", and numbers be keys."""
    before = experiment(**fields)
    before.validate()
    assert from_json(to_json(before), [__name__]) == before


@pytest.mark.parametrize("key", [None, True, (1, 2), 1, 0.5])
def test_a_key_that_json_cannot_hold_is_refused(key):
    with pytest.raises(UserError, match=r"config\.model\.anything has the key"):
        to_json(experiment(model=Mine(anything={key: 1})))


@pytest.mark.parametrize(
    ("field", "value", "place"),
    [
        ("plain", [{1: 2}], "plain[0]"),  # a list of no declared type
        ("names", {1: 2}, "names"),
        ("weights", {"a": 1.0}, "weights"),
        ("weights", {0.5: 1.0}, "weights"),
        ("options", {0: {1: 2}}, "options[0]"),
    ],
)
def test_a_key_of_another_type_than_declared_is_refused(field, value, place):
    """config.json has only texts as keys, and the declared type says which are numbers."""
    with pytest.raises(UserError, match=re.escape(f"config.model.{place} has the key")):
        to_json(experiment(model=Mine(**{field: value})))


def test_a_config_json_from_before_a_field_existed_is_read():
    plain = json.loads(to_json(experiment()))
    for field in ("loss", "metrics", "config_file"):
        del plain[field]
    assert from_json(json.dumps(plain)) == experiment()


def hostile(**fields):
    """The JSON of an experiment in which some fields were replaced."""
    return json.dumps({**json.loads(to_json(experiment())), **fields})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model": {"class": "hostile_module.Model"}}, "'hostile_module' is not part of the run"),
        ({"model": {"class": "subprocess.Popen", "args": "true"}}, "'subprocess' is not part of"),
        ({"model": {"class": f"{__name__}.experiment"}}, "'tests' is not part of the run"),
        ({"model": {"class": "tftpu.config.experiment.Cluster"}}, "which is not a Model"),
        ({"data": {"class": "tftpu.config.experiment.Experiment"}}, "which is not a Data"),
        ({"model": {"class": "tftpu.config.to_json"}}, "is not a config of this version of tftpu"),
        ({"model": {"class": "tftpu.optim.optimizers.LARS"}}, "is not a config of this version"),
        ({"loss": {"class": "tftpu.config.objects.Function", "name": "os.system"}}, "'os' is not"),
        ({"loss": {"class_name": "Lambda", "config": {}, "module": "keras.layers"}}, "The loss in"),
        (
            {
                "optimizer": {
                    "class": "tftpu.config.objects.KerasObject",
                    "description": {"module": "hostile_module", "class_name": "A", "config": {}},
                }
            },
            "'hostile_module' is not part of the run",
        ),
        (
            {
                "loss": {
                    "class": "tftpu.config.objects.KerasObject",
                    "description": {"module": "json", "class_name": "function", "config": "load"},
                }
            },
            "describes json.function, which cannot be recreated",
        ),
        ({"model": []}, "model is ()"),
        ({"model": {"class": 3}}, "cannot be read"),
    ],
)
def test_a_config_json_makes_no_object_of_classes_that_are_not_the_runs(
    tmp_path, monkeypatch, fields, message
):
    ran = tmp_path / "ran"
    (tmp_path / "hostile_module.py").write_text(f"open({str(ran)!r}, 'w')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError) as error:
        from_json(hostile(**fields))
    assert message in str(error.value)
    assert not ran.exists()


def test_classes_of_the_runs_own_folder_are_imported(tmp_path, monkeypatch):
    (tmp_path / "own_parts.py").write_text(
        "import dataclasses, tftpu\n"
        "@dataclasses.dataclass\nclass Head:\n    width: int = 1\n"
        "@dataclasses.dataclass\nclass Net(tftpu.ModelConfig):\n"
        "    head: Head = dataclasses.field(default_factory=Head)\n"
        "    more: dict[str, Head] = dataclasses.field(default_factory=dict)\n"
        "    sizes: list[tuple[int, int]] = dataclasses.field(default_factory=list)\n"
    )
    head = {"class": "own_parts.Head", "width": 3}
    model = {"class": "own_parts.Net", "head": head, "more": {"a": head}, "sizes": [[1, 2]]}
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match="'own_parts' is not part of the run"):
        from_json(hostile(model=model))
    found = from_json(hostile(model=model), ["own_parts"]).model
    assert (found.head.width, found.more["a"].width, found.sizes) == (3, 3, [(1, 2)])
    monkeypatch.delitem(sys.modules, "own_parts")


def test_deep_json_is_refused():
    with pytest.raises(UserError, match=r"config\.json cannot be read"):
        from_json("[" * 100_000)


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
        ({"names": tftpu.TrainConfig()}, "names"),
    ],
)
def test_the_types_of_own_fields_are_checked(fields, wrong):
    experiment().validate()
    with pytest.raises(UserError, match=rf"model\.{wrong} is .*its type must be"):
        experiment(model=Mine(**fields)).validate()


def test_steps_or_epochs_give_the_length():
    assert tftpu.TrainConfig().steps == 1000
    assert tftpu.TrainConfig(epochs=3).steps is None
    with pytest.raises(UserError, match=r"set only one of them"):
        experiment(train=tftpu.TrainConfig(steps=5, epochs=3)).validate()
    with pytest.raises(UserError, match=r"depends on the data"):
        _ = tftpu.TrainConfig(epochs=3).length


@pytest.mark.parametrize("optimizer", ["adam", "RMSprop", "lars"])
def test_optimizers_go_by_keras_names(optimizer):
    experiment(optimizer=optimizer).validate()
    with pytest.raises(UserError, match="Did you mean"):
        experiment(optimizer=f"{optimizer}x").validate()


@pytest.mark.parametrize("field", ["decay_power", "decay_rate"])
def test_a_decay_to_a_negative_or_infinite_rate_is_refused(field):
    """The power -1 ends at an infinite rate, and the rate -1 climbs the gradient."""
    experiment(optimizer=tftpu.OptimizerConfig(**{field: 0.0})).validate()
    with pytest.raises(UserError, match=rf"optimizer\.{field} is -1\.0: it must be 0\.0 or more"):
        experiment(optimizer=tftpu.OptimizerConfig(**{field: -1.0})).validate()


@pytest.mark.parametrize("optimizer", ["Nadam", tftpu.OptimizerConfig("nadam")])
def test_a_keras_optimizer_that_cannot_be_split_says_why(optimizer):
    with pytest.raises(UserError, match=r"'nadam'\. Its step also updates a value that all"):
        experiment(optimizer=optimizer).validate()


def test_smoothing_without_the_default_loss_is_refused():
    experiment(train=tftpu.TrainConfig(label_smoothing=0.1)).validate()
    with pytest.raises(UserError, match="Set it there"):
        experiment(loss="mse", train=tftpu.TrainConfig(label_smoothing=0.1)).validate()
