"""Which runs are served with arrays, and which with text."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tftpu
from tftpu.errors import UserError
from tftpu.inference.exporting.inputs import Input
from tftpu.inference.server.served import Refused, Served
from tftpu.inference.server.text import Language
from tftpu.launch.main import main
from tftpu.launch.run import finished, serving

CONFIG = '''
import dataclasses
from typing import ClassVar

import numpy as np

import tftpu


@dataclasses.dataclass
class Rows(tftpu.DataConfig):
    """Eight numbers or tokens, and a label for each row or token."""

    vocabulary: int = 0
    per_row: bool = False
    per_token: ClassVar[bool] = True

    def training(self, context):
        import tensorflow as tf

        rng = np.random.default_rng(0)
        x = rng.normal(size=(32, 8)).astype("float32")
        if self.vocabulary:
            x = rng.integers(1, self.vocabulary, (32, 8), np.int32)
        y = (x[:, 0] > 0).astype("int32") if self.per_row else x.astype("int32")
        return tf.data.Dataset.from_tensor_slices((x, y)).batch(context.global_batch_size)


@dataclasses.dataclass
class Kind(tftpu.ModelConfig):
    kind: str = "subclass"

    def build(self):
        import keras

        class Own(keras.Model):
            def __init__(self):
                super().__init__()
                self.dense = keras.layers.Dense(2)

            def call(self, x):
                return self.dense(x)

        if self.kind == "subclass":
            return Own()
        writes = keras.layers.GRU(8, return_sequences=True)
        if self.kind == "both_ways":
            writes = keras.layers.Bidirectional(writes)
        given = keras.Input((8,))
        embedded = keras.layers.Embedding(256, 8)(given)
        return keras.Model(given, keras.layers.Dense(256)(writes(embedded)))


def get_config():
    kind = "KIND"
    tokens = kind != "subclass"
    data = Rows("rows", 8, vocabulary=256 if tokens else 0, per_row=not tokens)
    train = tftpu.TrainConfig(steps=4)
    return tftpu.Experiment(Kind(kind=kind), data, optimizer="sgd", train=train)
'''


@pytest.fixture
def workdir(request, tmp_path) -> str:
    config = tmp_path / f"{request.param}_rows.py"  # its own module
    config.write_text(CONFIG.replace("KIND", request.param))
    assert main(["train", f"--config={config}", f"--workdir={tmp_path / 'run'}"]) == 0
    return str(tmp_path / "run")


def answering(workdir: str, tokenizer: str | None = None) -> Served | Language:
    for_texts = serving.LanguageOptions(tokenizer, None, None)
    return serving.restore_served_run(workdir, finished.FinishedRunOptions(), for_texts).model


def tokenizer_of_words(folder: Path) -> str:
    from tokenizers import Tokenizer, models, pre_tokenizers

    made = Tokenizer(models.WordLevel({f"w{n}": n for n in range(256)}, unk_token="w0"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()  # pyright: ignore[reportAttributeAccessIssue]
    made.save(str(folder / "tokenizer.json"))
    return str(folder / "tokenizer.json")


@pytest.mark.slow
@pytest.mark.parametrize("workdir", ["subclass"], indirect=True)
def test_a_subclass_of_keras_model_answers_with_arrays(workdir):
    model = answering(workdir)
    assert isinstance(model, Served)
    [given] = model.inputs
    assert (given.shape, given.dtype) == ((8,), "float32")
    found = model.call({given.name: np.zeros((3, 8), np.float32)})
    assert found["logits"].shape == (3, 2)
    with pytest.raises(UserError, match=r"--tokenizer works only with language models.*not tokens"):
        answering(workdir, "t.json")


@pytest.mark.slow
@pytest.mark.parametrize("workdir", ["both_ways"], indirect=True)
def test_a_model_that_reads_later_tokens_answers_with_arrays(workdir):
    model = answering(workdir)
    assert isinstance(model, Served)
    assert model.call({model.inputs[0].name: np.ones((2, 8), model.inputs[0].dtype)})
    with pytest.raises(UserError, match=r"--tokenizer .* depend on later tokens"):
        answering(workdir, "t.json")


@pytest.mark.slow
@pytest.mark.parametrize("workdir", ["causal"], indirect=True)
def test_a_causal_model_of_plain_tokens_answers_with_text(workdir, tmp_path):
    with pytest.raises(UserError, match=r"give the tokenizer"):
        answering(workdir)
    assert isinstance(answering(workdir, tokenizer_of_words(tmp_path)), Language)


TEXTS = '''
import dataclasses

import numpy as np

import tftpu


@dataclasses.dataclass
class Letters(tftpu.DataConfig):
    """Texts as the numbers of their first four letters."""

    def encode(self, texts):
        rows = [[ord(letter) % 32 for letter in text.ljust(4)[:4]] for text in texts]
        return np.array(rows, np.int64)

    def training(self, context):
        import tensorflow as tf

        x = self.encode(["good", "fine", "poor", "grim"] * 8)
        y = np.array([1, 1, 0, 0] * 8, np.int32)
        return tf.data.Dataset.from_tensor_slices((x, y)).batch(context.global_batch_size)

    def prediction(self, address, context):
        kind, _, text = address.partition(":")
        if kind != "sentence" or not READS:
            raise FileNotFoundError(address)
        return self.encode([text])

    def class_names(self):
        return ["bad", "good"]


@dataclasses.dataclass
class Dense(tftpu.ModelConfig):
    def build(self):
        import keras

        layers = [keras.layers.Embedding(32, 4), keras.layers.Flatten(), keras.layers.Dense(2)]
        return keras.Sequential([keras.Input((4,), dtype="int32"), *layers])


def get_config():
    data = Letters("letters", 8)
    return tftpu.Experiment(Dense(), data, optimizer="sgd", train=tftpu.TrainConfig(steps=4))
'''


@pytest.mark.slow
def test_texts_get_the_probabilities_of_tftpu_predict(tmp_path):
    config = tmp_path / "letters.py"
    config.write_text(TEXTS.replace("READS", "True"))
    run, output = str(tmp_path / "run"), tmp_path / "predicted"
    assert main(["train", f"--config={config}", f"--workdir={run}"]) == 0
    words = ["--input=sentence:so good", f"--output={output}", "--outputs=logits"]
    assert main(["predict", run, *words]) == 0
    (row,) = [json.loads(line) for line in next(output.glob("*.jsonl")).read_text().splitlines()]
    model = answering(run)
    assert isinstance(model, Served) and model.encode is not None
    found = model.call(model.encode(["grim", "so good"]))
    np.testing.assert_allclose(found["logits"][1], row["logits"], rtol=1e-6)


@pytest.mark.slow
def test_data_that_read_no_sentence_take_no_texts(tmp_path):
    config = tmp_path / "no_letters.py"
    config.write_text(TEXTS.replace("READS", "False"))
    assert main(["train", f"--config={config}", f"--workdir={tmp_path / 'run'}"]) == 0
    model = answering(str(tmp_path / "run"))
    assert isinstance(model, Served) and model.encode is None


@dataclasses.dataclass
class Letters(tftpu.DataConfig):
    """Texts as the numbers of two letters; does `fault` with a text."""

    fault: str = ""

    def __post_init__(self):
        if self.fault == "batch" and self.global_batch_size % 8:
            raise ValueError("give a multiple of 8")

    def prediction(self, address, context):
        text = address.partition(":")[2]
        if self.fault == "path":
            raise FileNotFoundError(2, "No such file or directory", address)
        if self.fault == "kind":
            raise UserError(f"{address} is no picture")
        if self.fault == "others" or text == "?":
            raise ValueError("no letters\nand more")
        rows = [[ord(letter) for letter in text.ljust(2)[:2]]]
        return np.array(rows * (2 if self.fault == "rows" or text == "two" else 1))


class Bare(Letters):
    """Letters that cannot be made again from their fields."""

    def __init__(self):
        super().__init__("letters", 8)


def find_encoder(data: Letters) -> Any:
    experiment = tftpu.Experiment(tftpu.ModelConfig(), data)
    return serving._find_encoder(experiment, [Input("x", (2,), "int32")])


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (
            Letters("", 8, fault="others"),
            "Letters cannot read 'sentence:a': ValueError: no letters",
        ),
        (Letters("", 8, fault="batch"), "'sentence:a': ValueError: give a multiple of 8"),
        (Letters("", 8, fault="rows"), "Letters.prediction returns 2 rows for one text."),
        (Bare(), "Bare cannot read 'sentence:a': TypeError: "),
        (Letters("", 8, fault="path"), ""),
        (Letters("", 8, fault="kind"), ""),
    ],
)
def test_a_class_that_reads_no_texts_is_served_without_and_says_why(data, why, capsys):
    assert find_encoder(data) is None
    said = capsys.readouterr().err
    assert why in said and said.count("\n") == bool(why)
    assert said.startswith("tftpu: requests with texts are not accepted: " if why else "")


def test_a_text_that_a_class_cannot_read_is_the_requests_mistake(caplog):
    encode = find_encoder(Letters("", 8))
    np.testing.assert_array_equal(encode(["ab", "c"])["x"], [[97, 98], [99, 32]])
    with pytest.raises(Refused, match=r"^Letters.prediction cannot read this text: ValueError: no"):
        encode(["ab", "?"])
    assert "in prediction" in caplog.text  # the whole traceback
    with pytest.raises(Refused, match=r"^Letters.prediction returns 2 rows for one text\.$"):
        encode(["two"])


def test_values_that_tensorflow_refuses_are_the_requests_mistake():
    import tensorflow as tf

    from tftpu.inference.server import served

    def call(given):
        with tf.device("CPU:0"):
            return {"y": tf.gather(tf.zeros(3), given["x"]).numpy()}

    model = served.wrap_tensorflow((Input("x", (), "int32"),), ("y",), call)
    with pytest.raises(Refused, match=r"is not in \[0, 3\)"):
        model.call({"x": np.array([7], np.int32)})
