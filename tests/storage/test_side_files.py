"""Files that a run can do without never stop it, whatever they contain."""

import json
import math
import os

import pytest

from tests.support.models.leaves import leaves
from tests.support.models.training import compiled, data, make_trainer
from tftpu.checkpoint.store import Best, Checkpoints
from tftpu.launch.commands.finished import plot, status
from tftpu.launch.preflight import reports
from tftpu.launch.run import result
from tftpu.storage import side_files
from tftpu.storage.lines import Lines

DEEP = b"[" * 100_000 + b"]" * 100_000
NOT_JSON = [b"{", b"\xff\xfe{}", b"", b"\x00" * 40, DEEP, b"9" * 5000]
OTHER_SHAPES = [
    *(b"[]", b"{}", b"3", b"null", b'"text"'),
    b'{"step": [1], "metric": 3, "value": {}, "slices": 7}',
    b'{"step": "1", "metric": [], "value": "x", "slices": {}}',
    b'{"step": 1.5, "metric": null, "value": NaN, "slices": null}',
    b'{"step": true, "metric": "loss", "value": Infinity, "slices": "all"}',
]


@pytest.mark.parametrize("content", NOT_JSON + OTHER_SHAPES)
def test_a_damaged_side_file_is_ignored_with_a_warning(content, tmp_path, caplog):
    checkpoints = Checkpoints(str(tmp_path))
    checkpoints.save(1, leaves(1), {}, Best("loss", 0.5))
    checkpoints.save(2, leaves(2), {})
    checkpoints.wait()
    assert checkpoints.find_best() == 1
    best, preflight = tmp_path / "checkpoints/best", tmp_path / reports.FILE
    for path in (best, preflight):
        path.write_bytes(content)
    readers = {
        checkpoints.find_best: best,
        lambda: result.read_best(str(tmp_path)): best,
        lambda: status._find_checkpoints(str(tmp_path))["best"]: best,
        lambda: reports.read_rates(str(tmp_path)): preflight,
        lambda: reports.read_step_times(str(tmp_path), 1): preflight,
    }
    for read, path in readers.items():
        caplog.clear()
        assert not read()
        assert f"{path} cannot be read and is ignored" in caplog.text
    caplog.clear()
    # The run looks up the best one, to keep it. What it finds is kept, too.
    for step in (3, 4):
        checkpoints.save(step, leaves(step), {})
        checkpoints.wait()
    assert checkpoints.take_failure() is None
    assert caplog.text.count("is damaged and is ignored") == 1
    assert (tmp_path / "checkpoints/best.damaged").read_bytes() == content
    assert not best.exists()
    assert checkpoints.list_steps() == [2, 3, 4]


def test_side_files_that_are_no_files_are_ignored(tmp_path, caplog):
    """A pipe would be read forever."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    for name in ("pipe", "folder", "circle"):
        assert side_files.read(tmp_path / name) is None
        assert side_files.take(tmp_path / name) is None
        assert os.path.lexists(tmp_path / f"{name}.damaged")
        assert side_files.take(tmp_path / name) is None
        assert caplog.text.count(f"{name} is damaged") == 1


@pytest.mark.parametrize(
    "item",
    ["3", "null", "[]", "{}", '{"slice": 3}', '{"slice": "v3-8", "step_ms": "x", "replicas": 8}']
    + ['{"slice": "v3-8", "step_ms": NaN, "replicas": 8, "examples_per_second": []}'],
)
def test_a_damaged_prediction_is_left_out(item, tmp_path):
    good = '{"slice": "v4-8", "step_ms": 2.0, "replicas": 8, "examples_per_second": 5.0}'
    (tmp_path / reports.FILE).write_text(f'{{"slices": [{item}, {good}]}}')
    assert reports.read_rates(str(tmp_path)) == {"v4-8": 5.0}
    assert reports.read_step_times(str(tmp_path), 8) == "v4-8: 2 ms"


@pytest.mark.parametrize(
    "line",
    [
        *(b"\xff\xfe", b"{", b"[]", b"{}", b"3", b'{"step": "2", "split": "train", "loss": 1}'),
        *(b'{"step": 2, "split": ["train"], "loss": 1}', DEEP),
    ],
)
def test_a_damaged_line_of_metrics_is_left_out(line, tmp_path):
    good = b'{"step": 2, "split": "train", "loss": 0.5, "other": "text", "huge": 1%s}' % (
        b"0" * 400
    )
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"\n".join([line, good, line, b""]))
    assert status._read_last_metrics(str(tmp_path)) == {"train": {"step": 2, "loss": 0.5}}
    assert plot.read_curves(str(tmp_path)).curves["loss", "train"].values == [0.5]
    Lines(str(path), 4)
    assert good + b"\n" in path.read_bytes()


MANIFESTS = [
    *(b"{", b"\xff", b"", DEEP, b"[]", b"3", b"{}", b'{"files": []}', b'{"files": {}}'),
    *(b'{"files": {"state.json": 3}}', b'{"files": {"state.json": [[1, "x"]]}}'),
    *(b'{"files": {"state.json": []}}', b'{"files": {"state.json": [[1]]}}'),
    b'{"files": {"state.json": [[4611686018427387904, 1]]}}',
    b'{"files": {"state.json": [[1, 1]], "../1/state.json": [[1, 1]]}}',
    b'{"files": {"state.json": [[1, 1]], "/etc/passwd": [[1, 1]]}}',
]


@pytest.mark.parametrize("content", MANIFESTS)
def test_a_checkpoint_with_a_damaged_manifest_is_skipped_with_a_warning(content, tmp_path, caplog):
    checkpoints = Checkpoints(str(tmp_path))
    for step in (1, 2):
        checkpoints.save(step, leaves(step), {"step": step})
    checkpoints.wait()
    (tmp_path / "checkpoints/2/manifest.json").write_bytes(content)
    restored = checkpoints.restore(leaves(0))
    assert (restored.step, restored.state) == (1, {"step": 1})
    assert caplog.text.count("checkpoints/2 is damaged") == 1


@pytest.mark.slow
def test_a_run_starts_and_ends_with_every_side_file_damaged(tmp_path, caplog):
    """Each is reported once and set aside; the run writes new ones."""
    content = b'\xff\xfe\x00{"step": {}}\n'
    workdir = tmp_path / "run"
    make_trainer(compiled(), workdir, log_every=5).fit(
        data(), steps=10, validation_data=data(), verbose=0
    )
    names = ["goodput.json", "metrics.jsonl", "checkpoints/best", ".lock", "train.log"]
    for name in names:
        (workdir / name).write_bytes(content)
    caplog.clear()
    make_trainer(compiled(), workdir, log_every=5).fit(
        data(), steps=20, validation_data=data(), verbose=0
    )
    for name in ("goodput.json", "checkpoints/best"):
        assert (workdir / f"{name}.damaged").read_bytes() == content
        assert caplog.text.count(f"{name} is damaged") == 1
        assert json.loads((workdir / name).read_bytes())
    assert (workdir / "metrics.jsonl.damaged").read_bytes() == content
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").open()]
    assert [line["step"] for line in lines if line["split"] == "train"] == [15, 20]
    assert (workdir / "train.log").read_bytes().startswith(content)
    found = status.read_status(str(workdir))
    assert found["step"] == 20 and math.isfinite(found["metrics"]["eval"]["loss"])
