"""LoRA and quantized kernels: an adapted model is the one that its merged weights make."""

from collections.abc import Iterable, Sequence

import keras
import numpy as np
import pytest
import tensorflow as tf

import tftpu
from tests.support.models import zoo
from tests.support.models.adapted import built, output, stir
from tests.support.models.strategies import relative
from tftpu import layer_internals as internals
from tftpu import models
from tftpu.models import adapters

TRANSFORMERS = ["vit", "bert", "bert_classes", "gpt", "llama"]
BASES = ["", "int8", "int4"]


def adapted(family: str, rank: int = 3, targets: str = "", base: str = "") -> keras.Model:
    model = built(family)
    models.enable_lora(model, rank, targets, base)
    return model


def quick_and_slow(families: Iterable[str], kinds: Sequence[str]) -> list:
    """Returns all pairs; those of the first family and of the last kind are quick."""
    first, *others = families
    quick = [(first, kind) for kind in kinds] + [(family, kinds[-1]) for family in others]
    slow = [(family, kind) for family in others for kind in kinds[:-1]]
    return quick + [pytest.param(*pair, marks=pytest.mark.slow) for pair in slow]


@pytest.mark.medium
@pytest.mark.parametrize("family", [*TRANSFORMERS, "convnext"])
def test_an_adapted_model_begins_as_the_model_itself(family):
    model = built(family)
    before = output(model, family)
    models.enable_lora(model, 3)
    assert relative(output(model, family), before) < 1e-6


@pytest.mark.medium
@pytest.mark.parametrize("family, base", quick_and_slow([*TRANSFORMERS, "convnext"], BASES))
def test_merged_weights_give_the_outputs_of_the_adapted_model(family, base):
    model = adapted(family, base=base)
    before = output(model, family)
    stir(model)
    found = output(model, family)
    assert relative(found, before) > 0.01
    plain = zoo.build(family)
    models.assign_merged(plain, model)
    assert relative(output(plain, family), found) < 2e-6


@pytest.mark.medium
@pytest.mark.parametrize("ending", [".keras", ".weights.h5"])
@pytest.mark.parametrize("base", ["int8", "int4"])
def test_adapters_above_integers_are_saved_beside_them(base, ending, tmp_path):
    model, path = adapted("gpt", base=base), str(tmp_path / f"model{ending}")
    stir(model)
    found = output(model, "gpt")
    if ending == ".keras":
        model.save(path)
        loaded = models.load_model(path)
    else:
        model.save_weights(path)
        loaded = adapted("gpt", base=base)
        loaded.load_weights(path)
    assert relative(output(loaded, "gpt"), found) < 1e-6
    assert relative(output(model, "gpt"), found) == 0  # saving changes nothing


@pytest.mark.medium
@pytest.mark.parametrize("targets", ["*_conv", "stage1_block1_reduce_conv,stage2*expand_conv"])
def test_convolutions_are_adapted_where_they_are_named(targets):
    model = adapted("resnet", targets=targets)
    stir(model)
    plain = zoo.build("resnet")
    models.assign_merged(plain, model)
    assert relative(output(plain, "resnet"), output(model, "resnet")) < 2e-6


@pytest.mark.medium
@pytest.mark.parametrize("family", ["vit", "gpt"])
def test_gradients_of_adapters_are_those_of_the_kernel_projected(family):
    """The gradients of y = x (W + A B): dA is dW B^T and dB is A^T dW."""
    model = adapted(family)
    stir(model)
    plain = zoo.build(family)
    models.assign_merged(plain, model)
    x = zoo.batch(family)[0]

    def gradients(of: keras.Model) -> dict[str, np.ndarray]:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(of(x, training=False)))
        found = tape.gradient(loss, [v.value for v in of.trainable_variables])
        return {v.path: np.asarray(g) for v, g in zip(of.trainable_variables, found)}

    ours, whole = gradients(model), gradients(plain)
    layers = adapters.list_adapted(model)
    assert len(layers) == 8
    for layer in layers:
        kernel = whole[f"{layer.path}/kernel"]
        a, b = (np.asarray(v) for v in (layer.lora_kernel_a, layer.lora_kernel_b))
        assert relative(ours[f"{layer.path}/lora_kernel_a"], kernel @ b.T) < 1e-4
        assert relative(ours[f"{layer.path}/lora_kernel_b"], a.T @ kernel) < 1e-4


