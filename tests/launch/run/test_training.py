"""`tftpu train`, with a model that compiles in a second."""

import json

import pytest

from tftpu.launch import main as command_line

TINY = (
    *("train", "--config=digits_resnet", "--config.train.eval_every=0", "--tpu=none"),
    *("--config.model.width=8", "--config.model.blocks=(1,)", "--config.model.norm_batch=8"),
    "--config.data.global_batch_size=16",
)


@pytest.mark.slow
def test_a_run_that_has_its_steps_keeps_the_config_it_was_trained_with(tmp_path, capsys):
    def config(steps: int) -> dict:
        flags = (f"--config.train.steps={steps}", f"--workdir={tmp_path}")
        assert command_line.main([*TINY, *flags]) == 0
        return json.loads((tmp_path / "config.json").read_text())

    assert config(4)["train"]["steps"] == 4
    assert config(2)["train"]["steps"] == 4
    assert "nothing is left to train" in capsys.readouterr().out
