"""Compiled programs with collectives, small enough to price on paper."""

from tftpu.preflight.compiling.compiler import Compiled
from tftpu.tpu.slices import parse_slice

SLICE = parse_slice("v5e-8")


LINKS = 2 * 50e9  # bytes/s of the two links that a corner of the slice has


GATHERED = 8 * 2**20 * 4  # bytes


GATHER = GATHERED * 7 / 8 / LINKS + 6e-6  # 2 x 4 chips: 6 hops of a microsecond


ESTIMATED = 'backend_config={"estimated_cycles":"CYCLES"}'


ALL = "channel_id=1, replica_groups=[1,8]<=[8], dimensions={0}"


BEGINS = 'custom_call_target="AsyncCollectiveStart"'


ENDS = 'custom_call_target="AsyncCollectiveDone"'


PAIR = f"""\
HloModule step

ENTRY %main (p.0: f32[1048576], p.1: f32[8,8]) -> f32[8388608] {{
  %p.0 = f32[1048576]{{0}} parameter(0)
  %p.1 = f32[8,8]{{1,0}} parameter(1)
  %start = (f32[1048576]{{0}}, f32[8388608]{{0}}) all-gather-start(%p.0), {ALL}
  %work = f32[8,8]{{1,0}} add(%p.1, %p.1), {ESTIMATED}
  ROOT %done = f32[8388608]{{0}} all-gather-done(%start)
}}
"""


FUSIONS = f"""\
HloModule step

%begin (q.0: f32[1048576]) -> (f32[1048576], f32[8388608]) {{
  %q.0 = f32[1048576]{{0}} parameter(0)
  %gather.0 = f32[8388608]{{0}} all-gather(%q.0), {ALL}
  ROOT %call.0 = (f32[1048576]{{0}}, f32[8388608]{{0:S(1)}}) custom-call(%gather.0), {BEGINS}
}}

%carry (q.1: f32[1048576]) -> f32[8388608] {{
  %q.1 = f32[1048576]{{0}} parameter(0)
  ROOT %gather.1 = f32[8388608]{{0}} all-gather(%q.1), {ALL}
}}

%finish (q.2: f32[1048576]) -> f32[8388608] {{
  %q.2 = f32[1048576]{{0}} parameter(0)
  %gather.2 = f32[8388608]{{0}} all-gather(%q.2), {ALL}
  ROOT %call.2 = f32[8388608]{{0}} custom-call(%gather.2), {ENDS}
}}

ENTRY %main (p.0: f32[1048576], p.1: f32[8,8]) -> f32[8388608] {{
  %p.0 = f32[1048576]{{0}} parameter(0)
  %p.1 = f32[8,8]{{1,0}} parameter(1)
  %start = (f32[1048576]{{0}}, f32[8388608]{{0:S(1)}}) fusion(%p.0), kind=kCustom, calls=%begin
  %work = f32[8,8]{{1,0}} fusion(%p.1), kind=kOutput, calls=%carry, {ESTIMATED}
  ROOT %done = f32[8388608]{{0:S(1)}} fusion(%p.0), kind=kCustom, calls=%finish
}}
"""


def compiled(text: str) -> Compiled:
    kinds = ("argument_size", "output_size", "alias_size", "temp_size", "generated_code_size")
    memory = {f"{kind}_in_bytes": 0 for kind in (*kinds, "peak_memory")}
    return Compiled("", False, text, memory, 0.0, 0.0, False)