@pytest.mark.parametrize(
    "family, also",
    [("gpt", set()), ("llama", set()), ("vit", {"head/kernel", "head/bias"}), ("bert", set())],
)
def test_adapters_and_a_classifier_alone_are_trained(family, also):
    model = adapted(family)
    trained = {v.path for v in model.trainable_variables}
    assert {path for path in trained if not path.endswith(adapters.ADAPTERS)} == also
    assert len(trained - also) == 2 * len(adapters.list_adapted(model)) > 0
    assert set(models.base_of(model)) == {v.path for v in model.weights} - trained
    assert len({v.path for v in model.weights}) == len(model.weights)  # each has its own name


def test_norms_of_a_frozen_base_run_as_in_evaluation():
    model = adapted("resnet", targets="*_conv")
    x = zoo.batch("resnet")[0]
    before = [np.array(v) for v in model.non_trainable_variables]
    assert relative(np.asarray(model(x, training=True)), output(model, "resnet")) < 1e-6
    for old, variable in zip(before, model.non_trainable_variables):
        assert np.array_equal(old, np.asarray(variable))


def test_layers_of_an_own_model_are_adapted_but_its_output():
    inner = keras.Sequential([keras.Input((8,)), keras.layers.Dense(8, "relu")], name="inner")
    model = keras.Sequential([keras.Input((8,)), inner, keras.layers.Dense(2, name="classes")])
    paths = models.enable_lora(model, 2)
    assert [path.split("/")[-1].split("_")[0] for path in paths] == ["dense"]
    trained = [v.path for v in model.trainable_variables if "lora" not in v.path]
    names = sorted(path.removeprefix(f"{model.name}/") for path in trained)
    assert names == ["classes/bias", "classes/kernel"]


def test_a_classifier_before_its_activation_is_trained_as_a_whole():
    x = keras.Input((8,))
    y = keras.layers.Dense(3, name="classes")(keras.layers.Dense(8, name="hidden")(x))
    model = keras.Model(x, keras.layers.Dropout(0.1)(keras.layers.Activation("softmax")(y)))
    assert models.enable_lora(model, 2) == ["hidden"]
    trained = {v.path for v in model.trainable_variables if "lora" not in v.path}
    assert trained == {"classes/bias", "classes/kernel"}


@pytest.mark.parametrize(
    "arguments, said",
    [
        ((0,), r"model.lora=0: give the rank"),
        ((2, "", "int2"), r"model.lora_base='int2': give int8 or int4"),
        ((2, "*_attention/qvk"), r"no dense layer or convolution matches '\*_attention/qvk'"),
    ],
)
def test_mistakes_are_said(arguments, said):
    with pytest.raises(tftpu.UserError, match=said):
        models.enable_lora(zoo.build("gpt"), *arguments)


def test_a_model_within_a_model_is_no_layer_to_adapt():
    class Backbone(keras.Model):  # as KerasHub's
        def enable_lora(self, rank):
            raise NotImplementedError

    x = keras.Input((4,))
    inner = Backbone(x, keras.layers.Dense(4, name="hidden")(x), name="backbone")
    model = keras.Model(x, keras.layers.Dense(2, name="classes")(inner(x)))
    with pytest.raises(tftpu.UserError, match=r"It has hidden, classes\."):
        models.enable_lora(model, 2, "nothing")
    assert models.enable_lora(model, 2, "*") == ["hidden", "classes"]


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        ("*_atention/qkv", " Did you mean '*_attention/qkv'?"),
        ("*qvk", " Did you mean '*qkv'?"),
        ("qkv", " Did you mean '*/qkv'?"),
        ("contract", " Did you mean '*contract'?"),
        ("*none", ""),
    ],
)
def test_a_glob_that_matches_nothing_is_answered_with_the_nearest(given, hint):
    with pytest.raises(tftpu.UserError) as refused:
        models.enable_lora(zoo.build("gpt"), 2, given)
    assert str(refused.value).endswith(f", block2_contract.{hint}")


