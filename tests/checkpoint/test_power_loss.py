"""Whatever a power loss leaves of a workdir, the run resumes from a whole checkpoint."""

import functools
import json
import shutil

import pytest

from tests.support.fakes import power_loss
from tests.support.models.leaves import leaves, step_of, value_of
from tftpu.checkpoint.store import Best, Checkpoints
from tftpu.storage import files, lines
from tftpu.storage.lines import Lines

STATE = {"seen": "so far"}


@pytest.mark.medium
@pytest.mark.parametrize("best", [Best("loss", 0.5), None])
def test_a_whole_checkpoint_survives_a_power_loss_at_any_moment_of_a_save(best, tmp_path):
    workdir, scratch = tmp_path / "run", tmp_path / "scratch"
    workdir.mkdir()
    scratch.mkdir()
    checkpoints = Checkpoints(str(workdir), keep=1)
    for step in (1, 2):
        checkpoints.save(step, leaves(step), STATE, best)
    assert checkpoints.list_steps() == [2]
    with power_loss.watching(workdir) as outages:
        checkpoints.save(3, leaves(3), STATE, best)
        checkpoints.wait()
    found = set()
    for outage in outages:
        for survivor in outage.survivors(scratch):
            again = Checkpoints(str(survivor), keep=1)
            target = leaves(0)
            restored = again.restore(target)
            assert restored is not None, outage.before
            assert restored.step in (2, 3), outage.before
            assert value_of(target) == step_of(target) == restored.step
            assert restored.state == STATE
            assert again.find_best() in ((2, 3) if best else (None,)), outage.before
            if restored.step not in found:  # the run that resumes saves as always
                again.save(4, leaves(4), STATE)
                assert again.list_steps() == ([4] if best is None else [again.find_best(), 4])
                assert not [n for n in files.list_names(again.folder) if n.endswith(".tmp")]
            found.add(restored.step)
    assert found == {2, 3}
    assert len(outages) > 20


@pytest.mark.medium
def test_a_checkpoint_that_survives_lacks_no_line_before_it(tmp_path):
    """The lines are synced before it becomes valid; later and torn ones are dropped."""
    workdir, scratch = tmp_path / "run", tmp_path / "scratch"
    workdir.mkdir()
    scratch.mkdir()
    checkpoints = Checkpoints(str(workdir), keep=1)
    metrics = Lines(str(workdir / "metrics.jsonl"), 0)

    def train(first: int, last: int) -> None:
        for step in range(first, last + 1):
            metrics.append(json.dumps({"step": step, "split": "train", "loss": 0.5}) + "\n")
            metrics.flush()
        first_of_all = functools.partial(metrics.flush, durable=True)
        checkpoints.save(last, leaves(last), STATE, first=first_of_all)
        checkpoints.wait()

    train(1, 4)
    with power_loss.watching(workdir) as outages:
        train(5, 8)
        metrics.append(json.dumps({"step": 9}) + "\n")
        metrics.flush()
    for outage in outages:
        for survivor in outage.survivors(scratch):
            resumed = Checkpoints(str(survivor)).restore(leaves(0)).step
            path = str(survivor / "metrics.jsonl")
            Lines(path, resumed).close()
            steps = [step for step, _, _ in lines.read(path)]
            assert steps == list(range(1, resumed + 1)), outage.before


def test_the_first_checkpoint_of_a_run_is_durable_once_it_is_saved(tmp_path):
    """Also the folders above it, which the save made, are synced."""
    home, scratch = tmp_path / "home", tmp_path / "scratch"
    home.mkdir()
    scratch.mkdir()
    with power_loss.watching(home) as outages:
        checkpoints = Checkpoints(str(home / "runs/first"))
        checkpoints.save(1, leaves(1), STATE)
        checkpoints.wait()
    for survivor in outages[-1].survivors(scratch):
        assert Checkpoints(str(survivor / "runs/first")).restore(leaves(0)).step == 1


def test_a_side_file_is_the_old_or_the_new_one_after_a_power_loss(tmp_path):
    folder, scratch = tmp_path / "run", tmp_path / "scratch"
    folder.mkdir()
    scratch.mkdir()
    path = folder / "best"
    old, new = (json.dumps({"step": step}).encode() for step in (1, 2))
    files.write_whole(path, old)
    with power_loss.watching(folder) as outages:
        files.write_whole(path, new)
    left = {(survivor / "best").read_bytes() for o in outages for survivor in o.survivors(scratch)}
    assert left == {old, new}
    assert {(s / "best").read_bytes() for s in outages[-1].survivors(scratch)} == {new}


def test_a_file_that_is_not_synced_is_torn_or_lost(tmp_path):
    """The support of these tests can fail: a plain write does not survive."""
    folder, scratch = tmp_path / "run", tmp_path / "scratch"
    folder.mkdir()
    scratch.mkdir()
    with power_loss.watching(folder) as outages:
        (folder / "plain").write_bytes(b"0123456789")
    left = set()
    for survivor in outages[-1].survivors(scratch):
        path = survivor / "plain"
        left.add(path.read_bytes() if path.exists() else None)
    assert {None, b"", b"0123456789"} <= left
    shutil.rmtree(scratch)
