"""Lifetimes of arrays, in programs small enough to follow on paper."""

import pytest

from tftpu.preflight.program.hlo import Module
from tftpu.preflight.program.lifetimes import Lifetimes, Loop

A = "f32[1024,1024]{1,0:T(8,128)}"  # 4 MiB
CHIP = "f32[1024,1024]{1,0:T(8,128)S(1)}"
SIZE = 4 * 2**20


def lived(*lines, before=""):
    """Returns the lifetimes in a program whose one argument is %p, as (first, last) by name."""
    body = "\n".join(f"  {line}" for line in lines)
    entry = f"ENTRY %main (p: f32[1024,1024]) -> f32[] {{\n  %p = {A} parameter(0)\n{body}\n}}\n"
    text = f"HloModule step, is_scheduled=true\n\n{before}\n{entry}"
    lifetimes = Lifetimes(Module(text))
    for array in lifetimes.arrays:
        assert array.bytes == SIZE
    return {a.names[0]: (a.first, a.last) for a in lifetimes.arrays}, lifetimes


def test_an_array_lives_from_its_instruction_to_the_last_that_reads_it():
    found, lifetimes = lived(
        f"%a = {A} negate(%p)",
        f"%b = {A} negate(%a)",
        f"%c = {A} add(%b, %a)",
        f"ROOT %d = {A} negate(%c)",
    )
    assert [i.name for i in lifetimes.order] == ["a", "b", "c", "d"]
    assert found == {"a": (0, 2), "b": (1, 2), "c": (2, 3)}  # %p and %d are the caller's memory


def test_what_is_only_passed_on_is_no_array_and_no_use():
    found, _ = lived(
        f"%a = {A} negate(%p)",
        f"%b = {A} negate(%p)",
        f"%both = ({A}, {A}) tuple(%a, %b)",
        f"%first = {A} get-tuple-element(%both), index=0",
        f"%c = {A} negate(%first)",
        f"%second = {A} get-tuple-element(%both), index=1",
        "%flat = f32[1048576]{0:T(1024)} bitcast(%second)",
        f"%d = {A} negate(%c)",
        f"ROOT %e = {A} add(%d, %d)",
    )
    assert found == {"a": (0, 2), "b": (1, 1), "c": (2, 3), "d": (3, 4)}


def test_an_array_in_the_cores_own_memory_takes_no_hbm():
    found, _ = lived(f"%a = {CHIP} negate(%p)", f"%b = {A} negate(%a)", f"ROOT %c = {A} negate(%b)")
    assert found == {"b": (1, 2)}


def test_the_source_of_a_copy_lives_until_the_copy_is_done():
    found, _ = lived(
        f"%a = {A} negate(%p)",
        f"%start = ({CHIP}, {A}, u32[]{{:S(2)}}) copy-start(%a)",
        f"%b = {A} negate(%p)",
        f"%done = {CHIP} copy-done(%start)",
        f"ROOT %c = {A} add(%done, %b)",
    )
    assert found == {"a": (0, 3), "b": (2, 4)}


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (  # what a gather starts with, and what it gives
            [f"%s = ({A}, {A}) all-gather-start(%a)", f"%g = {A} all-gather-done(%s)"],
            {"a": (0, 2), "s": (1, 3)},
        ),
        ([f"%g = {A} dynamic-update-slice(%a, %p, %p)", ""], {"a": (0, 2)}),
        (
            [f'%g = {A} fusion(%p, %a), backend_config={{"lists":[{{"indices":["1","2"]}}]}}', ""],
            {"a": (0, 2)},
        ),
        (
            [f"%g = {A} custom-call(%a), output_to_operand_aliasing={{{{}}: (0, {{}})}}, x=1", ""],
            {"a": (0, 2)},
        ),
        ([f"%g = {A} fusion(%p, %a)", ""], {"a": (0, 1), "g": (1, 2)}),
    ],
    ids=["asynchronous", "update", "recorded", "declared", "none"],
)
def test_results_in_the_memory_of_operands_are_one_array(lines, expected):
    found, _ = lived(f"%a = {A} negate(%p)", *filter(None, lines), f"ROOT %r = {A} negate(%g)")
    assert found == expected


LOOP = f"""\
%body (s: ({A}, {A})) -> ({A}, {A}) {{
  %s = ({A}, {A}) parameter(0)
  %x = {A} get-tuple-element(%s), index=0
  %kept = {A} get-tuple-element(%s), index=1
  %y = {A} negate(%x)
  %z = {A} add(%y, %kept)
  ROOT %out = ({A}, {A}) tuple(%z, %kept)
}}

%condition (s: ({A}, {A})) -> pred[] {{
  %s = ({A}, {A}) parameter(0)
  ROOT %go = pred[] constant(true)
}}
"""


def test_the_state_of_a_loop_is_one_array_and_its_body_adds_its_own():
    known = 'backend_config={"known_trip_count":{"n":"7"}}'
    found, lifetimes = lived(
        f"%a = {A} negate(%p)",
        f"%b = {A} negate(%p)",
        f"%state = ({A}, {A}) tuple(%a, %b)",
        f"%while = ({A}, {A}) while(%state), condition=%condition, body=%body, {known}",
        f"%after = {A} get-tuple-element(%while), index=0",
        f"%c = {A} negate(%p)",
        f"ROOT %d = {A} add(%after, %c)",
        before=LOOP,
    )
    assert [i.name for i in lifetimes.order] == ["a", "b", "y", "z", "c", "d"]
    assert lifetimes.loops == [Loop(2, 3, 7)]
    assert found == {"a": (0, 5), "b": (1, 3), "y": (2, 3), "c": (4, 5)}
    assert next(a.names for a in lifetimes.arrays if a.names[0] == "a") == ("a", "z")


def test_the_state_of_a_loop_lives_to_its_end_also_if_its_last_reader_is_earlier():
    body = LOOP.replace("%z = ", f"%w = {CHIP} negate(%x)\n  %v = {CHIP} negate(%w)\n  %z = ")
    found, _ = lived(
        f"%a = {A} negate(%p)",
        f"%b = {A} negate(%p)",
        f"%state = ({A}, {A}) tuple(%b, %a)",
        f"%while = ({A}, {A}) while(%state), condition=%condition, body=%body",
        f"ROOT %c = {A} negate(%p)",
        before=body.replace("add(%y, %kept)", "negate(%y)"),
    )
    assert found == {"a": (0, 5), "b": (1, 5), "y": (2, 5)}


def test_the_branches_of_a_conditional_share_their_result():
    branches = "".join(
        f"%{name} (q: {A}) -> {A} {{\n  %q.{name} = {A} parameter(0)\n"
        f"  %t.{name} = {A} negate(%q.{name})\n  ROOT %r.{name} = {A} negate(%t.{name})\n}}\n\n"
        for name in ("yes", "no")
    )
    found, _ = lived(
        "%which = s32[]{:T(128)S(6)} constant(0)",
        f"%a = {A} conditional(%which, %p, %p), branch_computations={{%yes, %no}}",
        f"ROOT %b = {A} negate(%a)",
        before=branches,
    )
    assert found == {"t.yes": (0, 1), "r.yes": (1, 4), "t.no": (2, 3)}


def test_a_constant_lives_throughout():
    found, _ = lived(
        f"%a = {A} negate(%p)",
        f"%k = {A} constant({{...}})",
        f"%b = {A} add(%a, %k)",
        f"ROOT %c = {A} negate(%b)",
    )
    assert found == {"a": (0, 1), "k": (0, 2), "b": (1, 2)}
