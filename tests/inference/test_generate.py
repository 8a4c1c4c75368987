"""Continuations of prompts, against a pass over the whole row for each token."""

import functools
import itertools
import json
from typing import Any, cast

import keras
import numpy as np
import pytest
import tensorflow as tf

import tftpu
from tests.support import not_finite
from tests.support.models import generation
from tests.support.models.generation import LENGTH, PROMPTS, SAMPLING, language_model, recomputed
from tests.support.programs import jax_process
from tftpu import sharding
from tftpu.errors import UserError
from tftpu.inference.generate import generate
from tftpu.inference.loop import Loop
from tftpu.inference.programs import PromptSize, Size, round_up_length
from tftpu.inference.rows import Row, build_rows
from tftpu.inference.sampling import Sampling, choose, gather_rules
from tftpu.inference.writer import Writer

LIKELIEST = Sampling(0)
FAMILIES = ["llama", pytest.param("gpt", marks=pytest.mark.exhaustive)]


@functools.cache
def model_of(family: str) -> Any:
    return language_model(family)


@functools.cache
def on_jax() -> Any:
    return json.loads(jax_process.output("models.generation"))


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_the_likeliest_tokens_are_those_of_a_pass_over_the_whole_row(family):
    model = model_of(family)
    found = generate(model, PROMPTS, length=LENGTH, sampling=LIKELIEST)
    assert found == recomputed(model, PROMPTS)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_jax_writes_the_same(family):
    """There the blocks are one loop, which a cache takes apart; Llama is cut over two devices."""
    found = on_jax()[family]
    assert found["likeliest"] == found["recomputed"]
    model = model_of(family)
    assert found["likeliest"] == generate(model, PROMPTS, length=LENGTH, sampling=LIKELIEST)
    assert found["drawn"] == generate(model, PROMPTS, length=LENGTH, sampling=SAMPLING, seed=3)


@pytest.mark.slow
def test_a_row_does_not_depend_on_the_others():
    model = model_of("gpt")
    together = generate(model, PROMPTS, length=LENGTH, sampling=SAMPLING, seed=1)
    assert generate(model, PROMPTS[:1], length=LENGTH, sampling=SAMPLING, seed=1) == together[:1]
    assert generate(model, PROMPTS, length=LENGTH, sampling=SAMPLING, seed=2) != together


@pytest.mark.slow
def test_rows_written_together_keep_their_own_rules_lengths_and_seeds():
    """A row does not depend on what it is written with, as a server does it."""
    model = model_of("gpt")
    choices = [Sampling(0.9, 17, 0.9), Sampling(1.4), LIKELIEST]
    rows = [
        Row(prompt, length, sampling, seed)
        for prompt, length, sampling, seed in zip(PROMPTS, (5, 20, 12), choices, (1, 2, 3))
    ]
    writer, found = Writer(model), [[], [], []]
    for parts in writer.write(rows):
        for text, part in zip(found, parts):
            text += part
    assert [len(text) for text in found] == [5, 20, 12]
    for text, row in zip(found, rows):
        assert text == [*itertools.chain(*(part for [part] in writer.write([row])))]
    with pytest.raises(ValueError, match=r"must have one vocabulary"):
        next(writer.write([*rows, Row([1], 5, Sampling(tokens=9))]))


@pytest.mark.slow
def test_several_devices_write_what_one_does():
    expected = generate(model_of("gpt"), PROMPTS, length=LENGTH, sampling=SAMPLING)
    with tftpu.connect(virtual_devices=2).scope():
        model = language_model("gpt")
    assert generate(model, PROMPTS, length=LENGTH, sampling=SAMPLING) == expected


@pytest.mark.slow
def test_a_row_ends_at_its_stop_and_all_of_them_end_the_work():
    model = model_of("llama")
    whole = generate(model, PROMPTS, length=LENGTH, sampling=LIKELIEST)
    stop = whole[0][4]
    expected = [row[: row.index(stop)] if stop in row else row for row in whole]
    assert generate(model, PROMPTS, length=LENGTH, sampling=LIKELIEST, stop=stop) == expected
    number: Any = np.int64(stop)
    assert generate(model, PROMPTS, length=LENGTH, sampling=LIKELIEST, stop=number) == expected
    parts = list(Writer(model, stop).write(build_rows(PROMPTS[:1], 100, LIKELIEST)))
    assert len(parts) == 2 and parts[0] + parts[1] == [whole[0][:1], whole[0][1:4]]


