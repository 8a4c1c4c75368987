"""How long the compiler takes is estimated from the program, and from what was measured here."""

import json
import math

import numpy as np
import pytest

from tftpu.preflight.compiling.duration import (
    MEASURED,
    ProgramSize,
    estimate_seconds,
    fit_weights,
    measure_correction,
    measure_program,
)

PROGRAM = """
%0 = stablehlo.constant dense<1.0> : tensor<f32>
%1 = stablehlo.add %a, %b : tensor<4xf32>
%2 = stablehlo.dot_general %1, %3, contracting_dims = [1] x [0] : (tensor<8x4xf32>, tensor<4x16xf32>) -> tensor<8x16xf32>
%4 = "stablehlo.convolution"(%1, %2) {x = 1} : (tensor<2x9x12x3xf32>, tensor<1x1x3x4xf32>) -> tensor<2x9x12x4xf32> loc(#loc1)
"""  # noqa: E501


def test_the_size_of_a_program_counts_instructions_and_weighs_products():
    product, convolution = math.sqrt(32 + 64 + 128), math.sqrt(2 * 9 * 12 * 7 + 12)
    size = measure_program(PROGRAM, 1)
    assert size == pytest.approx((3, convolution, product + convolution, convolution))
    divided = measure_program(PROGRAM, 4)
    assert divided == pytest.approx((3, *(value / 2 for value in size[1:])))


def test_a_model_that_was_not_measured_is_estimated_within_a_factor_of_two():
    errors = []
    for name, (size, seconds) in MEASURED.items():
        model = name.split()[0]
        others = tuple(row for other, row in MEASURED.items() if other.split()[0] != model)
        errors.append(abs(math.log(np.dot(size, fit_weights(others)) / seconds)))
    assert math.exp(max(errors)) < 2.0 and math.exp(np.mean(errors)) < 1.4


def test_what_was_measured_on_this_machine_corrects_the_estimate_of_the_same_model(tmp_path):
    size, other = ProgramSize(10_000, 0, 9e5, 0), ProgramSize(20_000, 0, 9e5, 0)
    kept = {"error": "", "program_size": size, "processor_seconds": 3 * estimate_seconds(size)}
    for name, text in {"a": json.dumps(kept), "b": "{", "c": '{"seconds": 5}'}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "result.json").write_text(text)
    larger_batch = size._replace(instructions=10_010, products=2e6)
    assert measure_correction(larger_batch, tmp_path) == pytest.approx(3.0)
    assert measure_correction(other, tmp_path) == 1.0
