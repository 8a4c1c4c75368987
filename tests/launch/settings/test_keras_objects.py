"""Losses and metrics of a config that Keras does not know or cannot make again."""

import sys

import keras
import numpy as np
import pytest

from tests.support import projects
from tftpu.config import KerasObject
from tftpu.errors import UserError
from tftpu.launch.main import main
from tftpu.launch.settings import config_flags, keras_objects

pytestmark = pytest.mark.usefixtures("in_scratch_project")

KWARGS = ("scale=1.0, **kwargs", "super().__init__(**kwargs)")
SETTING = ', "scale": self.scale'


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            [*zip(KWARGS, ("scale=1.0", "super().__init__()"), strict=True)],
            "loss: each model gets a copy made from get_config(), but no losses.Scaled can be made "
            "from it: TypeError: Scaled.__init__() got an unexpected keyword argument "
            "'name'. Its __init__",
        ),
        ([(SETTING, "")], "loss: scale of Scaled is 2.0, but 1.0 in the copy"),
        ([("**super().get_config()", "**{}[0]")], "Scaled.get_config() fails with KeyError: 0."),
    ],
    ids=["no name", "a setting is left out", "get_config fails"],
)
def test_an_object_that_cannot_be_made_again_is_refused_with_its_config(changes, message, tmp_path):
    text = projects.LOSSES
    for before, after in changes:
        assert before in text
        text = text.replace(before, after)
    rest = "loss=__import__('losses').Scaled(scale=2.0)"
    path = str(projects.write(tmp_path, rest, losses=text))
    with pytest.raises(UserError) as error:
        config_flags.load(path, [])
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("line", "name"), [("twice = lambda *_: 0", "<lambda>"), ("twice = wraps(half)(get)", "half")]
)
def test_a_function_that_its_name_does_not_find_is_refused(line, name, tmp_path):
    """The wrapped one would be the loss of the model."""
    more = f"from functools import wraps\n\ndef get(*_): pass\n\n{line}\n"
    rest = "loss=__import__('losses').twice"
    path = str(projects.write(tmp_path, rest, losses=projects.LOSSES + more))
    with pytest.raises(UserError, match=f"loss is the function '{name}', which another process"):
        config_flags.load(path, [])


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("loss=hubber", "loss is 'hubber', but keras.losses has nothing of that name. Did you"),
        ("metrics=auk", "metrics is 'auk'"),
        ("loss=sparse_crossentropy", "Did you mean 'sparse_categorical_crossentropy'?"),
        ("loss=crossentropy", "loss is 'crossentropy', but keras.losses has nothing of that name"),
        ("metrics=MeanIoU", "metrics is 'MeanIoU', which needs arguments"),
        ("optimizer=adamm", "Did you mean 'adam'?"),
        ("weighted_metrics=mae,auk", "weighted_metrics is 'auk'"),
    ],
)
@pytest.mark.parametrize(
    "command",
    [
        ["config", "show", "mine.py"],
        ["launch", "tpu-vm", "--config=mine.py", "--dry_run"],
        ["launch", "vertex", "--config=mine.py", "--dry_run"],
        ["train", "--config=mine.py"],
    ],
    ids=lambda words: words[0],
)
def test_a_name_that_keras_does_not_have_is_found_early(command, flag, message, tmp_path, capsys):
    data = projects.DATA.replace("def training(self, context):", "training = None\n    def f(s):")
    projects.write(tmp_path, "loss={'a': ('mse', None)}, metrics=['accuracy']", data=data)
    assert main([*command, f"--config.{flag}"]) == 2
    assert message in capsys.readouterr().err


REGISTERED = """
import keras

@keras.saving.register_keras_serializable("far")
class Vocab(keras.layers.Layer):
    def __init__(self, *_, path=None):
        raise AssertionError(f"{path} would be read")

@keras.saving.register_keras_serializable("far")
def scaled(y_true, y_pred, by=1.0):
    return by * keras.ops.mean(y_true - y_pred, axis=-1)
"""


@pytest.fixture(params=["site-packages", "beside the config"])
def folder(request, tmp_path, monkeypatch):
    """Yields the kind of folder that holds the module `far`, which is loaded."""
    (tmp_path / request.param).mkdir()
    (tmp_path / request.param / "far.py").write_text(REGISTERED)
    monkeypatch.syspath_prepend(tmp_path / request.param)
    known = keras.saving.get_custom_objects()
    before = {*known}
    __import__("far")
    yield request.param
    del sys.modules["far"]
    for name in {*known} - before:
        del known[name]


def wrapping(fn, **settings):
    config = {"fn": fn, "name": "a", **settings}
    part = {"module": "keras.metrics", "class_name": "MeanMetricWrapper", "config": config}
    return KerasObject(part)


def functions(name):
    """Returns the forms in which a description may name a function."""
    function = {"module": "builtins", "class_name": "function", "config": name}
    return name, function, {**function, "registered_name": "function"}


def test_a_description_names_what_own_code_has_registered_and_only_functions(folder):
    """Keras calls it with arguments of the description."""
    for fn in (*functions("far>Vocab"), [*functions("far>Vocab")]):
        with pytest.raises(UserError, match="loss: 'far>Vocab' is registered by far, so commands"):
            keras_objects.build_objects(wrapping(fn, path="/etc/hostname"), "loss")
    for fn in functions("far>scaled"):
        if folder == "site-packages":
            with pytest.raises(UserError, match="'far>scaled' is registered by far"):
                keras_objects.build_objects(wrapping(fn, by=3.0), "metrics")
        else:
            metric = keras_objects.build_objects(wrapping(fn, by=3.0), "metrics")
            metric.update_state(np.ones((2, 1)), np.zeros((2, 1)))
            assert float(metric.result()) == 3.0


def test_an_object_may_have_the_name_of_a_registered_class(folder):
    described = KerasObject(keras.saving.serialize_keras_object(keras.metrics.Mean("far>Vocab")))
    assert keras_objects.build_objects(described, "metrics").name == "far>Vocab"


@pytest.mark.parametrize("inner", ["{}", "{{'a': {}}}"])
def test_a_description_in_place_of_a_loss_is_refused(inner, tmp_path):
    loss = inner.format("{'class_name': 'MeanSquaredError', 'config': {}}")
    path = str(projects.write(tmp_path, f"loss={loss}"))
    with pytest.raises(
        UserError,
        match=r"loss.* is a dictionary that describes .*: give the object itself, such as",
    ):
        config_flags.load(path, [])
