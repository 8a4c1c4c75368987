"""Exports of every family, run by the runtime of their format in its own process."""

import errno
import json
import math
import os
import resource
import zipfile

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support.models import zoo
from tests.support.repository.cases import mostly_rare
from tftpu import models
from tftpu.config.data import ExportInputs
from tftpu.errors import UserError
from tftpu.inference.exporting import export
from tftpu.inference.exporting.serving import Serving, build_inputs

ROWS = tf.TensorSpec((8, 12), tf.int32)  # the tokens that a language model is given
NAMES = [f"class {n}" for n in range(5)]


def pixels(model: keras.Model) -> ExportInputs:
    shape = tuple(model.input_shape[1:])

    def prepare(images):
        return tf.cast(images, tf.float32) / 64.0 - 1.2

    return ExportInputs({"images": shape}, {"images": "uint8"}, prepare)


def serving(family: str, names=NAMES, **options) -> Serving:
    """Returns a model of the zoo with weights large enough to tell its outputs apart."""
    model = zoo.build(family)
    rng = np.random.default_rng(0)
    for variable in model.trainable_variables:
        value = keras.ops.convert_to_numpy(variable)
        variable.assign(value + rng.normal(0, 0.1, value.shape))
    given = pixels(model) if hasattr(zoo.TINY[family], "image_size") else None
    return Serving(model, *build_inputs(model, ROWS, given), names, **options)


RARE = pytest.mark.exhaustive


@pytest.mark.slow
@pytest.mark.parametrize("family", mostly_rare(zoo.TINY, ("resnet", "llama")))
def test_every_family_is_the_same_model_for_tensorflow_alone_and_onnx_runtime(family, tmp_path):
    made = serving(family)
    for found in (
        export.saved_model(made, str(tmp_path / "saved")),
        export.onnx(made, str(tmp_path / "m.onnx"), {"classes": NAMES}),
    ):
        assert found.difference < 5e-6
    weights = made.weight_bytes
    variables = tmp_path / "saved" / "variables" / "variables.data-00000-of-00001"
    assert weights <= variables.stat().st_size < 1.1 * weights + 16_384  # once, and the bookkeeping
    images = made.inputs[0].name == "images"
    classes = images or family == "bert_classes"
    assert set(made.output_specs()) == ({"logits", "class", "label"} if classes else {"logits"})
    assert [i.name for i in made.inputs] == ["images" if images else "tokens"]


@pytest.mark.slow
@pytest.mark.parametrize("family", mostly_rare(("llama", "bert", "gpt"), ("llama",)))
def test_documents_of_one_row_have_the_logits_of_rows_of_their_own(family, tmp_path):
    import onnxruntime

    alone = serving(family)
    names = ["tokens", "segments", "positions", *(["types"] if family == "bert" else [])]
    packed = Serving(alone.model, *build_inputs(alone.model, ROWS, None, names))
    assert [i.name for i in packed.inputs] == names
    path = str(tmp_path / "m.onnx")
    assert export.onnx(packed, path, {}).difference < 5e-6
    assert export.saved_model(packed, str(tmp_path / "saved")).difference < 5e-6
    assert export.litert(packed, str(tmp_path / "m.tflite"), {}).difference < 5e-6
    tokens = np.random.default_rng(1).integers(0, 20, (1, 12), "int32")
    given = {
        "tokens": tokens,
        "segments": np.array([[1] * 5 + [2] * 7], "int32"),
        "positions": np.array([[*range(5), *range(7)]], "int32"),
        "types": np.zeros((1, 12), "int32"),
    }
    session = onnxruntime.InferenceSession(path)
    (found,) = session.run(["logits"], {name: given[name] for name in names})
    for document in (slice(0, 5), slice(5, 12)):
        logits = np.asarray(alone.model(tokens[:, document]))
        np.testing.assert_allclose(found[:, document], logits, atol=1e-5)


@pytest.mark.parametrize(
    "family, chosen, said",
    [
        ("gpt", ["tokens", "segment"], "no input 'segment'. Did you mean 'segments'"),
        ("gpt", ["segments"], "The inputs segments lack 'tokens'"),
        ("resnet", ["tokens"], "has no input 'tokens': choose no inputs"),
    ],
)
def test_inputs_that_cannot_be_chosen_are_named(family, chosen, said):
    with pytest.raises(UserError, match=said):
        build_inputs(zoo.build(family), ROWS, None, chosen)


