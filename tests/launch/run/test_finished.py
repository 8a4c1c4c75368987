"""The checkpoint that commands of a finished run restore."""

import json

import pytest

from tftpu.launch.run import finished
from tftpu.storage import files


@pytest.mark.parametrize(
    ("restored", "newest", "said"),
    [(5, 9, "Step 5 of 9 is the best by loss"), (9, 9, ""), (5, 5, "")],
)
def test_a_checkpoint_that_is_not_the_newest_is_explained(restored, newest, said, tmp_path, capsys):
    for step in {5, newest}:
        files.write_whole(tmp_path / f"checkpoints/{step}/manifest.json", b"{}")
    best = {"step": 5, "metric": "loss", "value": 0.5}
    files.write_whole(tmp_path / "checkpoints/best", json.dumps(best).encode())
    finished._report_best(restored, str(tmp_path))
    printed = capsys.readouterr().err
    assert printed.startswith(said) and bool(printed) == bool(said)
