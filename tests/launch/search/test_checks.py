"""Checks before anything runs: the metric, and values that no trial could train with."""

import pytest

from tftpu.errors import UserError
from tftpu.launch.search import checks, space
from tftpu.launch.settings import config_flags


def check(*texts, changes=()):
    experiment = config_flags.load("digits_resnet", list(changes))
    checks.check_space(space.parse(texts, experiment), changes, experiment)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("optimizer.name=choice:sgd,adamww", "optimizer.name=adamww cannot be trained with"),
        ("model.width=uniform:-8..-1", "model.width=-8 cannot be trained with"),
        ("optimizer.momentum=uniform:0..1.5", "optimizer.momentum=1.5 cannot be trained with"),
        ("optimizer.decay=choice:cosine,step", "optimizer.decay_steps is empty"),
        ("train.best_metric=choice:loss,accuracy", "set it with --metric"),
        ("metrics=choice:AUC,AUX", "keras.metrics has nothing of that name"),
    ],
)
def test_a_value_that_training_refuses_is_named(text, said):
    with pytest.raises(UserError) as refused:
        check(text)
    assert said in str(refused.value)


def test_a_field_has_its_value_in_one_place():
    change = "--config.model.width=8"
    with pytest.raises(UserError, match=f"{change} sets a field of the space"):
        check("model.width=choice:8,16", changes=(change,))
    with pytest.raises(UserError, match="both give the length of the run"):
        check("train.epochs=choice:1,2", changes=("--config.train.steps=5",))
    with pytest.raises(UserError, match="both give the length of the run"):
        check("train.steps=choice:5,10", "train.epochs=choice:1,2")


def test_a_value_that_training_takes_with_others_of_the_space_is_allowed():
    check(
        "optimizer.decay=choice:cosine,step",
        "optimizer.decay_steps=choice:(5,),(5,9) if optimizer.decay=step",
    )
    # A norm of 256 examples needs a larger batch than the config has.
    check("model.norm_batch=choice:16,256", "data.global_batch_size=choice:256,512")
    with pytest.raises(UserError, match=r"model.norm_batch=256 cannot be trained with"):
        check("model.norm_batch=choice:16,256")


@pytest.mark.parametrize(
    ("given", "changes", "found"),
    [
        (None, (), "accuracy"),
        ("loss", (), "loss"),
        (None, ("--config.train.best_metric=loss",), "loss"),
        ("loss", ("--config.train.best_metric=loss",), "loss"),
    ],
)
def test_the_metric_is_the_one_that_is_given_or_that_of_the_config(given, changes, found):
    experiment = config_flags.load("digits_resnet", list(changes))
    assert checks.choose_metric(given, changes, experiment) == found
