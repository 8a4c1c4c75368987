"""Causal language models of KerasHub write the tokens that their own `generate` writes."""

import keras
import numpy as np
import pytest

import tftpu
from tests.support import not_finite
from tests.support.hub.byte_gpt2 import build_byte_gpt2
from tests.support.hub.tiny_gemma3 import build_tiny_gemma3
from tftpu.errors import UserError
from tftpu.inference.generate import open_writer
from tftpu.inference.rows import Row
from tftpu.inference.sampling import Sampling

pytestmark = pytest.mark.slow
LIKELIEST, LENGTH, SLOTS = Sampling(temperature=0), 20, 64
PROMPTS = [[2, 5, 9, 11, 4, 7, 31, 8, 8, 15, 22, 40, 6], [2, 9], [2, 40, 33, 21, 12, 9, 9, 5, 30]]


@pytest.fixture(scope="module", params=[build_byte_gpt2, build_tiny_gemma3])
def task(request):
    keras.utils.set_random_seed(1)
    with tftpu.connect().scope():
        model = request.param()
    model.compile(sampler="greedy")
    model.preprocessor = None
    return model


def write_theirs(task, prompt: list[int], stops=None) -> list[int]:
    """Returns what KerasHub's function for `generate` writes after a prompt."""
    tokens = np.array([prompt + [0] * (SLOTS - len(prompt))], "int32")
    known = np.arange(SLOTS)[None] < len(prompt)
    found = task.make_generate_function()(
        {"token_ids": tokens, "padding_mask": known}, stop_token_ids=stops
    )
    return np.asarray(found["token_ids"])[0, len(prompt) :].tolist()


def test_prompts_of_different_lengths_are_continued_as_by_kerashub(task):
    found = tftpu.generate(task, PROMPTS, length=LENGTH, sampling=LIKELIEST, context=SLOTS)
    assert found == [write_theirs(task, prompt)[:LENGTH] for prompt in PROMPTS]


def test_a_row_does_not_depend_on_the_other_prompts(task):
    sampling = Sampling(temperature=0.9, top_k=8)
    together = tftpu.generate(
        task, PROMPTS, length=LENGTH, sampling=sampling, seed=3, context=SLOTS
    )
    writer, alone = open_writer(task, None, SLOTS), []
    for place, prompt in enumerate(PROMPTS):
        parts = writer.write([Row(prompt, LENGTH, sampling, 3, place)])
        alone.append([token for [part] in parts for token in part])
    assert together == alone


def test_a_text_ends_at_any_of_several_tokens(task):
    whole = write_theirs(task, PROMPTS[0])[:LENGTH]
    stops = [whole[7], whole[3]]
    [found] = tftpu.generate(
        task, PROMPTS[:1], length=LENGTH, sampling=LIKELIEST, stop=stops, context=SLOTS
    )
    assert found == whole[: min(whole.index(stop) for stop in stops)]


def test_a_text_longer_than_the_context_continues_from_its_last_half(task):
    [found] = tftpu.generate(task, [[5, 9]], length=20, sampling=LIKELIEST, context=16)
    assert len(found) == 20
    begun = [5, 9, *found[:14]][-8:]
    again = tftpu.generate(task, [begun], length=6, sampling=LIKELIEST, context=16)
    assert found[14:] == again[0]


def test_values_that_are_not_finite_end_their_text_alone():
    import keras_hub  # takes seconds

    keras.utils.set_random_seed(0)
    backbone = keras_hub.models.LlamaBackbone(
        vocabulary_size=97,
        num_layers=1,
        num_query_heads=2,
        num_key_value_heads=1,
        hidden_dim=32,
        intermediate_dim=32,
    )
    rng = np.random.default_rng(0)
    for variable in backbone.trainable_variables:
        variable.assign(variable + rng.normal(0, 0.5, variable.shape))
    table = backbone.token_embedding.embeddings
    not_finite.check_that_others_are_written(keras_hub.models.LlamaCausalLM(backbone), table)


def test_more_positions_than_the_model_has_are_refused():
    with pytest.raises(UserError, match="at most 64"):
        open_writer(build_byte_gpt2(), None, 65)


def test_a_context_without_room_for_a_token_is_refused():
    for context in 1, -3:
        with pytest.raises(UserError, match=f"A context of {context} is too small"):
            open_writer(build_byte_gpt2(), None, context)