def test_of_many_layers_the_parts_of_a_block_are_named_as_globs(monkeypatch):
    monkeypatch.setattr(adapters, "_MOST", 4)
    said = r"It has \*/out, \*/qkv, block1_expand, block1_contract, …"
    with pytest.raises(tftpu.UserError, match=said):
        models.enable_lora(zoo.build("gpt"), 2, "none")


def test_models_without_dense_layers_ask_for_the_layers_to_adapt():
    with pytest.raises(tftpu.UserError, match=r"name the layers to adapt with model.lora_targets"):
        models.enable_lora(zoo.build("resnet"), 2)
    own = keras.Sequential([keras.Input((8, 8, 1)), keras.layers.Conv2D(4, 3, name="own")])
    with pytest.raises(
        tftpu.UserError, match=r"works only with Dense and EinsumDense layers .* class Conv2D"
    ):
        models.enable_lora(own, 2, "*own", "int8")


def test_a_refused_model_is_as_it_was():
    class Own(keras.layers.EinsumDense):
        pass

    layers = [keras.layers.Dense(8, name="first"), Own("bd,de->be", 8)]
    own = keras.Sequential([keras.Input((4,)), *layers, keras.layers.Dense(2)])
    before = [variable.path for variable in own.trainable_variables]
    with pytest.raises(tftpu.UserError, match="is of the class Own"):
        models.enable_lora(own, 2, base="int8")
    assert [variable.path for variable in own.trainable_variables] == before
    assert len(models.enable_lora(own, 2)) == 2


@pytest.mark.slow
@pytest.mark.parametrize("base", ["int8", "int4"])
def test_weights_loaded_into_a_quantized_base_are_those_quantized_after_loading(base, tmp_path):
    keras.utils.set_random_seed(3)
    source = zoo.build("llama")
    path = str(tmp_path / "llama.safetensors")
    models.save_weights(source, path)
    models.enable_lora(source, 2, base=base)
    loaded = adapted("llama", rank=2, base=base)
    report = models.load_weights(loaded, path)
    assert not report.missing and not report.unused
    theirs = {v.path: np.asarray(v) for v in source.weights}
    for variable in loaded.weights:
        if not variable.path.endswith(adapters.ADAPTERS):
            assert np.array_equal(np.asarray(variable), theirs[variable.path]), variable.path


@pytest.mark.medium
@pytest.mark.filterwarnings("ignore:.*does not have a `quantize` method")
@pytest.mark.parametrize("family, mode", quick_and_slow(TRANSFORMERS, ["int8", "int4"]))
def test_models_that_keras_quantizes_keep_their_outputs(family, mode):
    """The zoo reads kernels of attention and tied embeddings itself, with their scales."""
    model = built(family)
    before = output(model, family)
    model.quantize(config=zoo.weights_alone(mode))
    modes = [getattr(layer, "quantization_mode", None) for layer in internals.flatten_layers(model)]
    assert modes.count(mode) >= 8
    assert relative(output(model, family), before) < {"int8": 0.03, "int4": 0.4}[mode]
    twin = zoo.build(family)
    twin_of = {v.path: v for v in twin.weights}
    for path, value in adapters.merge_weights(model).items():
        if path in twin_of and "embed" not in path:
            twin_of[path].assign(value)
    embed = next((v for v in internals.flatten_layers(model) if v.path == "tokens_embed"), None)
    if embed is not None:
        every = np.arange(embed.input_dim, dtype="int32")
        twin_of["tokens_embed/embeddings"].assign(np.asarray(embed(every)))
        for path in ("positions_embed/positions", "positions_embed/types"):
            if path in twin_of:
                value = next(v for v in model.weights if v.path == path)
                twin_of[path].assign(np.asarray(value))
    assert relative(output(twin, family), output(model, family)) < 2e-6


