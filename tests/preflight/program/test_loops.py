"""Loops of programs: how often their bodies run, and the FLOPs of recurrent layers."""

import keras
import pytest
import tensorflow as tf

import tftpu
from tests.support.steps.lowering import lower
from tests.support.steps.stepping import train_step
from tftpu.engines.origins import Origin
from tftpu.engines.tensorflow.lowering import flops
from tftpu.preflight.compiling import compiler
from tftpu.preflight.pricing import cost
from tftpu.preflight.program.hlo import Module
from tftpu.preflight.program.loops import Runs
from tftpu.tpu.slices import parse_slice

LESS = """\
HloModule step

%less (s.0: s32[], l.0: s32[]) -> pred[] {
  %s.0 = s32[] parameter(0)
  %l.0 = s32[] parameter(1)
  ROOT %is_less = pred[] compare(%s.0, %l.0), direction=LT
}
"""
# A loop of 6 runs; one whose bound is the counter that the first ends with; in its body another,
# whose bound is an element of the state that does not change.
NESTED = (
    LESS
    + """
%first (state.1: (s32[], s32[])) -> pred[] {
  %state.1 = (s32[], s32[]) parameter(0)
  %i.1 = s32[] get-tuple-element(%state.1), index=0
  %limit.1 = s32[] constant(14)
  ROOT %test.1 = pred[] call(%i.1, %limit.1), to_apply=%less
}

%count (state.2: (s32[], s32[])) -> (s32[], s32[]) {
  %state.2 = (s32[], s32[]) parameter(0)
  %i.2 = s32[] get-tuple-element(%state.2), index=0
  %n.2 = s32[] get-tuple-element(%state.2), index=1
  %two = s32[] constant(2)
  %next.2 = s32[] add(%i.2, %two)
  ROOT %out.2 = (s32[], s32[]) tuple(%next.2, %n.2)
}

%until (state.3: (s32[], s32[])) -> pred[] {
  %state.3 = (s32[], s32[]) parameter(0)
  %i.3 = s32[] get-tuple-element(%state.3), index=0
  %n.3 = s32[] get-tuple-element(%state.3), index=1
  ROOT %test.3 = pred[] compare(%i.3, %n.3), direction=LT
}

%inner (state.4: (s32[], s32[])) -> (s32[], s32[]) {
  %state.4 = (s32[], s32[]) parameter(0)
  %i.4 = s32[] get-tuple-element(%state.4), index=0
  %n.4 = s32[] get-tuple-element(%state.4), index=1
  %one.4 = s32[] constant(1)
  %next.4 = s32[] add(%one.4, %i.4)
  ROOT %out.4 = (s32[], s32[]) tuple(%next.4, %n.4)
}

%outer (state.5: (s32[], s32[])) -> (s32[], s32[]) {
  %state.5 = (s32[], s32[]) parameter(0)
  %i.5 = s32[] get-tuple-element(%state.5), index=0
  %n.5 = s32[] get-tuple-element(%state.5), index=1
  %one.5 = s32[] constant(1)
  %next.5 = s32[] add(%i.5, %one.5)
  %zero.5 = s32[] constant(4)
  %begin.5 = (s32[], s32[]) tuple(%zero.5, %n.5)
  %loop.5 = (s32[], s32[]) while(%begin.5), condition=%until, body=%inner
  ROOT %out.5 = (s32[], s32[]) tuple(%next.5, %n.5)
}

ENTRY %main (p.0: s32[]) -> (s32[], s32[]) {
  %p.0 = s32[] parameter(0)
  %start = s32[] constant(START)
  %given = (s32[], s32[]) tuple(%start, %p.0)
  %forward = (s32[], s32[]) while(%given), condition=%first, body=%count
  %ended = s32[] get-tuple-element(%forward), index=0
  %zero = s32[] constant(0)
  %again = (s32[], s32[]) tuple(%zero, %ended)
  ROOT %backward = (s32[], s32[]) while(%again), condition=%until, body=%outer
}
"""
)


def runs(text: str) -> dict[str, int]:
    return {found.name: times for found, times, _ in Runs(Module(text)).iterate()}


def test_of_a_choice_the_longest_branch_counts():
    cycles = 'backend_config={"window_config":{"estimated_cycles":"%d"}}'
    text = f"""HloModule m

%short (a.1: f32[4]) -> f32[4] {{
  %a.1 = f32[4] parameter(0)
  ROOT %r.1 = f32[4] add(%a.1, %a.1), {cycles % 10}
}}

%long (a.2: f32[4]) -> f32[4] {{
  %a.2 = f32[4] parameter(0)
  ROOT %r.2 = f32[4] add(%a.2, %a.2), {cycles % 20}
}}

ENTRY %main (p.0: s32[], x: f32[4]) -> f32[4] {{
  %p.0 = s32[] parameter(0)
  %x = f32[4] parameter(1)
  ROOT %c = f32[4] conditional(%p.0, %x, %x), branch_computations={{%short, %long}}
}}
"""
    assert set(runs(text)) == {"p.0", "x", "a.2", "r.2"}