def test_an_input_that_a_model_needs_is_not_left_out():
    named = {n: keras.Input((None,), dtype="int32", name=n) for n in ("tokens", "mask")}
    hidden = keras.layers.Embedding(20, 4)(named["tokens"]) * named["mask"][..., None]
    model = keras.Model(named, hidden)
    with pytest.raises(UserError, match="needs the input 'mask': choose tokens, mask"):
        build_inputs(model, ROWS, None, ["tokens"])
    given = ExportInputs({"text": (3,)}, {"text": "int32"}, lambda text: text)
    with pytest.raises(UserError, match="determine the inputs of its export, text"):
        build_inputs(model, ROWS, given, ["tokens"])
    taken, _ = build_inputs(model, ROWS, None, ["tokens", "mask"])
    assert [(i.below, i.tried_below) for i in taken] == [(None, 20), (None, 20)]
    assert taken[0].draw_examples(5, 0).max() < 20


def test_nested_inputs_are_refused():
    a, b = keras.Input((3,), name="a"), keras.Input((2,), name="b")
    model = keras.Model({"x": [a, b]}, keras.layers.Concatenate()([a, b]))
    with pytest.raises(UserError, match="inputs are nested"):
        build_inputs(model, ROWS, None)


def test_what_a_server_refuses_is_what_no_model_takes():
    taken, _ = build_inputs(zoo.build("bert"), ROWS, None, ["tokens", "segments", "positions"])
    assert [i.below for i in taken] == [20, None, None]


def test_sizes_of_a_list_of_inputs_are_found_by_name():
    b, a = keras.Input((None, 3), name="b"), keras.Input((None, 3), name="a")
    gap = keras.layers.GlobalAveragePooling1D()
    model = keras.Model([b, a], keras.layers.Dense(2)(gap(b) - gap(a)))
    specs = {"a": tf.TensorSpec((4, 7, 3)), "b": tf.TensorSpec((4, 5, 3))}
    found = build_inputs(model, specs, None)[0]
    assert [(i.name, i.shape) for i in found] == [("b", (5, 3)), ("a", (7, 3))]
    with pytest.raises(UserError, match="input 'b' has the shape"):
        build_inputs(model, {"c": specs["a"], "d": specs["b"]}, None)


def test_sizes_that_a_model_leaves_open_are_those_of_its_data():
    a, b = keras.Input((None, 3), name="a"), keras.Input((None,), name="b")
    model = keras.Model([a, b], keras.layers.Dense(2)(a) + b[..., None])
    specs = tf.TensorSpec((4, 7, 3)), tf.TensorSpec((4, 7))
    assert [i.shape for i in build_inputs(model, specs, None)[0]] == [(7, 3), (7,)]
    with pytest.raises(UserError, match=r"input 'a' has the shape \(None, None, 3\)"):
        build_inputs(model, tf.TensorSpec((4, 7)), None)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*does not have a `quantize` method")
@pytest.mark.parametrize(
    ("family", "mode"),
    [
        ("gpt", "int4"),
        *(
            pytest.param(*case, marks=RARE)
            for case in (
                ("efficientnetv2", "int8"),
                ("efficientnetv2", "int4"),
                ("bert_classes", "int8"),
                ("bert_classes", "int4"),
                ("gpt", "int8"),
            )
        ),
    ],
)
def test_a_model_that_keras_quantized_is_the_same(family, mode, tmp_path):
    """Its activations stay floats: rounding them differs between runtimes, here and there."""
    made = serving(family)
    made.model.quantize(config=zoo.weights_alone(mode))
    given = pixels(made.model) if hasattr(zoo.TINY[family], "image_size") else None
    again = Serving(made.model, *build_inputs(made.model, ROWS, given), NAMES, labels=False)
    assert export.saved_model(again, str(tmp_path / "saved")).difference < 2e-5
    assert export.onnx(again, str(tmp_path / "m.onnx"), {}).difference < 2e-5
    assert export.litert(again, str(tmp_path / "m.tflite"), {}).difference < 2e-5


@pytest.mark.slow
def test_a_model_whose_activations_keras_rounds_is_no_litert_model(tmp_path):
    made = serving("gpt")
    made.model.quantize("int8", filters="head|expand")
    with pytest.raises(UserError, match="cannot be converted to LiteRT"):
        export.litert(made, str(tmp_path / "m.tflite"), {})


@pytest.mark.medium
def test_the_names_of_onnx_and_what_it_says_of_itself(tmp_path):
    import onnx

    made = serving("resnet")
    export.onnx(made, str(tmp_path / "m.onnx"), {"classes": NAMES, "step": 7})
    model = onnx.load(str(tmp_path / "m.onnx"))
    shapes = {
        value.name: [d.dim_param or d.dim_value for d in value.type.tensor_type.shape.dim]
        for value in [*model.graph.input, *model.graph.output]
    }
    assert shapes == {
        "images": ["batch", 8, 8, 3],
        "logits": ["batch", 5],
        "class": ["batch"],
        "label": ["batch"],
    }
    about = {p.key: p.value for p in model.metadata_props}
    assert len(about.pop("crc32c")) == 8
    assert about == {"classes": str(NAMES).replace("'", '"'), "step": "7"}


