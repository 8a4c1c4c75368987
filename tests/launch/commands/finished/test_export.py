"""`tftpu export` on a small run of images."""

import dataclasses
import os
import subprocess
import sys

import keras
import numpy as np
import onnxruntime
import pytest

from tftpu.errors import UserError
from tftpu.input_pipelines.datasets import small
from tftpu.input_pipelines.sources import StreamedImages
from tftpu.launch.commands.finished import export
from tftpu.launch.main import main


@dataclasses.dataclass
class OwnPixels(StreamedImages):
    """Pictures that are prepared in a way of their own."""

    def export_inputs(self):
        return dataclasses.replace(super().export_inputs(), prepare=lambda images: images / 255)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> str:
    workdir = str(tmp_path_factory.mktemp("run"))
    steps = ("epochs=None", "steps=12", "steps_per_loop=6", "eval_every=12", "log_every=12")
    options = [f"--config.train.{option}" for option in steps]
    options += ["--config.train.ema_momentum=0.5", "--config.optimizer.warmup_steps=1"]
    assert main(["train", "--config=digits_resnet", f"--workdir={workdir}", *options]) == 0
    return workdir


@pytest.mark.slow
def test_onnx_takes_pixels_and_is_as_accurate_as_the_evaluation(run, tmp_path, capsys):
    to = str(tmp_path / "digits.onnx")
    assert main(["export", f"--workdir={run}", "--format=onnx", f"--to={to}"]) == 0
    said = capsys.readouterr().out
    assert "images uint8 [8, 8, 1], any batch" in said and "logits, class, label" in said
    assert main(["evaluate", f"--workdir={run}"]) == 0
    accuracy = float(capsys.readouterr().out.split()[-1])
    examples = small.load_split("digits", None, "test")
    session = onnxruntime.InferenceSession(to, providers=["CPUExecutionProvider"])
    label, classes = session.run(["label", "class"], {"images": np.asarray(examples["image"])})
    assert np.mean(classes == examples["label"]) == pytest.approx(accuracy, abs=1e-4)
    assert label.tolist() == [str(number) for number in classes]


@pytest.mark.slow
def test_litert_is_as_accurate_as_quantize_measures_and_says_nothing_else(run, tmp_path, capfd):
    from ai_edge_litert.interpreter import Interpreter

    assert main(["quantize", f"--workdir={run}"]) == 0
    rows = {line.split()[0]: line.split() for line in capfd.readouterr().out.splitlines()[2:]}
    examples = small.load_split("digits", None, "test")
    places = {name: str(tmp_path / f"{name}.tflite") for name in ("float32", "int8")}
    for name, words in ("float32", []), ("int8", ["--quantize=int8"]):
        words = [*words, "--format=litert", f"--to={places[name]}"]
        assert main(["export", f"--workdir={run}", *words]) == 0
        said = capfd.readouterr()
        assert "images uint8 [8, 8, 1], any batch" in said.out and "logits, class\n" in said.out
        assert len(said.out.splitlines()) == 5
        # What it is doing, and nothing of the converter's.
        assert all(line.endswith(" ...") for line in said.err.splitlines())
    for name, place in places.items():
        assert os.path.getsize(place) == pytest.approx(float(rows[name][1]) * 2**20, rel=0.1)
        classify = Interpreter(place).get_signature_runner("serving_default")
        classes = classify(images=np.asarray(examples["image"]))["class"]
        accuracy = float(rows[name][5])
        assert np.mean(classes == examples["label"]) == pytest.approx(accuracy, abs=1e-4)


