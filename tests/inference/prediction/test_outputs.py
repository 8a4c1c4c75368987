"""The columns of predictions."""

import keras
import numpy as np
import pytest

from tftpu.inference.prediction import outputs


def test_an_example_without_finite_scores_has_no_class():
    logits = np.array([[1.0, 3.0], [np.nan, 0.0]], "float32")
    found = outputs._find_likeliest(logits, outputs._softmax(logits), ["cat", "dog"])
    assert found["class"].tolist() == [1, -1]
    assert list(found["class_name"]) == ["dog", ""]
    assert list(found) == ["class", "class_name", "probability"]


@pytest.mark.parametrize("names", [None, ["cat", "dog"]])
@pytest.mark.parametrize("wanted", [*([name] for name in outputs.OUTPUTS), list(outputs.OUTPUTS)])
def test_the_names_of_the_columns_are_known_before_anything_is_predicted(wanted, names):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    named = outputs.name_columns(model.output_shape, wanted, names)
    if "embedding" in wanted:
        model = outputs.add_embedding(model)
    found = outputs.build_columns(wanted, False, names)(model.predict(np.ones((4, 3)), verbose=0))
    assert named == list(found)


def test_each_output_of_several_has_a_column():
    shape = {"a": (None, 2), "b": (None, None, 3)}
    assert outputs.name_columns(shape, ["logits"], None) == ["logits_a", "logits_b"]
    shape = [(None, 2), (None, 3)]
    assert outputs.name_columns(shape, ["logits"], None) == ["logits_0", "logits_1"]
    assert outputs.name_columns((), ["logits"], None) == ["logits"]  # a model that names no shape


def test_outputs_in_others_have_a_column_each_with_a_row_for_each_example():
    x = np.ones((3, 2), np.float32)
    found = outputs.build_columns(["logits"], False, None)({"a": [x, (x[:, :1],)], "b": {"c": x}})
    sizes = {"logits_a_0": (3, 2), "logits_a_1_0": (3, 1), "logits_b_c": (3, 2)}
    assert {name: values.shape for name, values in found.items()} == sizes
    shape = {"a": [(None, 2), ((None, 1),)], "b": {"c": (None, 2)}}
    assert outputs.name_columns(shape, ["logits"], None) == list(sizes)
