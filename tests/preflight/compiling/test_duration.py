"""How long the compiler takes is known from what it took for the same model on this machine."""

import json

from tftpu.preflight.compiling.duration import count_instructions, find_measured_seconds

PROGRAM = """
%1 = stablehlo.add %a, %b : tensor<4xf32>
%4 = "stablehlo.convolution"(%1, %2) {x = 1} : (tensor<2x9x12x3xf32>, tensor<1x1x3x4xf32>)
return %4
"""


def test_the_instructions_of_a_program_are_counted():
    assert count_instructions(PROGRAM) == 2


def test_the_time_of_the_same_model_is_expected_and_of_no_other(tmp_path):
    kept = {"error": "", "instructions": 10_000, "processor_seconds": 90.0}
    refused = {**kept, "error": "out of memory", "processor_seconds": 1.0}
    other = {**kept, "processor_seconds": 400.0}
    texts = {"v5e-8-a": json.dumps(kept), "v5e-8-b": "{", "v5e-8-c": '{"seconds": 5}'}
    texts |= {"2xv5e-8-d": json.dumps(refused), "2xv6e-8-e": json.dumps(other)}
    for name, text in texts.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "result.json").write_text(text)
    assert find_measured_seconds(10_010, "v5e", tmp_path) == 90.0  # another batch, or slice
    assert find_measured_seconds(10_010, "v6e", tmp_path) == 400.0
    assert find_measured_seconds(10_010, "v4", tmp_path) is None
    assert find_measured_seconds(20_000, "v5e", tmp_path) is None
