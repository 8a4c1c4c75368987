"""`tftpu train`, with a model that compiles in a second."""

import json
import shlex

import pytest

from tests.support.data import photos
from tftpu.launch import main as command_line
from tftpu.runtime import slow

TINY = (
    *("train", "--config=digits_resnet", "--config.train.eval_every=0", "--tpu=none"),
    *("--config.model.width=8", "--config.model.blocks=(1,)", "--config.model.norm_batch=8"),
    "--config.data.global_batch_size=16",
)


@pytest.mark.slow
def test_a_run_that_has_its_steps_keeps_the_config_it_was_trained_with(tmp_path, capsys):
    def config(steps: int) -> dict:
        flags = (f"--config.train.steps={steps}", f"--workdir={tmp_path}")
        assert command_line.main([*TINY, *flags]) == 0
        return json.loads((tmp_path / "config.json").read_text())

    assert config(4)["train"]["steps"] == 4
    assert config(2)["train"]["steps"] == 4
    said = capsys.readouterr().out
    assert "nothing is left to train" in said
    assert "more than 4 steps continue this run" in said
    assert said.index("This run ended at step 4") < said.index("nothing is left to train")
    recorded = json.loads((tmp_path / "config.json").read_text())
    recorded["train"]["steps"] = 3000  # as if it had been stopped at step 4
    (tmp_path / "config.json").write_text(json.dumps(recorded))
    assert command_line.main([*TINY, "--config.train.steps=2", f"--workdir={tmp_path}"]) == 2
    said = capsys.readouterr().err
    assert "asks for 2 steps, but the run" in said and "is at step 4 of 3,000" in said
    assert "--config.train.steps=3000, and without --config.train.epochs, continues it" in said


@pytest.mark.slow
def test_a_longer_run_is_told_what_its_schedule_does_and_what_to_type_at_its_end(tmp_path, capsys):
    def train(steps: int, *flags: str) -> str:
        words = (f"--config.train.steps={steps}", f"--workdir={tmp_path}/run", *flags)
        assert command_line.main([*TINY, *words]) == 0
        return capsys.readouterr().out

    rate = ("--config.optimizer.learning_rate=0.5", "--config.optimizer.warmup_steps=0")
    rate += ("--config.optimizer.scaling=none",)
    said = train(4, *rate)
    assert "schedule" not in said
    best = json.loads((tmp_path / "run/checkpoints/best").read_text())
    numbers = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").open()][-1]
    row = next(line for line in said.splitlines() if line.startswith("  eval, best"))
    assert f"{best['metric']} {best['value']:.4f}" in row and f"loss {numbers['loss']:.4f}" in row
    assert "--input=evaluation --keep=label" in said
    commands = [line[12:].strip() for line in said[said.index("try next") :].splitlines()]
    plot, predict, serve, export = commands
    assert plot.startswith("tftpu plot ") and serve == f"tftpu serve {tmp_path}/run"
    for command in plot, predict, export:
        assert command_line.main(shlex.split(command)[1:]) == 0
    capsys.readouterr()
    # Half of a cosine: 0.5 * (1 + cos(pi / 2)) / 2
    expected = "ends at step 8, not at 4: at step 4 the rate is 0.25, where it was 0."
    assert expected in train(8, *rate)
    said = train(8, *rate)  # nothing is left to train
    assert "schedule" not in said and "replaces it" not in said
    said = train(9, *rate, "--config.train.best_metric=loss")
    assert "is the best so far by accuracy. The next evaluation replaces it, because loss " in said
    constant = ("--config.optimizer.decay=constant", f"--workdir={tmp_path}/constant")
    assert "schedule" not in train(2, *constant) + train(3, *constant)


@pytest.mark.slow
def test_the_result_has_only_the_metrics_of_the_last_evaluation(tmp_path):
    """The metrics may change between two starts of a run."""

    def evaluate(steps: int, *flags: str) -> dict:
        words = (f"--config.train.steps={steps}", f"--workdir={tmp_path}", *flags)
        assert command_line.main([*TINY, *words]) == 0
        return json.loads((tmp_path / "result.json").read_text())["evaluation"]

    assert {*evaluate(2)} == {"loss", "accuracy"}
    other = "--config.metrics=sparse_categorical_crossentropy"
    best = "--config.train.best_metric=loss"
    found = evaluate(4, other, best)
    assert {*found} == {"loss", "sparse_categorical_crossentropy"}
    assert evaluate(4, best) == found  # nothing is left to train


WORDS = """
from tftpu.config import Experiment, TrainConfig
from tftpu.input_pipelines.sources import Tokens
from tftpu.models.sizes import GPT

def get_config():
    model = GPT(vocabulary=256, context=8, layers=1, width=8, heads=1)
    data = Tokens(train_text="texts/*.txt", context=8, global_batch_size=4)
    return Experiment(model, data, train=TrainConfig(steps=2))
"""


@pytest.mark.slow
def test_a_run_does_not_resume_on_other_texts(in_scratch_project, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TFTPU_CACHE", str(tmp_path / "cache"))
    (tmp_path / "mine.py").write_text(WORDS)
    (tmp_path / "texts").mkdir()
    text = tmp_path / "texts" / "a.txt"
    text.write_text("as it was " * 50)

    def train(steps: int) -> int:
        return command_line.main(["train", "mine.py", f"--config.train.steps={steps}"])

    assert train(2) == train(3) == 0
    text.write_text("as it is. " * 50)
    assert train(3) == 0  # nothing is left to train
    assert train(4) == 2
    said = capsys.readouterr().err
    assert "their number is the same, but the files have other names or sizes" in said
    assert "--workdir=runs/mine_2, where --config.model.init_from=runs/mine/checkpoints/3" in said
    text.write_text("as it was " * 60)
    assert train(4) == 2
    assert "there were 59 examples when it began, and there are 71 now" in capsys.readouterr().err
    text.write_text("as it was " * 50)
    assert train(4) == 0


OWN = """
import dataclasses
import tftpu
from tftpu.input_pipelines.sources import StreamedImages

@dataclasses.dataclass
class Net(tftpu.ModelConfig):
    classes: int = 1

    def build(self):
        import keras

        last = keras.layers.Dense(self.classes)
        return keras.Sequential([keras.Input((32, 32, 3)), keras.layers.Flatten(), last])

def get_config():
    sizes = dict(image_size=32, num_classes=2, global_batch_size=2)
    data = StreamedImages(format="folder", data_dir="photos", eval_split="train", **sizes)
    return tftpu.Experiment(Net(), data, "sgd", train=tftpu.TrainConfig(steps=1))
"""


@pytest.mark.slow
def test_a_model_with_fewer_outputs_than_classes_is_refused_before_the_first_step(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(slow, "_SLOW", 0.01)
    for kind in "ab":
        (tmp_path / "photos/train" / kind).mkdir(parents=True)
        picture = photos.encoded(photos.pixels(40, 40, seed=1))
        (tmp_path / "photos/train" / kind / "1.jpg").write_bytes(picture)
    (tmp_path / "own.py").write_text(OWN)
    assert command_line.main(["train", "own.py", "--tpu=none"]) == 2
    said = capsys.readouterr().err
    assert "2 classes (data.num_classes), but the model's output has 1 classes" in said
    assert "Preparing the data and the train step ..." in said
    assert command_line.main(["train", "own.py", "--tpu=none", "--config.model.classes=2"]) == 0
