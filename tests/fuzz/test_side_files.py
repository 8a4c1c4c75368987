"""Any content of any side file is survived: a run starts, saves and is shown."""

import json
import math
import tempfile

import pytest
from hypothesis import strategies as st

from tests.support.hostile.fuzzing import ANY_JSON, damaged, fuzzed, only_user_errors, reshaped
from tests.support.hostile.texts import written
from tests.support.models.leaves import leaves
from tftpu.checkpoint import manifest
from tftpu.checkpoint.store import Best, Checkpoints
from tftpu.launch.commands.finished import plot, status
from tftpu.launch.preflight import reports
from tftpu.runtime import goodput
from tftpu.storage import locks
from tftpu.storage.lines import Lines
from tftpu.storage.owner import Owner

BEST = {"step": 1, "metric": "loss", "value": 0.5}
LINE = {"step": 3, "split": "train", "loss": 0.5, "accuracy": 0.25, "time": 1.5}
SLICE = {"slice": "v3-8", "step_ms": 1.5, "replicas": 8, "examples_per_second": 100.0}


OWNER = json.loads(Owner.from_this_process(exclusive=True).encode())


with tempfile.TemporaryDirectory() as _scratch:
    MANIFEST, ACCOUNT = written(_scratch)


def content(value) -> st.SearchStrategy[bytes]:
    """Draws the content of a file that should hold a JSON value."""
    whole = json.dumps(value).encode()
    return damaged(whole) | reshaped(value).map(encoded) | ANY_JSON.map(encoded)


def encoded(value) -> bytes:
    return json.dumps(value).encode()


@pytest.fixture
def run(tmp_path):
    """Returns a workdir with two checkpoints, and an account."""
    written(str(tmp_path))
    return tmp_path


def show(workdir) -> None:
    """Prints what `tftpu status` and `tftpu plot` find."""
    with only_user_errors():
        found = status.read_status(str(workdir))
        "\n".join(status.format_status(found)).encode()
        json.dumps(found).encode()
    with only_user_errors():
        curves = plot.read_curves(str(workdir))
        assert all(len(c.steps) == len(c.values) for c in curves.curves.values())


@pytest.mark.slow
@fuzzed(60, data=content(BEST))
def test_any_mark_of_the_best(run, data):
    path = run / "checkpoints/best"
    path.write_bytes(data)
    show(run)
    checkpoints = Checkpoints(str(run))
    checkpoints.save(3, leaves(3), {})
    assert checkpoints.list_steps()[-1] == 3
    assert checkpoints.take_failure() is None
    checkpoints.save(2, leaves(2), {}, Best("loss", 0.25))
    checkpoints.wait()
    assert checkpoints.find_best() == 2


@pytest.mark.slow
@fuzzed(80, data=content(ACCOUNT))
def test_any_account(run, data):
    path = run / goodput.FILE
    path.write_bytes(data)
    show(run)
    account = goodput.Account(str(run), goodput.Clock())
    account.write(goodput.RUNNING, goodput.Facts(step=3))
    assert goodput.read(str(run)).facts.step == 3
    assert all(seconds >= 0 for seconds in account.sum_seconds().values())


@pytest.mark.medium
@fuzzed(80, lines=st.lists(content(LINE), max_size=3))
def test_any_metrics(run, lines):
    path = run / "metrics.jsonl"
    path.write_bytes(b"\n".join([encoded(LINE), *lines]))
    show(run)
    metrics = Lines(str(path), 5)
    metrics.append(json.dumps(LINE | {"step": 6}) + "\n")
    metrics.close()
    steps = [json.loads(line)["step"] for line in path.open()]
    assert steps[0] == 3 and steps[-1] == 6
    assert all(step <= 5 for step in steps[:-1])


@pytest.mark.slow
@fuzzed(80, data=content(MANIFEST))
def test_any_manifest_of_a_checkpoint(run, data):
    (run / "checkpoints/2/manifest.json").write_bytes(data)
    show(run)
    with only_user_errors():  # a manifest that lists fewer files is that of another model
        assert Checkpoints(str(run)).restore(leaves(0)).step in (1, 2)


@fuzzed(60, data=content({"slices": [SLICE, SLICE]}))
def test_any_predictions(run, data):
    (run / reports.FILE).write_bytes(data)
    assert all(math.isfinite(rate) for rate in reports.read_rates(str(run)).values())
    reports.read_step_times(str(run), 8).encode()


@fuzzed(60, data=content(OWNER))
def test_any_lock(tmp_path, data):
    (tmp_path / ".lock").write_bytes(data)
    with locks.locked(tmp_path):
        locks.check_lock(tmp_path)


def flipped(whole: bytes):
    """Yields a copy for each bit that can be flipped."""
    for bit in range(8 * len(whole)):
        data = bytearray(whole)
        data[bit // 8] ^= 1 << bit % 8
        yield bytes(data)


def test_every_flipped_bit_of_a_manifest_is_noticed(run):
    path = run / "checkpoints/2/manifest.json"
    whole = manifest.read(str(path.parent))
    noticed, content = 0, path.read_bytes()
    for data in flipped(content):
        path.write_bytes(data)
        try:
            found = manifest.read(str(path.parent))
        except ValueError:
            noticed += 1
        else:  # the name of the checksum itself
            assert {n: f.blocks for n, f in found.items()} == {
                n: f.blocks for n, f in whole.items()
            }
    assert noticed > 8 * len(content) - 8 * len(', "crc32c": "')


def test_a_flipped_bit_in_the_name_of_a_file_restores_the_older_checkpoint(run):
    path = run / "checkpoints/2/manifest.json"
    whole = path.read_bytes()
    start = whole.index(b"model.safetensors")
    for bit in range(8 * len(b"model.safetensors")):
        data = bytearray(whole)
        data[start + bit // 8] ^= 1 << bit % 8
        path.write_bytes(bytes(data))
        assert Checkpoints(str(run)).restore(leaves(0)).step == 1


@pytest.mark.parametrize("name", ["²", "٣", "007", "3 ", "-1", "0x2", "1e3"])
def test_folders_that_are_no_steps_are_left_alone(run, name):
    (run / "checkpoints" / name).mkdir()
    (run / "checkpoints" / name / "manifest.json").write_bytes(b"{}")
    show(run)
    checkpoints = Checkpoints(str(run), keep=1)
    assert checkpoints.restore(leaves(0)).step == 2
    checkpoints.save(3, leaves(3), {})
    assert checkpoints.list_steps()[-1] == 3
    assert (run / "checkpoints" / name / "manifest.json").exists()