@pytest.mark.slow
@pytest.mark.parametrize("family", mostly_rare(zoo.TINY, ("vit", "gpt")))
def test_every_family_is_the_same_model_for_litert(family, tmp_path):
    from ai_edge_litert import schema_py_generated as schema

    made = serving(family, labels=False)
    path = tmp_path / "m.tflite"
    assert export.litert(made, str(path), {}).difference < 5e-6
    model = schema.ModelT.InitFromPackedBuf(path.read_bytes(), 0)
    # Neither operations of TensorFlow (Flex) nor other custom ones.
    assert {code.customCode for code in model.operatorCodes} == {None}
    stored = sum(len(buffer.data) for buffer in model.buffers if buffer.data is not None)
    assert 0.9 * made.weight_bytes < stored < made.weight_bytes + 2000  # once, and constants
    images = made.inputs[0].name == "images"
    classes = images or family == "bert_classes"
    (signature,) = model.signatureDefs
    assert signature.signatureKey == b"serving_default"
    assert [i.name for i in signature.inputs] == [b"images" if images else b"tokens"]
    outputs = {b"logits", b"class"} if classes else {b"logits"}
    assert {o.name for o in signature.outputs} == outputs


@pytest.mark.medium
def test_the_gelu_of_litert_is_exact(tmp_path):
    from ai_edge_litert.interpreter import Interpreter, OpResolverType

    from tftpu.models.layers.gelu import gelu

    x = keras.Input((1000,), name="x")
    for name, function in ("zoo", gelu), ("keras", keras.activations.gelu):
        path = str(tmp_path / f"{name}.tflite")
        model = keras.Model(x, keras.layers.Activation(function)(x))
        export.litert(Serving(model, *build_inputs(model, ROWS, None)), path, {})
        values = np.linspace(-6, 6, 5000, dtype="float32").reshape(5, 1000)
        exact = [0.5 * v * math.erfc(-v * math.sqrt(0.5)) for v in values.reshape(-1).tolist()]
        for kernels in OpResolverType.AUTO, OpResolverType.BUILTIN_REF:
            runtime = Interpreter(path, experimental_op_resolver_type=kernels)
            found = runtime.get_signature_runner("serving_default")(x=values)["logits"]
            np.testing.assert_allclose(found.reshape(-1), exact, rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_what_a_litert_file_says_of_itself(tmp_path):
    made = serving("resnet", labels=False)
    export.litert(made, str(tmp_path / "m.tflite"), {"step": 7})
    with zipfile.ZipFile(tmp_path / "m.tflite") as inside:
        assert inside.read("labels.txt").decode().splitlines() == NAMES
        assert json.loads(inside.read("about.json")) == {"step": 7}


def test_litert_that_is_not_installed_is_named(tmp_path, monkeypatch):
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="needs ai-edge-litert: run `pip install"):
        export.litert(serving("resnet"), str(tmp_path / "m.tflite"), {})


def test_weights_that_no_litert_file_holds_are_refused(tmp_path, monkeypatch):
    from tftpu.inference.exporting import litert_model

    monkeypatch.setattr(litert_model, "_MOST", 20_000)
    with pytest.raises(UserError, match="in float32, but a LiteRT file holds at most 2"):
        export.litert(serving("resnet"), str(tmp_path / "m.tflite"), {})


@pytest.mark.slow
def test_a_keras_file_of_the_model_behind_its_pixels(tmp_path):
    from tftpu.models.layers.pixels import standardize_pixels

    model = standardize_pixels(zoo.build("resnet"))
    given = ExportInputs({"images": (8, 8, 3)}, {"images": "uint8"}, lambda images: images)
    made = Serving(model, *build_inputs(model, ROWS, given), None)
    export.keras_file(made, str(tmp_path / "m.keras"))
    again = models.load_model(str(tmp_path / "m.keras"))
    x = made.draw_examples(3)["images"]
    np.testing.assert_allclose(again(x), model(x), atol=1e-6)


def test_a_damaged_keras_file_gives_one_error(tmp_path):
    path = tmp_path / "m.keras"
    keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)]).save(path)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)
    with pytest.raises(UserError, match=r"m\.keras is damaged"):
        models.load_model(str(path))


