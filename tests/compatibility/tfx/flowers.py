"""The flowers of the pipeline, and what NumPy makes of them."""

from typing import Any

import numpy as np
import tensorflow as tf
from sklearn import datasets

COLUMNS = ("sepal_length", "sepal_width", "petal_length", "petal_width")  # as scikit-learn has them


def rows() -> list[dict[str, Any]]:
    """Returns the flowers: measures, the field that each grew on, drawn at random, and species."""
    iris: Any = datasets.load_iris()
    fields = np.random.default_rng(0).choice(["north", "south"], len(iris.target))
    return [
        {**dict(zip(COLUMNS, measures)), "field": field, "species": iris.target_names[target]}
        for measures, field, target in zip(iris.data, fields, iris.target)
    ]


def serialized(row: dict[str, Any], left_out: str = "") -> bytes:
    """Returns an example, without one of its features, as TFX's components write it."""
    features = {name: _feature(value) for name, value in row.items() if name != left_out}
    return tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString()


def _feature(value: Any) -> Any:
    if isinstance(value, str):
        return tf.train.Feature(bytes_list=tf.train.BytesList(value=[value.encode()]))
    if isinstance(value, np.integer):
        return tf.train.Feature(int64_list=tf.train.Int64List(value=[value]))
    return tf.train.Feature(float_list=tf.train.FloatList(value=[value]))


def numbers(train: list[dict[str, Any]], name: str) -> dict[str, int]:
    """Returns the number of each text: the most frequent first, of equals the last by name."""
    texts = [row[name] for row in train]
    order = sorted(set(texts), key=lambda text: (texts.count(text), text), reverse=True)
    return {text: number for number, text in enumerate(order)}


def logits_by_hand(
    rows: list[dict[str, Any]], train: list[dict[str, Any]], weights: dict[str, np.ndarray]
) -> np.ndarray:
    """Returns the logits that NumPy computes from raw values, the training split and weights."""
    scaled = []
    for name in sorted(COLUMNS):
        known = np.array([row[name] for row in train], np.float64)
        scaled.append((np.array([row[name] for row in rows]) - known.mean()) / known.std())
    fields = numbers(train, "field")
    embedded = weights["field/embeddings"][[fields[row["field"]] for row in rows]]
    hidden = np.concatenate([np.stack(scaled, 1), embedded], 1)
    hidden = np.maximum(hidden @ weights["hidden/kernel"] + weights["hidden/bias"], 0)
    return hidden @ weights["logits/kernel"] + weights["logits/bias"]
