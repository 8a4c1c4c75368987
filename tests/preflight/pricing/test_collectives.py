"""The time of collectives: groups of devices, and what other work hides."""

import pytest

from tests.support.programs.collectives import (
    ALL,
    ESTIMATED,
    FUSIONS,
    GATHER,
    LINKS,
    PAIR,
    SLICE,
    compiled,
)
from tftpu.engines.lowered import LoweredStep
from tftpu.preflight.pricing.collectives import (
    Timeline,
    count_sent_bytes,
    estimate_all_reduce,
    estimate_seconds,
    list_group,
)
from tftpu.preflight.pricing.cost import price
from tftpu.preflight.program.hlo import Instruction, Tensor
from tftpu.tpu.slices import parse_slice


@pytest.mark.parametrize(
    ("written", "devices"),
    [
        ("replica_groups={{0,1,2,3},{4,5,6,7}}", [0, 1, 2, 3]),
        ("replica_groups=[2,4]<=[8]", [0, 1, 2, 3]),
        ("replica_groups=[4,2]<=[2,4]T(1,0)", [0, 4]),
        ("replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_1'}", [0, 1, 2, 3]),
        ("replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_0'}", [0, 4]),
        ("replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_0','axis_1'}", list(range(8))),
        ("replica_groups={}", []),
    ],
)
def test_the_devices_of_a_collective_are_read(written, devices):
    assert list_group(gather(written, 1000)) == devices


def gather(groups: str, floats: int) -> Instruction:
    rest = f", channel_id=1, {groups}, dimensions={{0}}, metadata={{}}"
    return Instruction("x", "all-gather", [Tensor("f32", (floats,))], [], "", rest)


@pytest.mark.parametrize(
    ("groups", "seconds", "sent"),
    [
        ("[1,8]<=[8]", 4e8 * 3 / 4 / 200e9, 3e8),  # of four chips with two links each
        ("[2,4]<=[4,2]T(1,0)", 2 * 4e8 * 3 / 4 / 200e9, 6e8),  # one core of each, twice at once
        ("[4,2]<=[8]", 4e8 / 2 / 600e9, 0),  # the two cores of a chip
    ],
)
def test_the_cores_of_a_chip_share_its_links(groups, seconds, sent):
    target, whole = parse_slice("tpu7x-8"), gather(f"replica_groups={groups}", 10**8)
    assert estimate_seconds(whole, {}, target) == pytest.approx(seconds, rel=0.01)
    assert count_sent_bytes(whole, {}, target) == sent


@pytest.mark.parametrize(
    ("pairs", "gbps"),
    [
        ("{0,1},{1,0},{2,3},{3,2}", 600),  # between the cores of a chip
        ("{0,1},{1,2},{2,3},{3,4},{4,5},{5,6},{6,7},{7,0}", 100),  # one link a chip
        ("{0,2},{2,4},{4,6},{6,0},{1,3},{3,5},{5,7},{7,1}", 50),  # both cores send on one
    ],
)
def test_a_permutation_waits_for_the_cores_that_share_a_link(pairs, gbps):
    rest = f", channel_id=1, source_target_pairs={{{pairs}}}"
    sent = Instruction("x", "collective-permute", [Tensor("f32", (10**8,))], [], "", rest)
    found = estimate_seconds(sent, {}, parse_slice("tpu7x-8"))
    assert found == pytest.approx(4e8 / gbps / 1e9, rel=0.01)
    leaves = 0 if gbps == 600 else 4e8 * 100 / gbps  # two cores that take turns send twice
    assert count_sent_bytes(sent, {}, parse_slice("tpu7x-8")) == leaves


def test_gathers_on_ironwood_take_about_as_long_as_was_measured():
    """tpu-recipes, microbenchmarks/ironwood/collectives: four of the devices of 2x2x1 gather."""
    mesh = "replica_groups=mesh['axis_0'=4,'axis_1'=2] {'axis_0'}"
    for floats, gbps in ((4194304, 161.9), (16777216, 174.8), (67108864, 178.8)):
        measured = 6 * floats / gbps / 1e9  # what leaves the two devices of a chip: 3/4 of each
        found = estimate_seconds(gather(mesh, floats), {}, parse_slice("tpu7x-8"))
        assert 0.8 < found / measured < 1.0


