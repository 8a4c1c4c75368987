"""Samples of byte models."""

import functools
import json
import types
from typing import Any

import keras
import numpy as np
import pytest

from tftpu.config import Experiment
from tftpu.engines import functions
from tftpu.input_pipelines.formats import manifest
from tftpu.input_pipelines.formats.manifest import Manifest
from tftpu.input_pipelines.sources import Texts, Tokens
from tftpu.launch.run import sample
from tftpu.launch.settings import config_flags


class Executor:
    """Only what a sample needs, and the real functions behind it."""

    def __init__(self, model: keras.Model):
        self.compiled = functools.partial(functions.compile_function, model)


def trained(experiment: Experiment, *layers: keras.layers.Layer) -> Any:
    """Returns what a sample needs of a trainer."""
    tokens = keras.Input((experiment.data.context,), dtype="int32")
    model = keras.Sequential([tokens, keras.layers.Embedding(512, 2), *layers])
    for weight in model.layers[-1].weights[1:]:
        bias = np.zeros(512)
        bias[300], bias[ord("x")] = 200.0, 100.0
        weight.assign(bias)
    one_host = types.SimpleNamespace(count=1)
    return types.SimpleNamespace(model=model, executor=Executor(model), hosts=one_host)


def sampled(experiment: Experiment, *layers: keras.layers.Layer) -> str:
    return sample.draw_text(experiment, trained(experiment, *layers), 5)


def test_a_vocabulary_larger_than_bytes_is_sampled_as_bytes():
    """The extra tokens, however likely, stand for no byte."""
    experiment = config_flags.load("python_gpt", ["--config.model.vocabulary=512"])
    dense = keras.layers.Dense(512, kernel_initializer="zeros")
    assert sampled(experiment, dense) == "def xxxxx"


def test_a_sample_fits_into_the_context_and_says_once_that_it_compiles(capsys):
    experiment = config_flags.load("python_gpt", ["--config.model.vocabulary=512"])
    trainer = trained(experiment, keras.layers.Dense(512, kernel_initializer="zeros"))
    texts = [sample.draw_text(experiment, trainer) for _ in range(2)]
    assert [len(text) for text in texts] == 2 * [experiment.data.context]
    assert capsys.readouterr().out == "Writing a sample of text, which compiles once.\n"


def test_a_model_that_does_not_write_has_no_sample():
    experiment = config_flags.load("python_gpt", [])
    flat = keras.layers.Flatten()
    assert sampled(experiment, flat, keras.layers.Dense(512)) == ""


def test_a_model_of_tokens_gets_the_flags_that_continue_its_texts(tmp_path):
    experiment = config_flags.load("python_gpt", [])
    writer, flat = keras.layers.Dense(512), keras.layers.Flatten()
    assert sample.suggest_flags(experiment, trained(experiment, writer)) == ""  # it has a sample
    experiment.data = Tokens(context=8, train_text="a.txt", eval_text="b.txt")
    prompt = "--prompt='Once upon a time'"  # where the texts are not here
    trainer = trained(experiment, keras.layers.Dense(512))
    assert sample.suggest_flags(experiment, trainer) == prompt
    classifier = trained(experiment, flat, keras.layers.Dense(512))
    assert sample.suggest_flags(experiment, classifier) == ""
    manifest.write(Manifest(str(tmp_path), {}, {}, about={"tokenizer": "their.json"}))
    experiment.data = Tokens(context=8, data_dir=str(tmp_path))
    flags = sample.suggest_flags(experiment, trainer)
    assert flags == f"{prompt} --tokenizer=tokenizer.json"


def test_a_prompt_is_the_beginning_of_a_text_that_was_trained_on(tmp_path):
    path = tmp_path / "tales.txt"
    path.write_text("The first line is held out.\n\nIt's the baker who asked about a key.\n")
    ruled = tmp_path / "ruled.txt"
    ruled.write_text(f"Held out.\n{22 * '*'}\n-- 1 --\n{99 * 'x'}\nShe sang of the sea.\n")
    numbers = tmp_path / "numbers.txt"
    numbers.write_text("1 2 3\n4 5 6\n")
    table = tmp_path / "tales.csv"
    table.write_text("question,story\nWho?,a\nWhat did she sing about?,b\n")
    for data, prompt in (
        (Texts(train_text=f"{path},nothing.txt"), "It's the baker who"),
        (Tokens(train_text=str(path)), "It's the baker who"),
        (Tokens(train_text=str(ruled)), "She sang of the"),
        (Tokens(train_text=str(numbers)), "Once upon a time"),
        (
            Texts(train_text=str(table), field="story", prompt="question"),
            "What did she sing about?",
        ),
        (Texts(train_text=str(table)), "Once upon a time"),
        (Tokens(data_dir=str(tmp_path)), "Once upon a time"),
    ):
        assert sample.find_prompt(data) == prompt


@pytest.mark.parametrize(
    ("texts", "flag"),
    [
        (["Q: Who?\nA: Me.", "Q: It's who?\nA: You: and I."], r"$'Q: It\'s who?\nA:'"),
        (["Ask: a, see: b Say: c", "Ask: d Say: e"], "'Ask: d Say:'"),
        (
            ["## In:\nold\n## Out:\nnew", "## In:\ncold\n## Out:\nhot"],
            r"$'## In:\ncold\n## Out:\n'",
        ),
        (["Note: a b c d e", "Note: b c d e f"], ""),
        (["Q: a A: b", "neither of them"], ""),
        (["Q: a A: b"], ""),
        (["Q: a A: b", f"Q: {'a ' * 99} A: b"], "'Q: a A:'"),
    ],
)
def test_a_question_is_asked_as_it_was_trained_on(texts, flag, tmp_path):
    path = tmp_path / "joined.jsonl"
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    experiment = config_flags.load("python_gpt", [])
    experiment.data = Texts(train_text=str(path))
    trainer = types.SimpleNamespace(model=types.SimpleNamespace(generate_step=None))
    found = sample.suggest_flags(experiment, trainer)
    assert found == f"--prompt={flag} --temperature=0" if flag else "temperature" not in found


def test_a_question_of_pairs_is_given_whole(tmp_path):
    path = tmp_path / "pairs.jsonl"
    rows = [{"q": f"What is {n} and then {n} and more?", "a": "x"} for n in range(3)]
    path.write_text("\n".join(map(json.dumps, rows)))
    experiment = config_flags.load("python_gpt", [])
    experiment.data = Texts(train_text=str(path), field="a", prompt="q")
    trainer = types.SimpleNamespace(model=types.SimpleNamespace(generate_step=None))
    flags = "--prompt='What is 1 and then 1 and more?' --temperature=0"
    assert sample.suggest_flags(experiment, trainer) == flags
