"""Fields that change nothing a run computes: each comparison of two configs leaves them out."""

import functools

import pytest

from tftpu.config import operational_fields, to_json
from tftpu.errors import UserError
from tftpu.input_pipelines import service
from tftpu.launch.run import start
from tftpu.launch.search import plan as plans
from tftpu.launch.settings import config_flags

CONFIG = "resnet50_imagenet"


def changed(path: str, value):
    """Returns the config with another value of one field."""
    experiment = config_flags.load(CONFIG, [])
    *groups, name = path.split(".")
    setattr(functools.reduce(getattr, groups, experiment), name, value)
    return experiment


def another(value):
    return (
        not value if isinstance(value, bool) else {str: "x", tuple: ("wandb",)}.get(type(value), 7)
    )


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    """Returns a workdir that has a checkpoint of the config."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "checkpoints" / "1").mkdir(parents=True)
    (folder / "checkpoints" / "1" / "manifest.json").write_text("{}")
    (folder / "config.json").write_text(to_json(config_flags.load(CONFIG, [])))
    return str(folder)


PATHS = operational_fields(config_flags.load(CONFIG, []))


def test_they_are_those_of_reading_saving_watching_and_of_the_machine():
    assert {"data.max_bad_records", "data.cache_dir", "data.download", "config_file"} <= {*PATHS}
    assert {"cluster", "train.log_every", "train.keep", "train.writers"} <= {*PATHS}
    assert {"data.on_bad_record", "model.remat"} <= {*PATHS}
    assert "model.scan" in operational_fields(config_flags.load("llama_110m_tinystories", []))
    assert not {"train.steps", "train.seed", "data.shuffle", "model.width"} & {*PATHS}


@pytest.mark.parametrize("path", [path for path in PATHS if path != "cluster"])
def test_a_run_resumes_and_a_search_and_a_data_service_continue_with_other_values(path, workdir):
    before = config_flags.load(CONFIG, [])
    *groups, name = path.split(".")
    now = changed(path, another(getattr(functools.reduce(getattr, groups, before), name)))
    assert to_json(now) != to_json(before)
    start._check_same_run(now, workdir)
    assert plans.describe_differences(plans.extract_fields(before), plans.extract_fields(now)) == ""
    assert service.describe_data(now.data) == service.describe_data(before.data)


def test_a_search_continues_on_other_devices():
    one, other = changed("cluster.tpu", "none"), changed("cluster.mesh", "fsdp:2")
    assert plans.describe_differences(plans.extract_fields(one), plans.extract_fields(other)) == ""


def test_any_other_field_is_compared(workdir):
    now = changed("data.shuffle", 7)
    with pytest.raises(UserError, match=r"data\.shuffle was 16384 and is 7"):
        start._check_same_run(now, workdir)
    before = config_flags.load(CONFIG, [])
    differing = plans.describe_differences(plans.extract_fields(before), plans.extract_fields(now))
    assert differing == "data.shuffle was 16384 and is 7"
    assert service.describe_data(now.data) != service.describe_data(before.data)
