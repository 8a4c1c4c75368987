"""Names of the largest arrays of a program."""

from tftpu.engines.lowered import LoweredStep
from tftpu.preflight.compiling.compiler import Compiled
from tftpu.preflight.pricing.cost import price
from tftpu.tpu.slices import parse_slice

SIZES = ("argument", "output", "alias", "temp", "generated_code")
STATS = {**dict.fromkeys([f"{name}_size_in_bytes" for name in SIZES], 0), "peak_memory_in_bytes": 0}
BODY = "while/body/jit(dynamic_update_index_in_dim)/dynamic_update_slice"


def find_names(*op_names: str) -> dict[str, str]:
    """Returns the names of the arrays that some ops fill, of 2, 3, ... MiB, by their shapes."""
    lines, operands = [], []
    for number, op_name in enumerate(op_names, start=2):
        shape = f"bf16[{number},1024,512]{{2,1,0:T(8,128)(2,1)}}"
        lines.append(f"""\
  %made.{number} = {shape} custom-call(), custom_call_target="AllocateBuffer"
  %fill.{number} = {shape} negate(%made.{number}), metadata={{op_name="{op_name}"}}""")
        operands.append(f"%fill.{number}")
    text = "HloModule kept\n\nENTRY %main (x: f32[8]) -> f32[8] {\n  %x = f32[8]{0} parameter(0)\n"
    text += "\n".join(lines) + "\n  ROOT %y = f32[8]{0} negate(%x)\n}\n"
    step = LoweredStep(program=b"", arguments=["x"], precision="bfloat16")
    cost = price(step, Compiled("", False, text, STATS, 0.0, 0.0, False), parse_slice("v5e-1"))
    found = [(item.shape, item.layer) for item in cost.large if item.shape.startswith("bf16")]
    assert len(found) == len(
        dict(found)
    )  # what allocates an array is not named beside what fills it
    return dict(found)


def test_what_a_loop_keeps_is_named_but_for_gradients_that_its_backward_pass_stacks():
    kept = f"jit(train)/jvp(llama)/{BODY}"
    gradient = f"jit(train)/transpose(jvp(llama))/{BODY}"
    other = "jit(train)/jvp(llama)/while/body/add"
    assert find_names(kept, gradient, other) == {
        "bf16[2,1024,512]": "(what a loop over blocks keeps)",
        "bf16[3,1024,512]": "(rest of the step)",
        "bf16[4,1024,512]": "(rest of the step)",
    }