def test_a_smaller_group_moves_less():
    eight = estimate_all_reduce(10**8, SLICE, chips=8, links=2)
    assert eight == pytest.approx(2 * 7 / 8 * 1e8 / LINKS, rel=0.01)
    assert estimate_all_reduce(10**8, SLICE, 4, 2) == pytest.approx(6 / 7 * eight, rel=0.01)
    assert estimate_all_reduce(10**8, SLICE, chips=1, links=1) < 1e-5


@pytest.mark.parametrize(
    ("name", "chips", "links"),
    [
        ("v5e-8", 8, 2),  # a mesh of 2 x 4: a corner has two links
        ("v5e-8", 4, 1),  # a line
        ("v5e-8", 2, 1),
        ("v5e-64", 64, 2),
        ("v5e-256", 256, 4),  # the pod is a torus
        ("v5e-256", 16, 2),  # one of its rings
        ("v5e-256", 64, 2),  # no axis of the torus: a ring of one's own
        ("v5p-128", 64, 6),
        ("v5p-128", 16, 4),
        ("v5p-64", 32, 3),  # 2 x 4 x 4 is not a cube of the switches
        ("v3-8", 4, 2),
        ("v3-1024", 512, 3),  # 16 x 32: the pod's length closes, half of it does not
        ("v5e-1", 1, 1),
    ],
)
def test_a_chip_exchanges_over_the_links_that_the_torus_gives(name, chips, links):
    assert parse_slice(name).count_links(chips) == links


@pytest.mark.parametrize(
    ("opcode", "sent"),
    [
        ("all-reduce", 2 * 7 / 8),
        ("all-gather", 7 / 8),
        ("reduce-scatter", 7 / 8),
        ("collective-permute", 1),
        ("add", 0),
        ("all-gather-done", 0),
    ],
)
def test_what_a_chip_sends(opcode, sent):
    whole = Instruction(
        "x", opcode, [Tensor("f32", (1000,))], [], "", ", replica_groups=[1,8]<=[8]"
    )
    assert count_sent_bytes(whole, {}, SLICE) == 4000 * sent


def test_a_pod_reduces_at_the_published_bandwidth():
    pod = parse_slice("v5e-256")
    seconds = estimate_all_reduce(10**9, pod, 256, pod.count_links(256))
    # "200 GB/s a chip": each byte leaves a chip twice, once reduced and once gathered.
    assert 2 * 10**9 / seconds == pytest.approx(200e9, rel=0.02)


@pytest.mark.parametrize(
    ("algorithm", "links"),
    [
        ('"emitter":"RotatedPincerEmitter","strategy":"StrategyND"', 4),
        ('"emitter":"RotatedPincerEmitter","strategy":"StrategyRing"', 2),
        ('"emitter":"1DAllGatherNonMajorDim"', 2),
        ('"emitter":"AllGatherWithNetRouterEmitter"', 4),
    ],
)
def test_a_collective_that_the_compiler_lays_along_one_ring_uses_two_links(algorithm, links):
    pod = parse_slice("v5e-256")
    rest = f", replica_groups=[1,256]<=[256], backend_config={{{algorithm}}}"
    tensor = Tensor("f32", (10**8,))
    instruction = Instruction("x", "all-reduce", [tensor], [], "", rest)
    expected = estimate_all_reduce(4 * 10**8, pod, 256, links)
    assert estimate_seconds(instruction, {}, pod) == pytest.approx(expected)


def test_collectives_take_turns_and_work_hides_them():
    timeline = Timeline()
    timeline.start("a", 2.0)
    timeline.start("b", 3.0)
    timeline.run(1.0)
    assert timeline.wait("a") == 1.0  # at 2
    timeline.run(2.0)
    assert timeline.wait("b") == 1.0  # at 5
    assert timeline.wait("never started") == 0.0


