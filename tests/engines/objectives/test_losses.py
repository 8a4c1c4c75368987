"""Cross-entropy in chunks of the vocabulary changes no value, gradient or step."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tftpu
from tests.support.steps.lowering import lower
from tests.support.steps.stepping import make_step, train
from tftpu import models
from tftpu.optim import chunked as chunks
from tftpu.optim.losses import SmoothedCrossentropy
from tftpu.optim.metrics import BitsPerToken
from tftpu.preflight.compiling import compiler
from tftpu.preflight.pricing import cost
from tftpu.tpu.slices import parse_slice


def tiny_gpt(metrics=(), loss=None, **fields):
    sizes = {"layers": 1, "width": 16, "heads": 2, "vocabulary": 50, "context": 8, **fields}
    model = models.build("gpt2_small", **sizes)
    rng = np.random.default_rng(0)
    model.set_weights([0.1 * rng.normal(size=w.shape) for w in model.get_weights()])
    model.compile(keras.optimizers.SGD(0.5), loss or SmoothedCrossentropy(), metrics=metrics)
    return model


def text(steps=2, weighted=True):
    rng = np.random.default_rng(1)
    draw = [rng.integers(0, 50, (8, 9)) for _ in range(steps)]
    return [
        (
            d[:, :-1].astype("int32"),
            d[:, 1:].astype("int32"),
            rng.uniform(size=(8, 8)).astype("float32") if weighted else None,
        )
        for d in draw
    ]


def run(replicas, gradient_accumulation_steps=1, **options):
    engine = tftpu.connect(virtual_devices=replicas)
    with engine.scope():
        model = tiny_gpt(**options)
    results = train(
        engine,
        make_step(engine, model, text(), gradient_accumulation_steps=gradient_accumulation_steps),
        text(),
    )
    return results, model.get_weights()


@pytest.mark.slow
def test_a_step_in_chunks_is_the_step_without_chunks_on_any_number_of_replicas(monkeypatch):
    whole, expected = run(1)
    monkeypatch.setattr(chunks, "CHUNK", 20)
    seen = []
    real = chunks.chunked_crossentropy
    monkeypatch.setattr(chunks, "chunked_crossentropy", lambda *a: (seen.append(1), real(*a))[1])
    for replicas, gradient_accumulation_steps in ((1, 1), (1, 4), (8, 1), (2, 2)):
        seen.clear()
        metrics = [keras.metrics.SparseCategoricalAccuracy("accuracy")]
        results, weights = run(replicas, gradient_accumulation_steps, metrics=metrics)
        assert seen  # chunks were used, and a metric read the logits too
        for a, b in zip(results, whole):
            assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)
            assert 0 <= a["accuracy"] <= 1
        for a, b in zip(weights, expected):
            np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.parametrize("remat", ["none", "block"])
@pytest.mark.parametrize("training", [False, True])
def test_factored_logits_are_the_models_and_the_product_of_their_factors(remat, training):
    model = tiny_gpt(remat=remat)
    x = text()[0][0]
    logits, hidden, matrix = model.factored_logits(x, training)
    np.testing.assert_allclose(logits, model(x, training=training), atol=1e-6)
    np.testing.assert_allclose(hidden @ tf.transpose(matrix), logits, atol=1e-5)


HEADS = {
    "dense": lambda x, embed: keras.layers.Dense(50, use_bias=False)(x),
    "tied": lambda x, embed: embed(x, reverse=True),
    "biased": lambda x, embed: keras.layers.Dense(50, bias_initializer="normal")(x),
    "scaled": lambda x, embed: embed(x, reverse=True) * 2.0,
}
LOSSES = {
    "keras": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    "smoothed": SmoothedCrossentropy(0.1),
    "ignoring": keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=3),
    "probabilities": keras.losses.SparseCategoricalCrossentropy(),
}


@pytest.mark.medium
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("head", HEADS)
def test_any_models_last_product_is_computed_in_chunks(head, loss, monkeypatch):
    """If its logits are nothing but the product, and the loss is that of logits and class ids."""
    keras.utils.set_random_seed(0)
    embed = keras.layers.ReversibleEmbedding(50, 16)
    tokens = keras.Input((8,), dtype="int32")
    hidden = keras.layers.Dense(16, "tanh")(embed(tokens))
    model = keras.Model(tokens, HEADS[head](hidden, embed))
    if loss == "probabilities":
        model = keras.Model(tokens, keras.layers.Softmax()(model.output))
    accuracy = keras.metrics.SparseCategoricalAccuracy("accuracy")
    measured = [accuracy, BitsPerToken(from_logits=loss != "probabilities")]
    model.compile(keras.optimizers.SGD(0.1), LOSSES[loss], weighted_metrics=measured)
    seen, real = [], chunks.chunked_crossentropy
    monkeypatch.setattr(chunks, "chunked_crossentropy", lambda *a: (seen.append(1), real(*a))[1])
    monkeypatch.setattr(chunks, "CHUNK", 20)
    rng = np.random.default_rng(0)
    x, y = (rng.integers(0, 50, (8, 8)).astype("int32") for _ in "xy")
    before = model.get_weights()
    weight = rng.integers(0, 2, (8, 8)).astype("float32")
    fit = {"batch_size": 8, "epochs": 2, "shuffle": False, "verbose": 0, "sample_weight": weight}
    found = tftpu.Trainer(model).fit(x, y, **fit)
    ours = model.get_weights()
    assert bool(seen) == (head in ("dense", "tied") and loss in ("keras", "smoothed"))
    model.set_weights(before)
    expected = model.fit(x, y, **fit)
    assert found.history["loss"] == pytest.approx(expected.history["loss"], rel=1e-6)
    assert found.history["accuracy"] == expected.history["accuracy"]
    bits = found.history["bits_per_token"]
    assert bits == pytest.approx(expected.history["bits_per_token"], rel=1e-6)
    for a, b in zip(ours, model.get_weights()):
        np.testing.assert_allclose(a, b, atol=1e-6)


@pytest.mark.medium
def test_a_model_still_returns_plain_logits():
    model = tiny_gpt()
    x = text()[0][0]
    np.testing.assert_allclose(model.predict(x, verbose=0), model(x), atol=1e-6)
    assert model(x).shape == (8, 8, 50)


@pytest.mark.slow
@pytest.mark.compiles
def test_no_array_of_time_by_vocabulary_is_in_a_tpus_memory():
    vocabulary, time, batch = 32_768, 512, 8

    def model():
        sizes = {"layers": 1, "width": 128, "heads": 2, "vocabulary": vocabulary}
        built = models.build("gpt2_small", context=time, **sizes)
        read = [BitsPerToken(), keras.metrics.SparseCategoricalAccuracy()]
        built.compile(keras.optimizers.SGD(0.1), SmoothedCrossentropy(), metrics=read)
        return built

    target, tokens = parse_slice("v5e-8"), tf.TensorSpec((batch, time), tf.int32)
    program = lower(model, (tokens, tokens), target.replicas, "mixed_bfloat16")
    compiled = compiler.compile_program(program, target)
    logits = 4 * batch * time * vocabulary
    priced = cost.price(program, compiled, target)
    assert compiled.memory["temp_size_in_bytes"] < logits / 2
    assert max(t.bytes for t in priced.large) < logits / 4
    # Each chunk is counted, although the number of iterations depends on the logits: the logits
    # twice, and two gradients. The rest of this model is small.
    assert 1 < priced.flops / (4 * 2 * batch * time * vocabulary * 128) < 1.1