def test_a_bound_may_come_from_another_loop():
    found = runs(NESTED.replace("START", "2"))
    assert found["next.2"] == 6  # 2, 4, … 12
    assert found["next.5"] == 14  # from 0 to where the first one ended
    assert found["next.4"] == 14 * 10  # from 4, each time
    assert Runs(Module(NESTED.replace("START", "2"))).list_uncounted() == []


def test_a_loop_without_a_known_count_is_said_and_counted_once():
    text = NESTED.replace("constant(START)", "negate(%p.0)")
    assert sorted(Runs(Module(text)).list_uncounted()) == ["backward", "forward", "loop.5"]
    assert set(runs(text).values()) == {1}


ONE = (
    LESS
    + """
%until.1 (state.1: (s32[], s32[])) -> pred[] {
  %state.1 = (s32[], s32[]) parameter(0)
  %i.1 = s32[] get-tuple-element(%state.1), index=0
  %j.1 = s32[] get-tuple-element(%state.1), index=1
  %ten = s32[] constant(10)
  %fifty = s32[] constant(50)
CONDITION
}

%body.2 (state.2: (s32[], s32[])) -> (s32[], s32[]) {
  %state.2 = (s32[], s32[]) parameter(0)
  %i.2 = s32[] get-tuple-element(%state.2), index=0
  %j.2 = s32[] get-tuple-element(%state.2), index=1
  %one = s32[] constant(1)
  %next.2 = s32[] add(%COUNTED, %one)
  ROOT %out.2 = (s32[], s32[]) tuple(%next.2, %j.2)
}

%until.3 (state.3: (s32[], s32[])) -> pred[] {
  %state.3 = (s32[], s32[]) parameter(0)
  %i.3 = s32[] get-tuple-element(%state.3), index=0
  %seven = s32[] constant(7)
  ROOT %test.3 = pred[] call(%i.3, %seven), to_apply=%less
}

ENTRY %main (p.0: s32[]) -> (s32[], s32[]) {
  %p.0 = s32[] parameter(0)
  %zero = s32[] constant(0)
  %given = (s32[], s32[]) tuple(%zero, %zero)
  %loop = (s32[], s32[]) while(%given), condition=%until.1, body=%body.2
  %again = (s32[], s32[]) tuple(%zero, %zero)
  ROOT %other = (s32[], s32[]) while(%again), condition=%until.3, body=%body.2
}
"""
)


@pytest.mark.parametrize(
    ("condition", "counted", "trips"),
    [
        ("  ROOT %t = pred[] compare(%i.1, %ten), direction=LT", "i.2", 10),
        ("  ROOT %t = pred[] compare(%i.1, %ten), direction=LE", "i.2", 11),
        ("  ROOT %t = pred[] compare(%ten, %i.1), direction=GT", "i.2", 10),
        # The same comparison as in the other loop's condition.
        ("  ROOT %t = pred[] call(%i.1, %fifty), to_apply=%less", "i.2", 50),
        # Two comparisons of which both have to hold, and two of which one is enough.
        (
            "  %a = pred[] compare(%i.1, %fifty), direction=LT\n"
            "  %b = pred[] compare(%i.1, %ten), direction=LT\n  ROOT %t = pred[] and(%a, %b)",
            *("i.2", 10),
        ),
        (
            "  %a = pred[] compare(%i.1, %fifty), direction=LT\n"
            "  %b = pred[] compare(%i.1, %ten), direction=LT\n  ROOT %t = pred[] or(%a, %b)",
            *("i.2", None),
        ),
        # What is added to is another element of the state.
        ("  ROOT %t = pred[] compare(%i.1, %ten), direction=LT", "j.2", None),
        ("  ROOT %t = pred[] compare(%i.1, %ten), direction=NE", "i.2", None),
    ],
)
def test_the_count_of_a_loop_is_right_or_said_to_be_unknown(condition, counted, trips):
    module = Module(ONE.replace("CONDITION", condition).replace("COUNTED", counted))
    found = Runs(module)
    assert found.count_trips(module.entry["loop"], module.entry) == trips
    if counted == "i.2":
        assert found.count_trips(module.entry["other"], module.entry) == 7


BATCH, TIME, INPUTS, UNITS = 16, 24, 32, 48


def model(*layers: keras.Layer, shape: tuple[int, ...] = (TIME, INPUTS)) -> keras.Model:
    built = keras.Sequential([keras.Input(shape), *layers])
    built.compile("sgd", "mse")
    return built


def seq2seq() -> keras.Model:
    source, given = keras.Input((TIME, INPUTS)), keras.Input((10, INPUTS))
    _, *state = keras.layers.LSTM(UNITS, return_state=True)(source)
    decoded = keras.layers.LSTM(UNITS, return_sequences=True)(given, initial_state=state)
    built = keras.Model([source, given], keras.layers.Dense(5)(decoded))
    built.compile("sgd", "mse")
    return built


