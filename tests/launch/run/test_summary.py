"""The remarks on speed at the end of a run."""

import types

import pytest

from tests.support.data import data_sets
from tftpu.config import Experiment, TrainConfig
from tftpu.input_pipelines.formats.manifest import Feature
from tftpu.input_pipelines.sources import Images, StreamedImages
from tftpu.launch.run import summary
from tftpu.models.keras_hub.config import KerasHub
from tftpu.models.sizes import GPT, ResNet
from tftpu.runtime.goodput import Account, Clock


def list_lines(tmp_path, every: int, **seconds: float) -> list[str]:
    """Returns the lines on the speed of a run of 100 steps of 8 examples."""
    clock = Clock()
    clock.count(400, 1.0)
    for part, spent in seconds.items():
        clock._seconds[part] += spent
    trainer = types.SimpleNamespace(
        step=100, account=Account(None, clock), engine=types.SimpleNamespace(data_shards=1)
    )
    train = TrainConfig(steps=100, eval_every=every)
    experiment = Experiment(ResNet(), Images(global_batch_size=8), train=train)
    return [text for _, text in summary._list_speed_rows(experiment, trainer, str(tmp_path))]


def test_a_run_without_a_bottleneck_has_one_speed(tmp_path):
    lines = list_lines(tmp_path, 10, step=8.0, evaluation=1.0)
    assert lines == ["400 examples/s in training, after the first steps"]


def test_waiting_for_input_is_named(tmp_path):
    lines = list_lines(tmp_path, 10, step=2.0, input_wait=6.0)
    assert lines[1:] == ["100 examples/s with the first steps, which waited for input"]


def test_waiting_that_slowed_nothing_is_not_named(tmp_path):
    assert len(list_lines(tmp_path, 10, step=0.2, input_wait=0.6)) == 1


@pytest.mark.parametrize(
    ("steps", "every", "least", "advised"),
    [
        (330, 11, 280, 88),
        (330, 11, 60, 66),
        (1000, 10, 81, 90),
        (105, 10, 50, 30),
        (9, 9, 80, 9),
    ],
)
def test_the_advised_evaluations_divide_the_run_in_whole_epochs(steps, every, least, advised):
    assert summary._divide_evenly(steps, every, least) == advised


@pytest.mark.parametrize(("every", "less"), [(5, 25), (10, 30)])
def test_evaluation_that_takes_a_large_share_is_named(tmp_path, every, less):
    lines = list_lines(tmp_path, every, step=5.0, evaluation=5.0)
    assert len(lines) == 2
    said = f"of the run: --config.train.eval_every={less} evaluates less often, so there are fewer "
    said += "checkpoints to choose from"
    assert lines[1].startswith("evaluation took 5") or lines[1].startswith("evaluation took 49")
    assert lines[1].endswith(said)


@pytest.mark.parametrize("every", [0, 20, 50])
def test_few_evaluations_cannot_be_less_often(tmp_path, every):
    assert len(list_lines(tmp_path, every, step=1.0, evaluation=5.0)) == 1


def test_the_coarse_accuracy_of_few_images_is_said(tmp_path):
    parts = [[{"image": b"", "label": 0}] * 8]
    data_sets.shards(tmp_path, data_sets.IMAGES, {"train": parts, "val": parts * 2})
    images = StreamedImages(format="tfrecord", data_dir=str(tmp_path), eval_split="val")
    few = "val has 16 images, so one that is right or wrong changes the accuracy by 0.062"
    assert summary._describe_few(images) == few
    images.data_dir = str(tmp_path / "moved")
    assert summary._describe_few(images) == summary._describe_few(Images()) == ""


def test_what_to_try_next_writes_where_nothing_is(tmp_path):
    experiment = types.SimpleNamespace(model=GPT("gpt2_small", lora=4))
    (tmp_path / "adapters").mkdir()
    found = summary._list_next_commands(experiment, str(tmp_path), "--prompt=a", False)
    assert found == [
        f"tftpu plot {tmp_path} --output={tmp_path}/curves.png",
        f"tftpu generate {tmp_path} --prompt=a",
        f"tftpu serve {tmp_path}",
        f"tftpu export-weights {tmp_path} --adapters --output={tmp_path}/adapters_2",
    ]
    experiment.model = KerasHub("gemma3_1b", "causal_lm", lora=4)
    (*_, last) = summary._list_next_commands(experiment, str(tmp_path), "--prompt=a", False)
    assert last == f"tftpu export {tmp_path} --format=preset --output={tmp_path}/preset"


@pytest.mark.parametrize(
    ("draws", "evaluates", "names"),
    [
        (True, True, ["plot", "predict", "serve", "export"]),
        (False, False, ["--logdir=run", "serve", "export"]),
    ],
)
def test_a_model_that_writes_no_text_can_be_served_next(monkeypatch, draws, evaluates, names):
    monkeypatch.setattr(
        summary.importlib.util, "find_spec", lambda name: name == "starlette" or draws or None
    )
    experiment = types.SimpleNamespace(model=types.SimpleNamespace(lora=0), data=Images())
    found = summary._list_next_commands(experiment, "run", "", evaluates)
    assert [line.split()[1] for line in found] == names


def test_a_split_that_is_trained_and_evaluated_on_is_named():
    data = StreamedImages(train_split="train", eval_split="train", num_classes=2)
    assert "train is both trained and evaluated on" in summary.describe_same_split(data)
    data.eval_split = "test"
    assert summary.describe_same_split(data) == summary.describe_same_split(Images()) == ""


@pytest.mark.medium
def test_only_fields_that_the_records_hold_are_kept(tmp_path):
    def keep(**fields) -> list[str]:
        return summary._list_kept_fields(
            StreamedImages(eval_split="train", num_classes=10, **fields)
        )

    shards = {"format": "tfrecord", "data_dir": str(tmp_path)}
    assert keep(format="folder", data_dir="photos") == ["label"]
    assert keep(**shards) == []
    data_sets.shards(tmp_path, data_sets.IMAGES, {"train": [data_sets.pictures(1)]})
    assert keep(**shards) == ["label"]
    image = data_sets.pictures(1)[0] | {"source": "cups/1.jpg"}
    data_sets.shards(
        tmp_path, data_sets.IMAGES | {"source": Feature("string")}, {"train": [[image]]}
    )
    assert keep(**shards) == ["label", "source"]
    assert summary._list_kept_fields(Images()) == ["label"]


def test_a_run_without_an_evaluation_has_no_row_for_it(tmp_path):
    assert summary._list_evaluation_rows(7, {}, str(tmp_path)) == []
    [(name, text)] = summary._list_evaluation_rows(7, {"loss": 0.5}, str(tmp_path))
    assert (name, text) == ("eval, last", "step 7  loss 0.5000")
