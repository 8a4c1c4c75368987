"""The run to begin in place of one that cannot resume."""

import tftpu
from tftpu.launch.run.another_run import suggest_run
from tftpu.launch.settings import config_flags


class Own(tftpu.ModelConfig):
    """A model of a user's own."""


def test_weights_are_named_where_init_from_reads_them(tmp_path):
    (tmp_path / "checkpoints/5").mkdir(parents=True)
    (tmp_path / "checkpoints/5/manifest.json").touch()
    experiment, workdir = config_flags.load("digits_resnet", []), str(tmp_path)
    weights = f"where --config.model.init_from={tmp_path}/checkpoints/5 adds the weights"
    assert weights in suggest_run(experiment, workdir)
    experiment.model.lora = 2
    assert suggest_run(experiment, workdir) == f"--workdir={tmp_path}_2"
    experiment.model = Own()
    assert suggest_run(experiment, workdir) == f"--workdir={tmp_path}_2"