@pytest.mark.medium
def test_an_export_that_differs_is_discarded(tmp_path, monkeypatch):
    made = serving("resnet")
    honest = made.outputs

    def other(given):
        found = honest(given)
        return {**found, "logits": found["logits"] * 1.001}

    monkeypatch.setattr(made, "outputs", other)
    with pytest.raises(UserError, match=r"'logits' differs from the model's by 1\.0e-03"):
        export.onnx(made, str(tmp_path / "m.onnx"), {})
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_label_that_differs_is_discarded(tmp_path, monkeypatch):
    made = serving("resnet")
    honest = made.outputs
    monkeypatch.setattr(
        made, "outputs", lambda x: {**honest(x), "label": np.array([b"another"] * len(x["images"]))}
    )
    with pytest.raises(UserError, match="its output 'label' differs from the model's"):
        export.saved_model(made, str(tmp_path / "m"))
    assert not list(tmp_path.iterdir())


def test_what_a_runtime_cannot_run_is_discarded(tmp_path, monkeypatch):
    from tftpu.inference.exporting import onnx_model

    def damaged(serving, path, about):
        path.write_bytes(b"no model")

    monkeypatch.setattr(onnx_model, "write", damaged)
    with pytest.raises(UserError, match="its runtime cannot run it"):
        export.onnx(serving("resnet"), str(tmp_path / "m.onnx"), {})
    assert not list(tmp_path.iterdir())


def test_what_is_there_is_not_replaced(tmp_path):
    (tmp_path / "m.onnx").write_text("mine")
    with pytest.raises(UserError, match="exists already"):
        export.onnx(serving("resnet"), str(tmp_path / "m.onnx"), {})
    assert (tmp_path / "m.onnx").read_text() == "mine"


@pytest.mark.slow
def test_a_model_of_ones_own_with_several_inputs_and_outputs(tmp_path):
    a, b = keras.Input((3,), name="z"), keras.Input((2,), name="b")
    total = keras.layers.Add()([keras.layers.Dense(2)(a), b])
    outputs = {"sum": total, "twice": a * 2.0, "above": keras.ops.cast(total > 0, "int32")}
    model = keras.Model({"z": a, "b": b}, outputs)
    made = Serving(model, *build_inputs(model, ROWS, None), NAMES)
    assert made.class_names is None
    assert export.saved_model(made, str(tmp_path / "saved")).difference < 1e-6
    assert export.onnx(made, str(tmp_path / "m.onnx"), {}).difference < 1e-6
    assert export.litert(made, str(tmp_path / "m.tflite"), {}).difference < 1e-6
    assert export.keras_file(made, str(tmp_path / "m.keras")).difference < 1e-6
    assert set(made.output_specs()) == {"sum", "twice", "above"}


@pytest.mark.slow
def test_a_keras_file_of_inputs_and_outputs_without_names(tmp_path):
    a, b = keras.Input((3,)), keras.Input((2,))
    model = keras.Model([a, b], [keras.layers.Dense(2)(a), b * 2.0])
    made = Serving(model, *build_inputs(model, ROWS, None))
    assert export.keras_file(made, str(tmp_path / "m.keras")).difference < 1e-6


@pytest.mark.slow
def test_one_class_is_a_class(tmp_path):
    x = keras.Input((3,), name="x")
    model = keras.Model(x, keras.layers.Dense(1)(x))
    made = Serving(model, *build_inputs(model, ROWS, None), ["one"])
    assert export.saved_model(made, str(tmp_path / "saved")).difference < 1e-6


def test_an_operation_that_onnx_lacks_is_named(tmp_path):
    x = keras.Input((3,), name="x")
    model = keras.Model(x, keras.ops.argmax(x, -1))  # Keras takes the bits of floats for it
    made = Serving(model, *build_inputs(model, ROWS, None))
    with pytest.raises(UserError, match=r"cannot be converted to ONNX.*Bitcast"):
        export.onnx(made, str(tmp_path / "m.onnx"), {})


def test_an_operation_that_litert_lacks_is_named(tmp_path):
    x = keras.Input((3,), name="x")
    model = keras.Model(x, keras.ops.erf(x))
    made = Serving(model, *build_inputs(model, ROWS, None))
    with pytest.raises(UserError, match=r"cannot be converted to LiteRT \(LiteRT has no Erf\)"):
        export.litert(made, str(tmp_path / "m.tflite"), {})


@pytest.mark.parametrize("name", ["saved", "m.onnx"])
def test_a_full_disk_is_named_in_a_few_words_and_nothing_stays(name, tmp_path, monkeypatch):
    """Files are copied to a place on another file system; a limit stands for its end."""
    path = tmp_path / "scratch" / name
    for part in [path] if "." in name else [path / "saved_model.pb", path / "variables" / "index"]:
        part.parent.mkdir(parents=True, exist_ok=True)
        part.write_bytes(bytes(5000))
    place = tmp_path / "place"
    place.mkdir()

    def other_file_system(*_):
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(os, "rename", other_file_system)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(UserError) as refused:
            export._put(path, str(place / name))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert str(refused.value) == f"{place / name} cannot be written (File too large)."
    assert list(place.iterdir()) == []
