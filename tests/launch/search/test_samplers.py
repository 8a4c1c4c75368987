"""The samplers of a plan: what the trials of a study draw."""

from tftpu.launch.search import space
from tftpu.launch.search.plan import Plan
from tftpu.launch.settings import config_flags

TEXTS = (
    "optimizer.name=choice:adamw,sgd",
    "optimizer.momentum=uniform:0..0.99 if optimizer.name=sgd",
)


def test_qmc_draws_another_value_in_each_trial_for_a_field_with_a_condition(tmp_path, capfd):
    plan = Plan(
        config="digits_resnet",
        overrides=(),
        space=TEXTS,
        trials=16,
        metric="accuracy",
        fields={},
        sampler="qmc",
        seed=4,
    )
    dimensions = space.parse(TEXTS, config_flags.load(plan.config, []))
    study = plan.open_study(str(tmp_path))
    drawn = []
    for number in range(plan.trials):
        study.sampler = plan.build_sampler(number)
        trial = study.ask()
        drawn += space.suggest(dimensions, trial)[1:]
        study.tell(trial, 0.5)
    assert len(drawn) > 4 and len(set(drawn)) == len(drawn)
    assert "RandomSampler" not in capfd.readouterr().err
