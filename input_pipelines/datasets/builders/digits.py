"""The handwritten digits of scikit-learn, as a TFDS data set."""

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import tensorflow_datasets as tfds

EVAL_EXAMPLES = 360


class Digits(tfds.core.GeneratorBasedBuilder):
    """1,797 digits of 8x8 pixels (Alpaydin & Kaynak 1998), 1,437 to train and 360 to test."""

    VERSION = tfds.core.Version("1.0.0")

    def _info(self) -> tfds.core.DatasetInfo:
        return tfds.core.DatasetInfo(
            builder=self,
            description=self.__doc__,
            features=tfds.features.FeaturesDict(
                {
                    "image": tfds.features.Image(shape=(8, 8, 1), encoding_format="png"),
                    "label": tfds.features.ClassLabel(num_classes=10),
                }
            ),
            supervised_keys=("image", "label"),
        )

    def _split_generators(self, dl_manager: Any) -> dict[str, Iterable[Any]]:
        # scikit-learn orders the digits by writer, so the split is drawn at random with a fixed
        # seed.
        order = np.random.RandomState(1797).permutation(1797)
        return {
            "train": self._generate_examples(order[EVAL_EXAMPLES:]),
            "test": self._generate_examples(order[:EVAL_EXAMPLES]),
        }

    def _generate_examples(self, indices: np.ndarray) -> Iterator[tuple[int, dict[str, Any]]]:
        from sklearn import datasets

        digits: Any = datasets.load_digits()
        for index in map(int, indices):
            # The source's pixels range from 0 to 16.
            image = (digits.images[index][..., None] * (255 / 16)).round().astype(np.uint8)
            yield index, {"image": image, "label": int(digits.target[index])}
