"""Models and batches of small presets, compared with what KerasHub makes of them itself."""

from typing import Any

import keras
import numpy as np
import pytest

import tftpu
from tests.support.hub.byte_gpt2 import build_byte_gpt2
from tests.support.hub.tiny_gemma3 import build_tiny_gemma3, write_texts
from tftpu import input_pipelines, models
from tftpu.errors import UserError
from tftpu.input_pipelines.sources import Texts
from tftpu.models.keras_hub import presets

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def gemma3(tmp_path_factory) -> str:
    folder = str(tmp_path_factory.mktemp("presets") / "gemma3")
    build_tiny_gemma3().save_to_preset(folder)
    return folder


def test_a_task_has_the_weights_of_its_preset_and_no_preprocessor(gemma3):
    import keras_hub

    ours = models.build(tftpu.KerasHub(gemma3, "causal_lm"))
    theirs = keras_hub.models.CausalLM.from_preset(gemma3)
    assert type(ours) is type(theirs) and ours.preprocessor is None
    assert all(np.array_equal(a, b) for a, b in zip(ours.get_weights(), theirs.get_weights()))


def test_random_weights_may_have_other_dimensions(gemma3):
    found = models.build(
        tftpu.KerasHub(gemma3, "causal_lm", weights="none", overrides={"num_layers": 1})
    )
    assert found.backbone.num_layers == 1
    backbone = models.build(tftpu.KerasHub(gemma3, overrides={"num_layers": 3}, weights="none"))
    assert backbone.num_layers == 3 and not hasattr(backbone, "generate")
    with pytest.raises(UserError, match="num_lairs"):
        models.build(tftpu.KerasHub(gemma3, weights="none", overrides={"num_lairs": 1}))


def test_a_task_has_one_spelling(gemma3):
    for name in ("causallm", "Causal_LM"):
        with pytest.raises(UserError, match="Did you mean 'causal_lm'"):
            models.build(tftpu.KerasHub(gemma3, name))
    assert models.build(tftpu.KerasHub(gemma3, "CausalLM")).generate  # as older runs say


def test_texts_that_are_cut_are_said_with_the_length_to_set(gemma3, tmp_path, capsys):
    path = tmp_path / "texts.txt"
    path.write_text("\n".join(["the quick brown fox " * 4] * 10 + ["the quick"] * 10))
    source = Texts(train_text=str(path), eval_text=str(path), global_batch_size=20)

    def read_said(length: int) -> str:
        model = tftpu.KerasHub(gemma3, "causal_lm", sequence_length=length)
        input_pipelines.training(tftpu.Experiment(model, source).prepared_data)
        return capsys.readouterr().out

    said = read_said(8)
    assert "10 of the first 20 texts are cut there, and the model learns to end in" in said
    longest = int(said.rpartition("--config.model.sequence_length=")[2].split()[0])
    assert "are cut there" not in read_said(longest) and "are cut there" in read_said(longest - 1)


def test_no_length_above_the_table_of_positions_is_suggested_or_taken(gemma3, tmp_path, capsys):
    preset, path = str(tmp_path / "gpt2"), tmp_path / "texts.txt"
    build_byte_gpt2(length=256).save_to_preset(preset)
    path.write_text("\n".join(["a" * 70, "b"] * 2))

    def read(length: int, **fields: Any) -> str:
        model = tftpu.KerasHub(preset, "causal_lm", sequence_length=length, **fields)
        source = Texts(train_text=str(path), eval_text=str(path), global_batch_size=4)
        input_pipelines.training(tftpu.Experiment(model, source).prepared_data)
        return capsys.readouterr().out

    needs = "The longest needs 71 tokens"
    assert f"{needs}, and the model reads 64 at most: shorten the texts." in read(64)
    lower = f"{needs}, and the model reads 64 at most: set --config.model.sequence_length=64 and"
    assert lower in read(32)
    for length, said in {72: "is 72, but", 0: "is 256, as the preset's preprocessor says,"}.items():
        with pytest.raises(UserError, match=rf"{said}.*type --config.model.sequence_length=64 or"):
            read(length)
    larger = {"weights": "none", "overrides": {"max_sequence_length": 80}}
    assert f"{needs}: set --config.model.sequence_length=71 or more." in read(32, **larger)
    assert "are cut there" not in read(71, **larger)
    assert presets.find_limit(tftpu.KerasHub(gemma3, "causal_lm")) is None  # it rotates