@pytest.mark.slow
def test_beyond_the_context_the_second_half_of_it_is_read_again():
    """Each row by itself; one of them is longer than the context from the start."""
    model = language_model("gpt", context=32)
    rows = [[1, 2, 3], [5] * 20, list(range(40))]
    found = generate(model, rows, length=48, sampling=LIKELIEST)
    for row, written in zip(rows, found):
        expected = row[-16:] if len(row) >= 32 else [*row]
        start = len(expected)
        while len(expected) < start + 48:
            seen = expected if len(expected) < 32 else expected[start_of(len(expected)) :]
            expected += recomputed(model, [seen], 1)[0]
        assert written == expected[start:]


def start_of(length: int) -> int:
    """Returns where the window of 32 begins that a row of this length is read with."""
    return (length - 16) // 16 * 16


@pytest.mark.exhaustive
def test_a_shorter_context_than_the_models_is_kept_to():
    whole, short = model_of("llama"), language_model("llama", context=32)
    rows = [[1, 2, 3], [5] * 20]
    expected = generate(short, rows, length=48, sampling=LIKELIEST)
    assert generate(whole, rows, length=48, sampling=LIKELIEST, context=32) == expected
    assert generate(whole, rows, length=48, sampling=LIKELIEST) != expected


@pytest.mark.slow
def test_a_row_that_ended_does_not_hold_the_others_back():
    model = language_model("gpt", context=32)
    [likely] = generate(model, [[7]], length=1, sampling=LIKELIEST)
    found = generate(model, [[7], [1, 2, 3]], length=60, sampling=LIKELIEST, stop=likely[0])
    alone = generate(model, [[1, 2, 3]], length=60, sampling=LIKELIEST, stop=likely[0])
    assert found == [[], alone[0]]


@pytest.mark.slow
def test_values_that_are_not_finite_are_an_error():
    model = language_model("gpt")
    model.get_layer("tokens_embed").embeddings.assign(np.full((97, 48), np.nan))
    with pytest.raises(UserError, match=r"not finite"):
        generate(model, [[1]], length=3)


@pytest.mark.exhaustive
def test_values_that_are_not_finite_end_their_text_alone():
    model = language_model("llama")
    not_finite.check_that_others_are_written(model, model.get_layer("tokens_embed").embeddings)


def test_prompts_that_cannot_be_continued_are_refused():
    model = model_of("gpt")
    with pytest.raises(UserError, match=r"A prompt is empty"):
        generate(model, [[1], []], length=1)
    with pytest.raises(UserError, match=r"There is no prompt"):
        generate(model, [], length=1)
    with pytest.raises(UserError, match=r"tokens \[97\], .* from 0 to 96"):
        generate(model, [[97]], length=1)
    for rows in ["abc"], [[1.5]], [1, 2], [[[1]]]:
        with pytest.raises(UserError, match=r"rows of token ids, such as"):
            generate(model, rows, length=1)  # pyright: ignore[reportArgumentType]
    with pytest.raises(UserError, match=r"seed=-1"):
        generate(model, [[1]], length=1, seed=-1)
    with pytest.raises(
        UserError, match=r"context=129 is too large: the model .* takes at most 128"
    ):
        generate(model, [[1]], length=1, context=129)
    with pytest.raises(UserError, match=r"length=0"):
        generate(model, [[1]], length=0)
    with pytest.raises(UserError, match=r"cannot write texts with|does not continue texts"):
        generate(keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)]), [[1]], length=1)


def chosen(sampling: Sampling, chances: list[float], uniform: np.ndarray) -> np.ndarray:
    logits = np.repeat(np.log(np.array([chances], np.float32)), len(uniform), 0)
    numbers = gather_rules([sampling] * len(uniform))
    given = tf.constant(logits), tf.constant(uniform, tf.float32), numbers
    found: Any = choose(*given, sampling.tokens)
    return found.numpy()