@pytest.mark.exhaustive
def test_quantize_measures_what_quantized_exports_are(run, tmp_path, capsys):
    assert main(["quantize", f"--workdir={run}"]) == 0
    said = capsys.readouterr()
    assert f"Loading {run} ...\nEvaluating step 12 with weights of 32, 8 and 4 bits" in said.err
    rows = {line.split()[0]: line.split() for line in said.out.splitlines()[2:]}
    assert list(rows) == ["float32", "int8", "int4"]
    examples = small.load_split("digits", None, "test")
    whole = str(tmp_path / "float32.onnx")
    assert main(["export", f"--workdir={run}", "--format=onnx", f"--to={whole}"]) == 0
    for name, most in ("int8", 0.30), ("int4", 0.18):
        to = str(tmp_path / f"{name}.onnx")
        words = ["--format=onnx", f"--quantize={name}", f"--to={to}"]
        assert main(["export", f"--workdir={run}", *words]) == 0
        assert os.path.getsize(to) <= most * os.path.getsize(whole)
        assert os.path.getsize(to) == pytest.approx(float(rows[name][1]) * 2**20, rel=0.1)
        session = onnxruntime.InferenceSession(to, providers=["CPUExecutionProvider"])
        (classes,) = session.run(["class"], {"images": np.asarray(examples["image"])})
        accuracy = float(rows[name][5])
        assert np.mean(classes == examples["label"]) == pytest.approx(accuracy, abs=1e-4)
    # The run is as it was.
    assert main(["evaluate", f"--workdir={run}", "--gate=accuracy>=0,loss<=inf"]) == 0
    assert capsys.readouterr().out.split()[-1] == rows["float32"][5]
    assert main(["evaluate", f"--workdir={run}", "--gate=accuracy>=1.5"]) == 2
    assert "The gate accuracy>=1.5 is not met: accuracy is" in capsys.readouterr().err
    assert main(["evaluate", f"--workdir={run}", "--gate=acuracy>=0.5"]) == 2
    assert "Did you mean 'accuracy'?" in capsys.readouterr().err


SENTENCES = """
from tftpu.config import Experiment, TrainConfig
from tftpu.input_pipelines.sources import Synthetic
from tftpu.models.sizes import BERT


def get_config():
    tokens = "int64[9] num_classes"
    return Experiment(
        model=BERT("tiny", vocabulary=20, context=12, layers=1, width=16, heads=2, head="classes",
                   num_classes=3),
        data=Synthetic(
            name="sentences", global_batch_size=8, examples=16, features=("tokens", "segments"),
            spec=(f"tokens: {tokens}=20", f"segments: {tokens}=2", "y: int32 num_classes=3"),
        ),
        train=TrainConfig(steps=2, steps_per_loop=1, log_every=1),
    )
"""


@pytest.mark.exhaustive
def test_a_language_model_takes_what_its_data_are_read_with(tmp_path, capsys):
    config, workdir = tmp_path / "sentences.py", str(tmp_path / "run")
    config.write_text(SENTENCES)
    words = [f"--config={config}", f"--workdir={workdir}", "--config.optimizer.warmup_steps=0"]
    assert main(["train", *words]) == 0
    found = {}
    for flags in [], ["--inputs=tokens"], ["--inputs=tokens, positions,types"]:
        to = str(tmp_path / f"m{len(found)}.onnx")
        capsys.readouterr()
        assert main(["export", f"--workdir={workdir}", f"--to={to}", *flags]) == 0
        inputs = onnxruntime.InferenceSession(to).get_inputs()
        found[" ".join(flags)] = [(i.name, i.type, i.shape) for i in inputs]
        assert "inputs   tokens int32 [9]" in capsys.readouterr().out
    taken = [[name for name, *_ in inputs] for inputs in found.values()]
    assert taken == [["tokens", "segments"], ["tokens"], ["tokens", "positions", "types"]]
    forms = [(kind, shape) for inputs in found.values() for _, kind, shape in inputs]
    assert all(form == ("tensor(int32)", ["batch", 9]) for form in forms)
    for flag, said in ("tokens,segment", "Did you mean 'segments'?"), ("types", "lack 'tokens'"):
        words = [f"--workdir={workdir}", f"--inputs={flag}", f"--to={tmp_path}/n.onnx"]
        assert main(["export", *words]) == 2
        assert said in capsys.readouterr().err


