"""Where a run's numbers go: TensorBoard, metrics.jsonl, the console; and profiles."""

import json

import keras
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import tftpu
from tests.test_trainer import compiled, data
from tftpu import console as consoles
from tftpu.config import profile_plan
from tftpu.errors import UserError
from tftpu.goodput import Clock


def test_tensorboard_gets_every_scalar_and_the_learning_rate_curve(tmp_path):
    rates = keras.optimizers.schedules.PolynomialDecay(0.1, 40, 0.02)
    trainer = tftpu.Trainer(
        compiled(optimizer=keras.optimizers.SGD(rates)), tmp_path, log_every=10, verbose=False
    )
    trainer.fit(data(), 40, validation_data=data(), validation_every=20)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").open()]
    for split in ("train", "eval"):
        events = EventAccumulator(str(tmp_path / split), size_guidance={"tensors": 0}).Reload()
        tags = set(events.Tags()["tensors"])
        assert {"loss", "accuracy"} <= tags
        steps = [event.step for event in events.Tensors("loss")]
        assert steps == [line["step"] for line in lines if line["split"] == split]
    curve = [line["learning_rate"] for line in lines if line["split"] == "train"]
    assert curve == pytest.approx([0.08, 0.06, 0.04, 0.02])


def test_a_profile_of_a_window_of_steps_is_written_and_readable(tmp_path):
    from xprof.convert import raw_to_tool_data

    trainer = tftpu.Trainer(compiled(), tmp_path, profile="10:14", verbose=False)
    trainer.fit(data(), 30)
    (trace,) = tmp_path.rglob("*.xplane.pb")
    stats, _ = raw_to_tool_data.xspace_to_tool_data([str(trace)], "framework_op_stats", {})
    assert b"MatMul" in stats
    assert trainer.clock.seconds()["profiling"] > 0


def test_a_profile_plan_is_windows_of_steps_and_slow_loops():
    assert profile_plan("") == ((), False)
    assert profile_plan("100:110") == (((100, 110),), False)
    assert profile_plan("100:110,slow,500:520") == (((100, 110), (500, 520)), True)
    for wrong in ("100", "110:100", "a:b", "5:5", "fast"):
        with pytest.raises(UserError, match="FIRST:LAST"):
            profile_plan(wrong)


def test_without_a_terminal_the_console_prints_plain_lines(capsys):
    console = consoles.Console(100)
    console.write(50, "train", {"loss": 0.123456, "grad_norm": 1.0, "examples_per_sec": 12345.6})
    console.write(100, "eval", {"loss": 2.0})
    console.close()
    assert capsys.readouterr().out.splitlines() == [
        "train step 50/100  loss 0.1235  examples_per_sec 12,346",
        "eval  step 100/100  loss 2",
    ]


def test_throughput_is_that_of_steps_alone():
    clock = Clock()
    clock.count(100, 2.0)
    assert clock.rate() == 50.0
    assert clock.window_rate() == 50.0
    clock.count(10, 1.0)
    assert clock.window_rate() == 10.0
    assert clock.rate() == pytest.approx(110 / 3)
