"""The remarks on speed at the end of a run."""

import types

import pytest

from tftpu.config import Experiment, TrainConfig
from tftpu.input_pipelines.sources import Images
from tftpu.launch.run import summary
from tftpu.models.sizes import GPT, ResNet
from tftpu.runtime.goodput import Account, Clock


def list_lines(tmp_path, every: int, **seconds: float) -> list[str]:
    """Returns the lines on the speed of a run of 100 steps of 8 examples."""
    clock = Clock()
    clock.count(400, 1.0)
    for part, spent in seconds.items():
        clock._seconds[part] += spent
    trainer = types.SimpleNamespace(
        step=100, account=Account(None, clock), engine=types.SimpleNamespace(data_shards=1)
    )
    train = TrainConfig(steps=100, eval_every=every)
    experiment = Experiment(ResNet(), Images(global_batch_size=8), train=train)
    return [text for _, text in summary._list_speed_rows(experiment, trainer, str(tmp_path))]


def test_a_run_without_a_bottleneck_has_one_speed(tmp_path):
    lines = list_lines(tmp_path, 10, step=8.0, evaluation=1.0)
    assert lines == ["400 examples/s in training, after the first steps"]


def test_waiting_for_input_is_named(tmp_path):
    lines = list_lines(tmp_path, 10, step=2.0, input_wait=6.0)
    assert lines[1:] == ["100 examples/s with them, which waited for input"]


@pytest.mark.parametrize(("every", "less"), [(10, 90), (20, 100)])
def test_evaluation_that_takes_a_large_share_is_named(tmp_path, every, less):
    lines = list_lines(tmp_path, every, step=5.0, evaluation=5.0)
    assert len(lines) == 2
    said = f"of the run: evaluate less often, --config.train.eval_every={less}"
    assert lines[1].startswith("evaluation took 5") or lines[1].startswith("evaluation took 49")
    assert lines[1].endswith(said)


@pytest.mark.parametrize("every", [0, 50])
def test_few_evaluations_cannot_be_less_often(tmp_path, every):
    assert len(list_lines(tmp_path, every, step=1.0, evaluation=5.0)) == 1


def test_what_to_try_next_writes_where_nothing_is(tmp_path):
    experiment = types.SimpleNamespace(model=GPT("gpt2_small", lora=4))
    (tmp_path / "adapters").mkdir()
    found = summary._list_next_commands(experiment, str(tmp_path), "--prompt=a", False)
    assert found[1:] == [
        f"tftpu generate {tmp_path} --prompt=a",
        f"tftpu export-weights {tmp_path} --adapters --output={tmp_path}/adapters_2",
        f"tftpu export {tmp_path} --output={tmp_path}/exported",
    ]