def recurrent(gates: int, steps: int = TIME) -> int:
    return 2 * BATCH * steps * (INPUTS + UNITS) * gates * UNITS


# By model: its maker, the shapes of x and y, and the FLOPs of its forward pass.
CASES = {
    "lstm": (
        lambda: model(keras.layers.LSTM(UNITS)),
        [(TIME, INPUTS)],
        (UNITS,),
        recurrent(4),
    ),
    "gru": (
        lambda: model(keras.layers.GRU(UNITS, return_sequences=True), keras.layers.Dense(5)),
        [(TIME, INPUTS)],
        (TIME, 5),
        recurrent(3) + 2 * BATCH * TIME * UNITS * 5,
    ),
    "bilstm": (
        lambda: model(keras.layers.Bidirectional(keras.layers.LSTM(UNITS))),
        [(TIME, INPUTS)],
        (2 * UNITS,),
        2 * recurrent(4),
    ),
    # Each of 16 pixels along an axis meets 3 taps; the first and the last one meet the padding.
    "convlstm": (
        lambda: model(keras.layers.ConvLSTM2D(4, 3, padding="same"), shape=(8, 16, 16, 3)),
        [(8, 16, 16, 3)],
        (16, 16, 4),
        2 * BATCH * 8 * 46**2 * (3 + 4) * 16,
    ),
    "seq2seq": (
        seq2seq,
        [(TIME, INPUTS), (10, INPUTS)],
        (10, 5),
        recurrent(4) + recurrent(4, 10) + 2 * BATCH * 10 * UNITS * 5,
    ),
}


def spec(name: str) -> tuple:
    _, inputs, output, _ = CASES[name]
    x = [tf.TensorSpec((BATCH, *shape)) for shape in inputs]
    return x if len(x) > 1 else x[0], tf.TensorSpec((BATCH, *output))


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_the_model_flops_of_recurrent_layers_are_those_on_paper(name):
    build, *_, forward = CASES[name]
    step = lower(build, spec(name), 1, "float32")
    assert step.model_flops == 3 * forward
    with tftpu.connect(virtual_devices=1).scope():
        assert train_step(build(), spec(name)).model_flops == 3 * forward


@pytest.mark.parametrize(
    ("condition", "body", "start", "trips"),
    [
        (lambda i, x: i < 10, lambda i, x: (i + 1, x @ x), 0, 10),
        (lambda i, x: i < 100, lambda i, x: (10 + i, x @ x), 5, 10),
        # Where the count is not in the graph, a loop counts once.
        (lambda i, x: i < 1.0, lambda i, x: (i + 0.1, x @ x), 0.0, 1),
        (lambda i, x: i < float("inf"), lambda i, x: (i + 1.0, x @ x), 0.0, 1),
        (lambda i, x: tf.reduce_all(i < [9, 9]), lambda i, x: (i + 1, x @ x), [0, 0], 1),
        (lambda i, x: (i < 10) | (i < 20), lambda i, x: (i + 1, x @ x), 0, 1),
        (lambda i, x: i < 10, lambda i, x: (2 * i, x @ x), 1, 1),
    ],
)
def test_the_loops_of_a_graph_are_counted_where_it_shows_how_often_they_run(
    condition, body, start, trips
):
    def looped(x):
        return tf.while_loop(condition, body, (tf.constant(start), x))[1]

    traced = tf.function(looped, autograph=False).get_concrete_function(tf.TensorSpec((4, 4)))
    assert flops.count_step_flops(traced.graph, [Origin.DATA]) == trips * 2 * 4**3


def test_a_loop_that_may_stand_still_runs_at_least_as_often_as_it_counts():
    text = ONE.replace("CONDITION", "  ROOT %t = pred[] compare(%i.1, %ten), direction=LT")
    chosen = """  %still = s32[] constant(0)
  %moves = pred[] compare(%j.2, %one), direction=LT
  %chosen = s32[] select(%moves, %one, %still)
  %next.2 = s32[] add(%i.2, %chosen)"""
    module = Module(text.replace("  %next.2 = s32[] add(%COUNTED, %one)", chosen))
    assert Runs(module).count_trips(module.entry["loop"], module.entry) == 10


@pytest.mark.slow
@pytest.mark.compiles
@pytest.mark.parametrize("name", ["bilstm", "convlstm"])
def test_the_compiled_loops_of_a_backward_pass_are_counted(name):
    build, *_, forward = CASES[name]
    target = parse_slice("v5e-1")
    step = lower(build, spec(name), 1, "float32")
    compiled = compiler.compile_program(step, target)
    found = cost.price(step, compiled, target)
    assert found.uncounted_loops == []
    of_inputs = INPUTS / (INPUTS + UNITS) if name == "bilstm" else 3 / 7
    expected = forward * (3 - of_inputs)  # the inputs of the first layer need no gradient
    assert found.flops == pytest.approx(expected, rel=0.02)