def test_tokens_are_drawn_as_often_as_they_are_likely():
    """Numbers in equal steps draw each token as often as its chance says, the likeliest first."""
    steps = (np.arange(1000) + 0.5) / 1000
    chances = [0.1, 0.4, 0.2, 0.3]

    def counts(**fields: Any) -> list[int]:
        return np.bincount(chosen(Sampling(**fields), chances, steps), minlength=4).tolist()

    assert counts() == [100, 400, 200, 300]
    assert counts(top_k=2) == [0, 571, 0, 429]
    # The steps are no draws: each border moves by rounding alone, at most one step on each side.
    assert counts(top_p=0.75) == pytest.approx([0, 4000 / 9, 2000 / 9, 3000 / 9], abs=1)
    assert counts(top_p=0.65) == pytest.approx([0, 4000 / 7, 0, 3000 / 7], abs=1)
    assert sum(counts(top_p=0.75)) == 1000
    assert counts(top_k=9, tokens=4) == counts(tokens=4)
    assert counts(top_p=0.39) == [0, 1000, 0, 0]  # at 0.4 the processor's rounding decides
    assert counts(top_p=1e-50) == counts(top_p=1e-40, top_k=3) == [0, 1000, 0, 0]
    assert counts(temperature=0) == [0, 1000, 0, 0]
    assert counts(tokens=1) == [1000, 0, 0, 0]
    squares = np.array(chances) ** 2
    assert counts(temperature=0.5) == pytest.approx(1000 * squares / squares.sum(), abs=1)


def test_a_number_near_one_draws_a_token_that_is_allowed():
    assert chosen(Sampling(top_k=2), [0.1, 0.4, 0.2, 0.3], np.array([1 - 2**-24])) == [3]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": -1.0}, r"temperature=-1.0: give 0"),
        ({"temperature": float("nan")}, r"temperature=nan"),
        ({"top_k": -1}, r"top_k=-1"),
        ({"top_p": 0.0}, r"top_p=0.0"),
    ],
)
def test_a_rule_without_a_meaning_is_refused(fields, message):
    with pytest.raises(UserError, match=message):
        Sampling(**fields)
    assert generation.SAMPLING.top_k == 20


def recurrent(layer: keras.layers.Layer, time: int | None = 24) -> Any:
    keras.utils.set_random_seed(0)
    shape = [keras.Input((time,), dtype="int32"), keras.layers.Embedding(50, 16), layer]
    return keras.Sequential([*shape, keras.layers.Dense(50)])


@pytest.mark.slow
def test_any_causal_model_continues_texts():
    model = recurrent(keras.layers.GRU(16, return_sequences=True))
    found = generate(model, [[1, 2, 3], [4]], length=12, sampling=LIKELIEST)
    rows = [[1, 2, 3], [4]]
    for _ in range(12):
        for row in rows:
            padded = np.array([row + [0] * (24 - len(row))], np.int32)
            row.append(int(model.predict_on_batch(padded)[0, len(row) - 1].argmax()))
    assert found == [rows[0][3:], rows[1][1:]]


class Own(keras.Model):
    """A subclassed causal model, which masks a token."""

    def __init__(self):
        super().__init__()
        self.embed = keras.layers.Embedding(50, 16, mask_zero=True)
        self.attention = keras.layers.MultiHeadAttention(2, 8)
        self.head = keras.layers.Dense(50)

    def call(self, tokens: Any) -> Any:
        x = self.embed(tokens)
        return self.head(self.attention(x, x, use_causal_mask=True))


@pytest.mark.slow
def test_a_subclassed_model_says_its_context():
    model = Own()
    model(np.ones((1, 24), np.int32))
    [found] = generate(model, [[1, 2, 3]], length=6, sampling=LIKELIEST, context=24)
    row = [1, 2, 3]
    for _ in range(6):
        logits: Any = model(np.array([row + [0] * (24 - len(row))], np.int32))
        row.append(int(logits[0, len(row) - 1].numpy().argmax()))
    assert found == row[3:]


@pytest.mark.medium
def test_models_that_cannot_write_are_refused():
    both = keras.layers.Bidirectional(keras.layers.GRU(8, return_sequences=True))
    with pytest.raises(UserError, match=r"predictions after a token depend on later tokens"):
        generate(recurrent(both), [[1]], length=1)
    with pytest.raises(UserError, match=r"takes any number of tokens, or is not built. "):
        generate(recurrent(both, None), [[1]], length=1)
    with pytest.raises(UserError, match=r"is not built. Build it, and say with how many"):
        generate(keras.Sequential([keras.layers.Dense(3)]), [[1]], length=1, context=8)
    few = keras.Sequential([keras.Input((8,), dtype="int32"), keras.layers.Embedding(9, 4)])
    averaged = keras.Sequential([few, keras.layers.GlobalAveragePooling1D()])
    with pytest.raises(UserError, match=r"\(batch, time\), and return logits of the next one"):
        generate(averaged, [[1]], length=1, context=8)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_the_products_that_a_tpu_runs_give_the_same(family):
    """There one token is eight rows, and one product serves all heads."""
    model = model_of(family)

    def for_a_tpu(function: Any, replaces_state: bool = False) -> Any:
        def traced(*args: Any) -> Any:
            with sharding.compiling_for("tpu"):
                return function(*args)

        return tf.function(traced, jit_compile=True, autograph=False)

    writer = Writer(model, compiled=for_a_tpu)
    for prompts in PROMPTS, PROMPTS[:1]:
        parts = list(writer.write(build_rows(prompts, LENGTH, LIKELIEST)))
        assert [[*itertools.chain(*row)] for row in zip(*parts)] == recomputed(model, prompts)


