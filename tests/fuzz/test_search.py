"""Any content of the files of a search is read as it was written, or refused by its name."""

import json
import shutil
from pathlib import Path

import pytest
from hypothesis import strategies as st

from tests.support.hostile.fuzzing import damaged, fuzzed, only_user_errors, reshaped
from tftpu.errors import UserError
from tftpu.launch.search import plan as plans
from tftpu.launch.search import report, space
from tftpu.launch.search.journal import Journal
from tftpu.launch.settings import config_flags

SPACE = ("optimizer.momentum=uniform:0..1",)


@pytest.fixture(scope="module")
def search(tmp_path_factory):
    """Returns the workdir of a search with two complete trials."""
    workdir = str(tmp_path_factory.mktemp("search"))
    fields = plans.extract_fields(config_flags.load("digits_resnet", []))
    plan = plans.Plan(
        config="digits_resnet", overrides=(), space=SPACE, metric="accuracy", fields=fields
    )
    plans.record(plan, workdir)
    study = plan.open_study(workdir)
    for value in (0.5, 0.25):
        trial = study.ask()
        trial.suggest_float("optimizer.momentum", 0, 1)
        trial.set_user_attr("overrides", [f"--config.optimizer.momentum={value}"])
        trial.report(value, 1)
        study.tell(trial, value)
    return Path(workdir)


@pytest.fixture
def copy(search, tmp_path):
    return Path(shutil.copytree(search, tmp_path / "copy"))


def show(workdir) -> None:
    """Reads all that `tftpu search --report` reads of a search."""
    plan = plans.read_recorded(str(workdir))
    experiment = config_flags.load(plan.config, list(plan.overrides))
    plans.describe_differences(plan.fields, plans.extract_fields(experiment)).encode()
    space.parse(plan.space, experiment)
    report.format_result(plan, plan.open_study(str(workdir)), str(workdir), []).encode()


def test_every_flipped_bit_of_the_journal_is_refused(tmp_path):
    Journal(str(tmp_path)).append_logs(
        [{"op_code": 4, "study_id": 0}, {"op_code": 6, "trial_id": 0, "values": [0.25]}]
    )
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    for bit in range(8 * len(whole)):
        data = bytearray(whole)
        data[bit // 8] ^= 1 << bit % 8
        path.write_bytes(bytes(data))
        with pytest.raises(UserError, match=r"00000000\.jsonl of the search's record is damaged"):
            Journal(str(tmp_path)).read_logs(0)


@fuzzed(40, number=st.integers(0, 10), data=st.data())
def test_any_journal(search, copy, number, data):
    path = sorted((copy / "study").iterdir())[number]
    whole = (search / "study" / path.name).read_bytes()
    path.write_bytes(data.draw(damaged(whole) | st.binary(max_size=64)))
    with only_user_errors():
        show(copy)
    path.write_bytes(whole)


@fuzzed(60, data=st.data())
def test_any_plan(search, copy, data):
    whole = (search / plans.FILE).read_bytes()
    drawn = data.draw(
        damaged(whole) | reshaped(json.loads(whole)).map(lambda value: json.dumps(value).encode())
    )
    (copy / plans.FILE).write_bytes(drawn)
    with only_user_errors():
        show(copy)
