"""Files that a run can do without never stop it."""

import pytest

from tests.support.leaves import leaves
from tftpu.checkpoint.store import Best, Checkpoints
from tftpu.launch import predictions
from tftpu.launch.commands import plot, status
from tftpu.storage.lines import Lines

DAMAGED = [b"{", b"\xff\xfe{}", b"[]", b"{}", b""]


@pytest.mark.parametrize("content", DAMAGED)
def test_a_damaged_side_file_is_ignored_with_a_warning(content, tmp_path, caplog):
    checkpoints = Checkpoints(str(tmp_path))
    checkpoints.save(1, leaves(1), {}, Best("loss", 0.5))
    checkpoints.save(2, leaves(2), {})
    assert checkpoints.best() == 1
    best, preflight = tmp_path / "checkpoints/best", tmp_path / predictions.FILE
    for path in (best, preflight):
        path.write_bytes(content)
    readers = {
        checkpoints.best: best,
        lambda: plot._best(str(tmp_path)): best,
        lambda: status._checkpoints(str(tmp_path))["best"]: best,
        lambda: predictions.rates(str(tmp_path)): preflight,
        lambda: predictions.step_times(str(tmp_path), 1): preflight,
    }
    for read, path in readers.items():
        caplog.clear()
        assert not read()
        assert f"{path} cannot be read and is ignored" in caplog.text
    checkpoints.save(3, leaves(3), {})  # which looks up the best one, to keep it
    assert checkpoints.steps() == [1, 2, 3]
    assert checkpoints.take_failure() is None


@pytest.mark.parametrize("line", [b"\xff\xfe", b"{", b"[]", b"{}", b"3"])
def test_a_damaged_line_of_metrics_is_left_out(line, tmp_path):
    good = b'{"step": 2, "split": "train", "loss": 0.5}'
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"\n".join([line, good, line, b""]))
    assert status._last_metrics(str(tmp_path)) == {"train": {"step": 2, "loss": 0.5}}
    assert plot.curves(str(tmp_path)).curves["loss", "train"].values == [0.5]
    Lines(str(path), 4)
    assert path.read_bytes() == good + b"\n"
