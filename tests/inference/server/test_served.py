"""Refusals of a served model, for values that it does not take."""

import numpy as np
import pytest
import tensorflow as tf

from tftpu.inference.server.served import Input, Refused, wrap_tensorflow


def test_a_refusal_has_the_reason_of_the_operation_that_failed():
    @tf.function
    def look_up(tokens):
        return tf.gather(tf.zeros((4, 2)), tokens)

    served = wrap_tensorflow(
        (Input("tokens", (3,), "int32"),),
        ("y",),
        lambda given: {"y": look_up(tf.constant(given["tokens"])).numpy()},
    )
    with pytest.raises(Refused, match=r"^indices\[0,1\] = 7 is not in \[0, 4\)$"):
        served.call({"tokens": np.array([[0, 7, 1]], np.int32)})