@pytest.mark.medium
def test_one_program_chooses_by_all_rules_each_row_by_its_own():
    rules = [Sampling(0), Sampling(0.7), Sampling(1, 1), Sampling(1, 3), Sampling(1, 0, 0.5)]
    rules += [Sampling(1, 300, 0.9), Sampling(0.5, 20, 0.8), Sampling(1, 999)]
    rng = np.random.default_rng(0)
    logits = tf.constant(rng.normal(0, 3, (len(rules), 500)), tf.float32)
    uniform = tf.constant(rng.random(len(rules)), tf.float32)
    program: Any = tf.function(choose, jit_compile=True, autograph=False)
    together = program(logits, uniform, gather_rules(rules)).numpy()
    for row, rule in enumerate(rules):
        part = slice(row, row + 1)
        alone = program(logits[part], uniform[part], gather_rules([rule])).numpy()
        assert alone == together[part]
    assert program.experimental_get_tracing_count() == 2  # for all of them, and for one


def test_rules_that_sort_the_whole_vocabulary_are_known():
    sorting = [Sampling(1, 0, 0.9), Sampling(1, 257), Sampling(1, 257, 0.9, tokens=300)]
    assert all(rule.has_full_sort for rule in sorting)
    others = [
        Sampling(0, 0, 0.9),
        Sampling(),
        Sampling(1, 256, 0.9),
        Sampling(1, 0, 0.9, tokens=256),
    ]
    assert not any(rule.has_full_sort for rule in others)


@pytest.mark.parametrize(("context", "count"), [(16, 5), (128, 7), (300, 12), (4096, 12)])
def test_usual_sizes_are_few_and_none_is_larger_than_the_context(context, count):
    writer = Writer(language_model("gpt", context=context, layers=1))
    sizes = writer.programs.list_usual_sizes(64)
    assert len(sizes) == len(set(sizes)) == count
    assert max(size.slots for size in sizes if isinstance(size, Size)) == min(context, 512)
    assert max(size.time for size in sizes if isinstance(size, PromptSize)) == min(context, 256)
    assert [size.rows for size in sizes if isinstance(size, Size)][:4] == [1, 8, 4, 2]
    few = writer.programs.list_usual_sizes(3)
    assert max(size.rows for size in few if isinstance(size, Size)) == 2


@pytest.mark.exhaustive
def test_a_size_that_is_compiled_ahead_is_the_one_that_rows_use():
    writer, compiled = Writer(model_of("gpt")), []
    for size in writer.programs.list_usual_sizes(2):
        writer.programs.compile(size)

    def write(*rows: Row) -> None:
        batch = writer.open_batch(0, compiled.append)
        for key, row in enumerate(rows):
            batch.add(key, row)
        while len(batch):
            list(batch.advance())

    write(Row([1], 100, LIKELIEST))
    write(Row([1], 9, SAMPLING), Row([1], 5, LIKELIEST))
    write(Row([1] * 90, 30, LIKELIEST))
    assert not compiled
    write(*[Row([1], 5, SAMPLING)] * 7)
    assert compiled == ["up to 8 texts at once, of up to 128 tokens with their prompts"]