@pytest.mark.medium
@pytest.mark.filterwarnings("ignore:.*does not have a `quantize` method")
@pytest.mark.parametrize("family", ["gpt", "bert"])
def test_saved_weights_of_a_quantized_model_give_its_logits(family, tmp_path):
    model = built(family)
    model.quantize(config=keras.quantizers.Int8QuantizationConfig(activation_quantizer=None))
    path = str(tmp_path / "model.safetensors")
    models.save_weights(model, path)
    loaded = zoo.build(family)
    assert not models.load_weights(loaded, path).missing
    assert relative(output(loaded, family), output(model, family)) < 2e-6


@pytest.mark.parametrize("mode", [None, "int8", "int4"])
def test_adapters_of_an_embedding_are_merged_as_it_looks_up(mode):
    embed = keras.layers.Embedding(20, 16)
    model = keras.Sequential([keras.Input((20,)), embed])
    if mode is not None:
        embed.quantize(mode)
    embed.enable_lora(2)
    table = np.random.default_rng(0).normal(size=(2, 16))
    embed.lora_embeddings_b.assign(table)
    every = np.arange(20)[None]
    found = adapters.merge_weights(model)
    assert set(found) == {f"{embed.path}/embeddings"}
    assert relative(found[f"{embed.path}/embeddings"], np.asarray(model(every))[0]) < 1e-6


def test_a_layer_whose_integers_cannot_be_undone_is_named():
    layer = keras.layers.ReversibleEmbedding(8, 4, name="tokens")
    model = keras.Sequential([keras.Input((8,)), layer])
    layer.quantize("int8")
    with pytest.raises(tftpu.UserError, match="tokens' is a ReversibleEmbedding quantized to int8"):
        adapters.merge_weights(model)


def test_weights_that_share_a_path_are_not_merged():
    layers = [keras.layers.Dense(4, name="same") for _ in range(2)]
    for layer in layers:
        layer.build((None, 4))
    x = keras.Input((4,))
    inner = [
        keras.Sequential([keras.Input((4,)), layer], name=f"s{i}") for i, layer in enumerate(layers)
    ]
    model = keras.Model(x, inner[1](inner[0](x)))
    with pytest.raises(
        tftpu.UserError, match="are called 'same/kernel', so they cannot be written"
    ):
        adapters.merge_weights(model)


def test_a_rank_is_allowed_up_to_that_of_the_product_of_keras_adapters():
    x = keras.Input((6, 64))
    model = keras.Model(x, keras.layers.Dense(2)(keras.layers.MultiHeadAttention(4, 16)(x, x)))
    value = np.random.default_rng(0).normal(size=(2, 6, 64)).astype("float32")
    before = np.asarray(model(value))
    assert len(models.enable_lora(model, 16)) == 4
    assert relative(np.asarray(model(value)), before) < 1e-6
    convolution = keras.Sequential([keras.Input((8, 8, 1)), keras.layers.Conv2D(16, 3)])
    assert models.enable_lora(convolution, 8, "*conv2d*")
    convolution = keras.Sequential([keras.Input((8, 8, 1)), keras.layers.Conv2D(16, 3)])
    with pytest.raises(
        tftpu.UserError, match=r"\(3, 3, 1, 16\), so the rank of its adapters is at most 9"
    ):
        models.enable_lora(convolution, 10, "*conv2d*")
    assert not adapters.list_adapted(convolution)


def test_blank_targets_are_the_default_and_a_model_is_adapted_once():
    model, plain = zoo.build("vit"), zoo.build("vit")
    assert models.enable_lora(model, 2, " , ") == models.enable_lora(plain, 2)
    trained = [[v.path for v in m.trainable_variables] for m in (model, plain)]
    assert trained[0] == trained[1] and "head/kernel" in trained[0]
    with pytest.raises(tftpu.UserError, match="has adapters already, for example in "):
        models.enable_lora(model, 2)
    with pytest.raises(tftpu.UserError, match=r"model.lora=2.5: give the rank of the adapters"):
        models.enable_lora(zoo.build("vit"), 2.5)  # pyright: ignore[reportArgumentType]
