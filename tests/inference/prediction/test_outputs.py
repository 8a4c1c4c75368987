"""The columns of predictions."""

import numpy as np

from tftpu.inference.prediction import outputs


def test_an_example_without_finite_scores_has_no_class():
    logits = np.array([[1.0, 3.0], [np.nan, 0.0]], "float32")
    found = outputs._find_likeliest(logits, outputs._softmax(logits), ["cat", "dog"])
    assert found["class"].tolist() == [1, -1]
    assert list(found["class_name"]) == ["dog", ""]
    assert list(found) == ["class", "class_name", "probability"]