@pytest.mark.slow
def test_other_lengths_compile_nothing_of_their_own():
    model, shapes = model_of("gpt"), set()

    def compiled(function: Any, replaces_state: bool = False) -> Any:
        def called(*args: Any) -> Any:
            leaves = keras.tree.flatten(args)
            shapes.add(str([getattr(x, "shape", x) for x in leaves]))
            return function(*args)

        return called

    writer = Writer(model, compiled=compiled)
    for length in 3, 5, 7, 16:
        parts = [part for [part] in writer.write([Row([1, 2, 3], length, LIKELIEST)])]
        assert sum(map(len, parts)) == length
    assert len(shapes) == 3  # of reading, of joining and of writing


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_that_joins_others_late_is_written_as_alone(family):
    """Rows join, leave and outgrow their room at any time; one is removed."""
    writer = Writer(language_model(family, context=320))
    prompts = [[1, 2, 3], [5] * 11, [9, 8], list(range(70)), [*range(90)] * 3, [4]]
    lengths = (200, 7, 60, 30, 120, 1)
    rows = [
        Row(prompt, length, SAMPLING, seed)
        for seed, (prompt, length) in enumerate(zip(prompts, lengths))
    ]
    alone = [[*itertools.chain(*(part for [part] in writer.write([row])))] for row in rows]
    batch, found, sizes = writer.open_batch(0), [[] for _ in rows], []
    for key, row in enumerate(rows):
        batch.add(key, row)
        if key == 2:
            batch.add("gone", Row([7], 300, SAMPLING))
        for parts in itertools.chain(batch.advance(), batch.advance()):
            for part in parts:
                if part.key != "gone":
                    found[part.key] += part.tokens
    batch.remove("gone")
    while len(batch):
        sizes.append(len(batch))
        for part in itertools.chain(*batch.advance()):
            found[part.key] += part.tokens
    assert found == alone
    assert max(sizes) > 1


@pytest.mark.slow
def test_a_long_prompt_is_read_in_chunks_between_which_others_are_written():
    model = language_model("gpt", context=1024, layers=1)
    writer = Writer(model)
    long = np.random.default_rng(0).integers(0, 97, 700).tolist()
    batch = writer.open_batch(0)
    batch.add("short", Row([1, 2], 40, LIKELIEST))
    list(batch.advance())
    batch.add("long", Row(long, 3, LIKELIEST))
    rounds = [[part for parts in batch.advance() for part in parts] for _ in range(3)]
    assert [[part.key for part in parts] for parts in rounds] == [
        ["short"],
        ["short"],
        ["long", "short", "long"],
    ]
    found = [token for part in rounds[-1] if part.key == "long" for token in part.tokens]
    assert found == recomputed(model, [long], 3)[0]


def test_few_lengths_of_prompts_are_compiled():
    lengths = {round_up_length(length) for length in range(1, 1025)}
    assert sorted(lengths) == [64, 96, 128, 192, 256, 384, 512, 768, 1024]
    assert all(length <= round_up_length(length) for length in range(1, 1025))


def test_a_row_is_put_into_the_ring_with_its_first_slot_where_it_belongs():
    loop, row = Loop(cast(Any, None), choose), np.arange(1, 9, dtype=np.float32).reshape(1, 8, 1)
    for first in 0, 5, 7:
        found: Any = loop.insert([np.zeros((3, 8, 1), np.float32)], [row], 1, first)[0]
        expected = np.zeros((3, 8))
        expected[1] = np.roll(np.arange(1, 9), first)
        np.testing.assert_array_equal(np.asarray(found[0])[..., 0], expected)


@pytest.mark.medium
def test_the_memory_of_texts_is_freed_when_the_last_one_ends_or_is_removed():
    sizes = {"layers": 1, "width": 8, "heads": 2, "vocabulary": 9, "context": 16}
    batch: Any = Writer(tftpu.models.build("gpt2_small", **sizes)).open_batch(9)
    row = Row([1, 2], 6, Sampling(tokens=9))
    batch.add("one", row)
    batch.add("two", row)
    while len(batch):
        for _ in batch.advance():
            pass
    assert batch._state is None
    batch.add("three", row)
    next(iter(batch.advance()))
    batch.remove("three")
    assert not len(batch) and batch._state is None


def test_another_slot_of_the_ring_takes_the_same_program():
    """A slot that XLA needs to know while it compiles costs 0.1 s for each text."""
    loop, ring, row = Loop(cast(Any, None), choose), tf.zeros((3, 8, 1)), tf.ones((1, 8, 1))

    def insert(index, first):
        return loop.insert([ring], [row], index, first)

    program: Any = tf.function(insert, jit_compile=True, autograph=False)
    places = [(tf.constant(1), tf.constant(first)) for first in (0, 5)]
    one, other = (program.experimental_get_compiler_ir(*place)(stage="hlo") for place in places)
    assert one == other
