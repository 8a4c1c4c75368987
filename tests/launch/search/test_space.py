"""The grammar of a space: types of the fields, conditions, and errors that say what is wrong."""

import optuna
import pytest

from tftpu.errors import UserError
from tftpu.launch.search import space
from tftpu.launch.settings import config_flags


@pytest.fixture(scope="module")
def experiment():
    return config_flags.load("digits_resnet", [])


def parse(experiment, *texts):
    return space.parse(texts, experiment)


def test_bounds_and_choices_have_the_types_of_the_fields(experiment):
    rate, width, blocks, smoothing = parse(
        experiment,
        "optimizer.learning_rate=log:1e-4..1e-1",
        "config.model.width=uniform:8..64",
        "model.blocks=choice:(1,),(1, 1)",
        "train.label_smoothing = uniform:0..0.2",
    )
    assert (rate.kind, rate.whole, rate.low, rate.high) == ("log", False, 1e-4, 1e-1)
    assert (width.field, width.whole, width.low, width.high) == ("model.width", True, 8, 64)
    assert blocks.choices == ("(1,)", "(1, 1)")
    assert (smoothing.kind, smoothing.low, smoothing.high) == ("uniform", 0, 0.2)


def test_every_draw_is_an_override_of_the_config_within_its_bounds(experiment):
    texts = (
        "optimizer.learning_rate=log:1e-4..0.99999",
        "model.width=uniform:8..64",
        "optimizer.nesterov=choice:true,false",
    )
    dimensions = parse(experiment, *texts)
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    for _ in range(50):
        trial = study.ask()
        words = space.suggest(dimensions, trial)
        found = config_flags.load("digits_resnet", words)
        assert 1e-4 <= found.optimizer.learning_rate <= 0.99999
        drawn = trial.params["optimizer.learning_rate"]
        assert found.optimizer.learning_rate == pytest.approx(drawn, rel=1e-3)
        assert found.model.width == trial.params["model.width"]
        assert str(found.optimizer.nesterov).lower() == trial.params["optimizer.nesterov"]


@pytest.mark.parametrize("bounds", ["log:1e1..1e3", "uniform:8.0..64"])
def test_bounds_are_written_as_values_of_the_field_may_be(experiment, bounds):
    (width,) = parse(experiment, f"model.width={bounds}")
    assert width.whole and type(width.low) is type(width.high) is int


def test_the_draws_of_a_narrow_range_differ(experiment):
    dimensions = parse(experiment, "train.ema_momentum=uniform:0.9999..0.99999")
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    drawn = [space.suggest(dimensions, study.ask())[0] for _ in range(20)]
    assert len(set(drawn)) == 20
    assert all(0.9999 <= float(word.split("=")[1]) <= 0.99999 for word in drawn)


def test_a_field_with_a_condition_is_drawn_only_where_it_holds(experiment):
    dimensions = parse(
        experiment,
        "optimizer.name=choice:sgd,adamw",
        "optimizer.momentum=uniform:0..0.99 if optimizer.name=sgd",
        "optimizer.beta_2=uniform:0.9..0.999 if optimizer.name=adamw",
    )
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    seen = set()
    for _ in range(20):
        words = space.suggest(dimensions, study.ask())
        names = tuple(word.split("=")[0] for word in words)
        seen.add((words[0], names[1:]))
    assert seen == {
        ("--config.optimizer.name=sgd", ("--config.optimizer.momentum",)),
        ("--config.optimizer.name=adamw", ("--config.optimizer.beta_2",)),
    }


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("optimizer.learning_rate", "write FIELD=uniform"),
        ("optimizer.learning_rate=lgo:1..2", "'lgo'. Did you mean 'log'"),
        ("optimizer.learning_rat=log:1e-3..1", "Did you mean 'learning_rate'"),
        ("optimizer.learning_rate=log:0..1", "a logarithmic range needs bounds above 0"),
        ("optimizer.learning_rate=log:1..1", "the lower bound 1 must be below 1"),
        ("optimizer.learning_rate=log:1e-3", "write two bounds"),
        ("optimizer.learning_rate=log:a..b", "must be a number"),
        ("model.width=uniform:1.5..3", "must be a whole number"),
        ("optimizer.name=uniform:1..3", "are not numbers: write choice"),
        ("model.blocks=uniform:1..3", "are not numbers: write choice"),
        ("train.global_clipnorm=uniform:none..1", "none is not a number"),
        ("model.width=choice:64", "two values or more"),
        ("model.width=choice:64,64", "named twice"),
        ("model.width=choice:64,wide", "must be a whole number"),
        ("optimizer.momentum=uniform:0..1 if optimizer.name=sgd", "optimizer.name=choice"),
    ],
)
def test_errors_name_the_text_and_what_is_allowed(experiment, text, said):
    with pytest.raises(UserError) as refused:
        parse(experiment, text)
    assert said in str(refused.value)


def test_a_field_is_named_once_and_a_space_is_not_empty(experiment):
    with pytest.raises(UserError, match="named twice"):
        parse(experiment, "model.width=choice:8,16", "model.width=uniform:8..16")
    with pytest.raises(UserError, match="nothing to search"):
        parse(experiment)