@pytest.mark.parametrize("program", [PAIR, FUSIONS], ids=["pair", "fusions"])
@pytest.mark.parametrize("cycles", [10**3, 6 * 10**5])
def test_work_between_start_and_end_of_a_collective_hides_it(program, cycles):
    step = LoweredStep(program=b"", arguments=["a", "b"], precision="float32")
    cost = price(step, compiled(program.replace("CYCLES", str(cycles))), SLICE)
    work = 0.5 * cycles / 1.5e9
    assert cost.collective_seconds == pytest.approx(max(0.0, GATHER - work), rel=0.02, abs=1e-8)
    assert cost.seconds == pytest.approx(max(GATHER, work), rel=0.05)


NETWORK = '_xla_host_transfer_handler_name="xla_megascale_runtime"'
RENDEZVOUS = f'frontend_attributes={{{NETWORK},_xla_host_transfer_rendezvous="sum"}}'
SENT = f"""\
HloModule step

ENTRY %main (p.0: f32[1048576], p.1: f32[8,8]) -> f32[1048576] {{
  %p.0 = f32[1048576]{{0}} parameter(0)
  %p.1 = f32[8,8]{{1,0}} parameter(1)
  %token = token[] after-all()
  %recv = (f32[1048576]{{0}}, u32[], token[]) recv(%token), channel_id=1, {RENDEZVOUS}
  %before = f32[8,8]{{1,0}} add(%p.1, %p.1), {ESTIMATED}
  %send = (f32[1048576]{{0}}, u32[], token[]) send(%p.0, %token), channel_id=2, {RENDEZVOUS}
  %work = f32[8,8]{{1,0}} add(%p.1, %p.1), {ESTIMATED}
  %sent = token[] send-done(%send), channel_id=2, frontend_attributes={{{NETWORK}}}
  %done = (f32[1048576]{{0}}, token[]) recv-done(%recv), frontend_attributes={{{NETWORK}}}
  ROOT %sum = f32[1048576]{{0}} get-tuple-element(%done), index=0
}}
"""


@pytest.mark.parametrize("cycles", [10**3, 10**6])
def test_slices_exchange_over_the_network_from_the_moment_they_send(cycles):
    two = parse_slice("2xv6e-8")
    text = SENT.replace("CYCLES", str(cycles))
    step = LoweredStep(program=b"", arguments=["a", "b"], precision="float32")
    cost = price(step, compiled(text), two)
    work = 0.5 * cycles / 1.75e9
    # Half of the bytes leave a slice twice: once to be added, once as a sum.
    network = 4 * 2**20 / 12.5e9 + 1e-4
    assert cost.collective_seconds == pytest.approx(max(0.0, network - work), abs=1e-6)
    assert cost.seconds == pytest.approx(work + max(network, work), rel=0.02)


def test_a_product_fused_with_a_collective_costs_its_time():
    text = f"""\
HloModule step

%both (q.0: f32[1024,1024]) -> f32[1024,1024] {{
  %q.0 = f32[1024,1024]{{1,0}} parameter(0)
  %d.0 = f32[1024,1024]{{1,0}} dot(%q.0, %q.0), lhs_contracting_dims={{1}}
  ROOT %sum.0 = f32[1024,1024]{{1,0}} all-reduce(%d.0), {ALL}
}}

ENTRY %main (p.0: f32[1024,1024]) -> f32[1024,1024] {{
  %p.0 = f32[1024,1024]{{1,0}} parameter(0)
  ROOT %both.0 = f32[1024,1024]{{1,0}} fusion(%p.0), kind=kOutput, calls=%both
}}
"""
    step = LoweredStep(program=b"", arguments=["a"], precision="float32")
    exchange = estimate_all_reduce(4 * 2**20, SLICE, 8, 2) / 2  # each keeps a part
    product = 2 * 2**30 / 197e12 / 0.5  # at half of the peak, without the compiler's estimate
    assert price(step, compiled(text), SLICE).seconds == pytest.approx(exchange + product)
