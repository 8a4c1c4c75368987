"""The outputs of a model, batch by batch."""

import numpy as np
import pytest

from tftpu.engines.data.outputs import keep_examples
from tftpu.errors import UserError


def test_rows_of_padding_are_left_out():
    kept = keep_examples(np.arange(8).reshape(4, 2), np.array([1.0, 1.0, 0.0, 0.0]))
    np.testing.assert_array_equal(kept, [[0, 1], [2, 3]])


@pytest.mark.parametrize("shape", [(), (8, 3), (1, 4)])
def test_an_output_without_a_row_for_each_example_is_refused(shape):
    with pytest.raises(UserError, match=r"of 4 examples, .* one row for each example"):
        keep_examples(np.zeros(shape), np.ones(4))