def test_prompts_for_a_preprocessor_of_texts_are_explained(tmp_path):
    build_byte_gpt2().save_to_preset(str(tmp_path / "gpt2"))
    (tmp_path / "t.csv").write_text("question,answer\na,b\nc,d\n")
    data = Texts(str(tmp_path / "t.csv"), prompt="question", field="answer", global_batch_size=1)
    experiment = tftpu.Experiment(tftpu.KerasHub(str(tmp_path / "gpt2"), "causal_lm"), data)
    with pytest.raises(UserError, match="takes texts, not prompts and responses"):
        input_pipelines.batch_spec(experiment.prepared_data, 1)


def test_the_batches_are_those_of_the_presets_preprocessor(gemma3, tmp_path):
    import keras_hub

    texts = write_texts(tmp_path / "texts.txt", 40)
    source = Texts(train_text=str(texts), global_batch_size=4)
    experiment = tftpu.Experiment(tftpu.KerasHub(gemma3, "causal_lm", sequence_length=20), source)
    data = experiment.prepared_data
    raw = next(input_pipelines.training(source).starting_at(3).as_numpy_iterator())
    found = next(input_pipelines.training(data).starting_at(3).as_numpy_iterator())
    preprocessor = keras_hub.models.CausalLMPreprocessor.from_preset(gemma3, sequence_length=20)
    responses = [text.decode() for text in raw]
    expected = preprocessor({"prompts": [""] * 4, "responses": responses})
    keras.tree.map_structure(np.testing.assert_array_equal, found, expected)
    spec = input_pipelines.batch_spec(data, 4)
    keras.tree.map_structure(lambda s, a: s.shape.assert_is_compatible_with(a.shape), spec, found)
    (last,) = input_pipelines.evaluation(data).as_numpy_iterator()
    assert last[1].shape == (2, 20)  # every twentieth of forty texts


def test_masks_are_the_same_in_a_resumed_run_and_in_each_evaluation(tmp_path):
    import keras_hub

    letters = "abcdefghijklmnopqrstuvwxyz"
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer = keras_hub.models.BertTokenizer(vocabulary=[*special, *letters])
    backbone = keras_hub.models.BertBackbone(31, 1, 2, 8, 8, max_sequence_length=16)
    preprocessor = keras_hub.models.BertMaskedLMPreprocessor(
        tokenizer, sequence_length=16, mask_selection_length=4
    )
    task = keras_hub.models.BertMaskedLM(backbone=backbone, preprocessor=preprocessor)
    task.save_to_preset(str(tmp_path / "bert"))
    (tmp_path / "t.txt").write_text("\n".join(" ".join(letters[n : n + 12]) for n in range(40)))
    source = Texts(train_text=str(tmp_path / "t.txt"), global_batch_size=4)
    model = tftpu.KerasHub(str(tmp_path / "bert"), "masked_lm")
    data = tftpu.Experiment(model, source).prepared_data

    def read(batches: Any) -> Any:
        return [x["token_ids"] for x, _, _ in batches.as_numpy_iterator()]

    def train(step: int, seed: int = 0) -> Any:
        return read(input_pipelines.training(data, seed).starting_at(step).take(8 - step))

    whole, evaluated = train(0), input_pipelines.evaluation(data)
    np.testing.assert_array_equal(train(0), whole)
    np.testing.assert_array_equal(train(5), whole[5:])
    np.testing.assert_array_equal(read(evaluated), read(evaluated))
    masks = [batch == special.index("[MASK]") for batch in whole]
    assert any((mask != masks[0]).any() for mask in masks[1:])


def test_a_preset_without_its_tokenizer_is_answered_with_what_to_write(tmp_path):
    build_byte_gpt2().backbone.save_to_preset(str(tmp_path / "backbone"))
    config = tftpu.KerasHub(str(tmp_path / "backbone"), "causal_lm")
    with pytest.raises(UserError, match="The preset lacks its tokenizer: write it"):
        presets.load_preprocessor(config)


def test_texts_without_their_preset_are_explained(gemma3, tmp_path):
    (tmp_path / "t.csv").write_text("text,kind\na,b\nc,b\n")
    data = Texts(train_text=str(tmp_path / "t.csv"), label="kind", global_batch_size=1)
    experiment = tftpu.Experiment(tftpu.KerasHub(gemma3, "text_classifier"), data)
    with pytest.raises(UserError, match="KerasHub cannot load text_classifier"):
        input_pipelines.training(experiment.prepared_data).starting_at(0)