@pytest.mark.medium
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--format=onix", "--to=m"], "Did you mean 'onnx'?"),
        (["--format=litert", "--to=m"], "ends in .tflite"),
        (["--to=digits.onx"], "Did you mean '.onnx'?"),
        (["--to=pets.h5"], "has the ending .h5, which no format has: use .onnx, .tflite, .keras;"),
        (["--format=litert", "--to=m.tflite", "--quantize=int4"], "or use --quantize=int8"),
        (["--format=onnx", "--to=m"], "ends in .onnx"),
        (["--format=keras", "--to=m.onnx"], "ends in .keras"),
        (["--format=onnx", "--to=m.onnx", "--quantize=int2"], "give int8 or int4"),
        (["--to=m.keras", "--quantize=int8"], "use another format"),
        (["--to=m.onnx", "--inputs=tokens"], "determine the inputs of its export, images"),
        (["--to=m.onnx", "--inputs=,"], "give names, such as --inputs=tokens"),
        (["--to=m.keras", "--inputs=tokens"], "leave out --inputs"),
        (["--format=preset", "--to=m"], "is ResNet: use saved_model, onnx"),
        (["--format=preset", "--to=m", "--quantize=int8"], "--format=preset writes the weights"),
        (["--format=preset", "--to=m.onnx"], "a folder with no such ending"),
        (["--format=saved_model", "--to=m.onnx"], "is a folder"),
    ],
)
def test_a_mistake_is_explained(run, capsys, words, message):
    assert main(["export", f"--workdir={run}", *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (StreamedImages(data_dir="x", space_to_depth=True), "the code that prepares its images"),
        (OwnPixels(), "the code that prepares its images"),
        (StreamedImages(data_dir="x"), "'two' is not a functional model with one input"),
    ],
)
def test_pixels_that_keras_cannot_prepare_cannot_be_in_a_keras_file(data, message):
    inputs = [keras.Input((8, 8, 3)), keras.Input((8, 8, 3))]
    model = keras.Model(inputs, keras.layers.Add()(inputs), name="two")
    with pytest.raises(UserError) as error:
        export._add_pixel_input(model, data)
    assert message in str(error.value) and "choose saved_model or onnx" in str(error.value)


def test_a_command_for_the_run_repeats_its_config():
    given = export.Options(workdir="my runs", output="a.onnx", config="b.py", overrides=("--x=1",))
    assert export._quote_run(given) == "'my runs' --config=b.py --x=1"


@pytest.mark.slow
def test_plain_keras_reads_the_file_of_a_model_of_its_own_layers(tmp_path):
    own = keras.Sequential([keras.Input((8, 8, 3)), keras.layers.Flatten(), keras.layers.Dense(2)])
    model = export._add_pixel_input(own, StreamedImages(data_dir="x"))
    model.save(tmp_path / "m.keras")
    images = np.random.default_rng(0).integers(0, 256, (2, 8, 8, 3), np.uint8)
    np.save(tmp_path / "x.npy", images)
    code = "import keras, numpy as np; m = keras.models.load_model('m.keras'); "
    code += "np.save('y.npy', m(np.load('x.npy')))"
    code += "; import sys; assert 'tftpu' not in sys.modules"
    subprocess.run([sys.executable, "-I", "-c", code], cwd=tmp_path, check=True)
    expected = own(images.astype(np.float32) / 64.0 - 1.2)
    np.testing.assert_allclose(np.load(tmp_path / "y.npy"), expected, atol=1e-5)


@pytest.mark.slow
def test_a_keras_file_and_a_saved_model(run, tmp_path):
    for form, name in ("keras", "m.keras"), ("saved_model", "m"):
        assert (
            main(["export", f"--workdir={run}", f"--format={form}", f"--to={tmp_path}/{name}"]) == 0
        )
