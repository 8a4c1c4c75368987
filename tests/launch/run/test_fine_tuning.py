"""`--config.model.init_from` and `--config.model.freeze`, in runs that train."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file

import tftpu
from tftpu.launch.commands.training import train

pytestmark = pytest.mark.slow


def run(workdir, steps: int, *overrides: str) -> None:
    flags = [
        f"--config.train.steps={steps}",
        "--config.train.steps_per_loop=10",
        "--config.train.log_every=10",
        "--config.train.eval_every=0",
        "--config.train.checkpoint_every=0",
        "--config.optimizer.warmup_steps=0",
        *overrides,
    ]
    train.run(
        train.Options(
            config="digits_resnet", overrides=tuple(flags), workdir=str(workdir), tpu="none"
        )
    )


def losses(workdir) -> list[float]:
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").open()]
    return [line["loss"] for line in lines if line["split"] == "train"]


def weights(workdir, step: int) -> dict[str, np.ndarray]:
    arrays = load_file(workdir / "checkpoints" / str(step) / "model.safetensors")
    return {name.split(" ", 1)[1]: array for name, array in arrays.items()}


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    """Returns the workdir of 60 steps on the digits."""
    workdir = tmp_path_factory.mktemp("pretrained")
    run(workdir, 60)
    return workdir


def test_a_run_starts_from_given_weights_and_resumes_from_its_own(pretrained, tmp_path, capsys):
    start = f"--config.model.init_from={pretrained}/checkpoints/60"
    freeze = "--config.model.freeze=stem*,stage1_*"
    capsys.readouterr()
    run(tmp_path, 10, start, freeze)
    before, after = weights(pretrained, 60), weights(tmp_path, 10)
    said = capsys.readouterr().out
    assert f"Weights from {pretrained}/checkpoints/60: {len(before)} variables loaded." in said
    assert losses(tmp_path)[0] < losses(pretrained)[0] / 1.5  # not from scratch
    for path in before:  # moving statistics of frozen norms, too
        same = (before[path] == after[path]).all()
        assert same == path.startswith(("stem", "stage1_")), path

    # The same command with more steps loads the run's own checkpoint.
    run(tmp_path, 20, start, freeze)
    said = capsys.readouterr().out
    assert "Weights from" not in said and "Resuming from the checkpoint of step 10" in said


@pytest.mark.slow
def test_a_head_for_other_classes_is_trained_from_scratch_with_a_message(
    pretrained, tmp_path, capsys
):
    capsys.readouterr()
    run(
        tmp_path,
        10,
        f"--config.model.init_from={pretrained}/checkpoints/60",
        "--config.model.num_classes=12",
    )
    said = capsys.readouterr().out
    assert "2 not loaded, because the file has another shape: head/kernel" in said
    assert weights(tmp_path, 10)["head/kernel"].shape[1] == 12
    assert losses(tmp_path)[0] > 1.5  # about the logarithm of 12: the head is untrained


def test_weights_of_another_model_end_the_run(pretrained, tmp_path):
    start = f"--config.model.init_from={pretrained}/checkpoints/60"
    with pytest.raises(tftpu.UserError, match=r"Nothing was loaded .* shapes differ"):
        run(tmp_path, 10, start, "--config.model.width=16")
    # A run that did not start leaves nothing that would keep the next from starting.
    with pytest.raises(tftpu.UserError, match=r"no file or folder '.*/61'"):
        run(tmp_path, 10, start.replace("60", "61"))


def test_a_pattern_that_matches_nothing_ends_the_run(tmp_path):
    with pytest.raises(tftpu.UserError, match=r"model.freeze: no variable matches 'stage9"):
        run(tmp_path, 10, "--config.model.freeze=stage9_*")
