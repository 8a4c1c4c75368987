"""Losses and metrics of a config that Keras does not know or cannot make again."""

import pytest

from tests.support import projects
from tftpu.errors import UserError
from tftpu.launch import config_flags
from tftpu.launch.main import main

pytestmark = pytest.mark.usefixtures("in_scratch_project")

KWARGS = ("scale=1.0, **kwargs", "super().__init__(**kwargs)")
SETTING = ', "scale": self.scale'


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            [*zip(KWARGS, ("scale=1.0", "super().__init__()"), strict=True)],
            "loss: no losses.Scaled can be made from its get_config(), as each model gets one: "
            "TypeError: Scaled.__init__() got an unexpected keyword argument 'name'. Its __init__",
        ),
        ([(SETTING, "")], "loss: scale of Scaled is 2.0, and 1.0 in another"),
        ([("**super().get_config()", "**{}[0]")], "get_config() of Scaled fails with KeyError: 0."),
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
        ("loss=hubber", "loss is 'hubber', and keras.losses has nothing of that name. Did you"),
        ("metrics=auk", "metrics is 'auk'"),
        ("loss=sparse_crossentropy", "Did you mean 'sparse_categorical_crossentropy'?"),
        ("loss=crossentropy", "loss is 'crossentropy', and keras.losses has nothing of that name"),
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
