"""The report: order, remarks, text and JSON."""

import dataclasses
import json

import pytest

from tftpu.amounts import format_price
from tftpu.preflight.options import PreflightOptions
from tftpu.preflight.pricing.cost import Cost, LargeTensor, Memory, parse_memory_stats
from tftpu.preflight.pricing.instructions import Priced
from tftpu.preflight.report import Report
from tftpu.preflight.slice_report import SliceReport, describe_host_excess, fill
from tftpu.tpu.slices import parse_slice


def instruction(name, kind, layer, seconds, overlaps=False):
    return Priced(name, kind, layer, "", 1, seconds, 1000, 10**9, 10**6, overlaps)


def filled(slice_name, seconds=0.1, tokens=None, **options):
    """Returns the report of a step that takes this many seconds."""
    target = parse_slice(slice_name)
    cost = Cost(
        memory=Memory(2 << 30, 1 << 30, 1 << 30, 3 << 30, 1 << 20),
        large=[LargeTensor("f32[100,130]", 104 * 256 * 4, 54_496, "block1")],
        instructions=[
            instruction("fusion.1", "matrix", "block1", 0.7 * seconds),
            instruction("fusion.2", "elementwise", "block2", 0.3 * seconds),
            instruction("copy-start.1", "copy", "block2", 5 * seconds, overlaps=True),
        ],
        flops=2 * 10**12,
        model_flops=10**12,
        bytes_accessed=10**10,
        cycles=10**8,
        seconds=seconds,
        seconds_low=0.9 * seconds,
        seconds_high=1.1 * seconds,
        roofline_seconds=0.5 * seconds,
        collective_seconds=0.01 * seconds,
        uncounted_loops=[],
        silent_kernels=[],
    )
    report = SliceReport(
        slice_name,
        target.replicas,
        per_core_batch=128,
        compiles=True,
        fits=True,
        hbm_limit_bytes=target.generation.hbm_limit,
    )
    fill(report, cost, target, PreflightOptions(**options), 1024, tokens)
    return report


def test_dollars_hours_and_energy_are_per_slice():
    item = filled("v3-8", 0.1, steps=36_000, examples_per_epoch=102_400)
    assert item.usd_per_1000_steps == pytest.approx(4 * 2.00 * 100 / 3600)  # 4 chips, 100 s
    assert item.usd_per_epoch == pytest.approx(item.usd_per_1000_steps / 10)
    assert item.hours_per_run == pytest.approx(1.0)
    assert item.usd_per_run == pytest.approx(8.00)
    assert item.kwh_per_run == pytest.approx(4 * 0.220)
    assert item.examples_per_second == pytest.approx(10_240)


def test_a_language_model_has_prices_by_token():
    item = filled("v5e-8", 0.1, tokens=1024 * 2000)
    assert item.tokens_per_second == pytest.approx(1024 * 2000 / 0.1)
    by_step = item.usd_per_1000_steps / 1000
    assert item.usd_per_billion_tokens == pytest.approx(by_step * 1e9 / (1024 * 2000))
    said = str(Report(1024, "mixed_bfloat16", 600, [item]))
    assert "10,200 examples/s, 20,500,000 tokens/s on the slice" in said
    assert f"{format_price(item.usd_per_billion_tokens)} per 1B tokens" in said
    assert "tokens" not in Report(1024, "mixed_bfloat16", 600, [filled("v5e-8")]).text()


def test_a_price_of_the_user_replaces_the_list_price():
    assert filled("v5e-8", prices={"v5e": 2.4}).usd_per_1000_steps == pytest.approx(
        2 * filled("v5e-8").usd_per_1000_steps
    )


def test_mfu_is_model_flops_over_the_peak_of_one_core():
    assert filled("v3-8", 0.1).mfu == pytest.approx(1e12 / 0.1 / (123e12 / 2))


def test_asynchronous_copies_do_not_count_in_the_time_by_layer():
    item = filled("v3-8", 0.1)
    assert sum(spent.step_share for spent in item.by_layer) == pytest.approx(1)
    assert [spent.name for spent in item.by_layer] == ["block1", "block2"]


def test_the_cheapest_is_first_and_marked_and_the_fastest_is_marked():
    dear, cheap, bad = filled("v6e-8", 0.05), filled("v5e-8", 0.09), SliceReport("v2-8", 8)
    bad.error = "XLA says no."
    text = Report(1024, "mixed_bfloat16", None, [bad, dear, cheap]).text()
    rows = [line for line in text.splitlines() if line.startswith(("v5e-8 ", "v6e-8 ", "v2-8 "))]
    assert [row.split()[0] for row in rows] == ["v5e-8", "v6e-8", "v2-8"]
    assert "cheapest" in rows[0] and "fastest" in rows[1]
    assert "does not compile" in rows[2] and "XLA says no." in text


def test_flags_of_the_advice_are_named_as_python_sets_them():
    item = SliceReport("v5e-8", 8, error="Does not fit.")
    item.advice = [
        "--config.cluster.engine=jax --config.cluster.mesh=fsdp:-1 divides it: 1 GiB per device.",
        "--config.train.gradient_accumulation_steps=2 makes this batch fit: 9 GiB.",
        "--config.train.remat=block is not enough to make this batch fit.",
        "--config.cluster.mesh=fsdp:8 --config.train.remat=block makes this batch fit: 8 GiB.",
        "The search for a change that fits has stopped. With --config.train.remat=block: late",
    ]
    report = Report(64, "mixed_bfloat16", None, [item])
    start = "options=tftpu.preflight.PreflightOptions"
    said = [line for line in report.text().splitlines() if line.startswith("In Python")]
    assert said == [
        "In Python, --config.cluster.engine=jax --config.cluster.mesh=fsdp:-1 is "
        f'{start}(engine="jax", mesh="fsdp:-1"), with KERAS_BACKEND=jax set before Python starts.',
        "In Python, --config.train.gradient_accumulation_steps=2 is "
        f"{start}(train=tftpu.TrainConfig(gradient_accumulation_steps=2)).",
        "In Python, --config.cluster.mesh=fsdp:8 --config.train.remat=block is "
        f'{start}(mesh="fsdp:8", train=tftpu.TrainConfig(remat="block")).',
    ]
    report.settings = "a digest"  # of a config, whose flags these are
    assert "In Python" not in report.text()


def test_a_step_that_does_not_fit_is_reported_with_the_excess_and_advice():
    item = SliceReport(
        *("v5e-8", 8),
        per_core_batch=512,
        compiles=True,
        error="RESOURCE_EXHAUSTED: ran out",
        hbm_bytes=20 << 30,
        hbm_limit_bytes=16 << 30,
        largest_per_core_batch=400,
        smallest_failing_batch=408,
        advice=["--config.train.gradient_accumulation_steps=2 makes this batch fit: 9 GiB."],
    )
    text = Report(4096, "mixed_bfloat16", None, [item]).text()
    for part in (
        "it needs 20 GiB, 4 GiB more than the 16 GiB available",
        "ran out",
        "400 per core",
        "3,200",
        "408",
        "gradient_accumulation_steps=2",
    ):
        assert part in text


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({"fits": True}, "-"),
        ({"undecided": True, "compiles": False}, "not known"),
        ({"compiles": False}, "does not compile"),
        ({"largest_per_core_batch": 0, "smallest_failing_batch": 2}, "Not even 2 per core fits"),
        ({"largest_per_core_batch": 0}, "No batch fits: even the weights"),
        ({"hbm_bytes": 15 << 30}, "needs 15 GiB or more, beyond the 16 GiB"),
    ],
)
def test_a_slice_without_an_answer_is_no_refusal(state, said):
    item = SliceReport("v5e-1", 1, 8, hbm_bytes=20 << 30, hbm_limit_bytes=16 << 30)
    item = dataclasses.replace(item, **{"compiles": True, **state})
    assert said in Report(8, "float32", None, [item]).text()


def test_explain_shows_layers_kinds_and_instructions():
    report = Report(1024, "mixed_bfloat16", None, [filled("v3-8")])
    plain, explained = report.text(), report.text(explain=True)
    for part in ("by layer", "by kind", "top instructions", "fusion.1", "70.0%"):
        assert part in explained and part not in plain
    assert "f32[100,130] of block1 (104 KiB, 51% padding)" in plain


def test_explain_shows_the_options_of_the_compiler():
    item = filled("v6e-8")
    item.compiler_options = {"xla_a": "1", "xla_b": "true"}
    report = Report(1024, "mixed_bfloat16", None, [item])
    assert "compiler options: xla_a=1 xla_b=true" in report.text(explain=True)
    assert "compiler options" not in report.text()


def test_the_lower_of_both_counts_of_the_compiler_is_the_memory():
    names = ("argument", "output", "alias", "temp", "peak_memory", "generated_code")

    def total(*sizes):
        both = zip(names, sizes)
        return parse_memory_stats(
            {f"{n}{'' if n == 'peak_memory' else '_size'}_in_bytes": s for n, s in both}
        ).total

    assert total(10, 8, 7, 20, 26, 2) == 26 + 2  # the temporaries are not all needed at once
    assert total(10, 8, 7, 20, 60, 2) == 10 + 8 - 7 + 20 + 2  # arrays on the core, not in HBM
    assert total(10, 8, 7, 20, 5, 2) == 10 + 8 - 7 + 2


def test_every_claim_names_its_evidence():
    text = Report(1024, "mixed_bfloat16", None, [filled("v3-8")]).text()
    assert "Compiled with the TPU compiler, not run" in text
    assert "Published times to compare with are for v3: 8 train steps of 4 models. Time" in text
    assert "list price" in text
    assert "without start-up, evaluation, checkpoints and waiting for input" in text


def test_single_operations_are_no_train_steps():
    text = Report(1024, "mixed_bfloat16", None, [filled("v6e-8"), filled("v5e-8")]).text()
    steps = "v6e: 2 train steps of 2 models and 4 single operations; v5e: 7 train steps of"
    assert steps in text


def test_the_only_slice_with_a_price_is_neither_cheapest_nor_fastest():
    refused, priced = SliceReport("v5e-16", 16, error="no"), filled("v3-8")
    assert Report(64, "bfloat16", None, [refused, priced]).marks(priced) == ""
    both = Report(64, "bfloat16", None, [refused, priced, filled("v5e-8", seconds=9.0)])
    assert both.marks(priced) == "cheapest, fastest"


def test_the_title_says_how_many_parameters_the_model_has():
    refused = SliceReport("v5e-16", 16, error="16 devices do not divide a batch of 1,000.")
    built = SliceReport("v5e-8", 8, parameters=6_738_415_616, trained_parameters=6_738_415_616)
    title = Report(64, "bfloat16", 10, [refused, built]).title()
    assert title == "Preflight: global batch 64, bfloat16, 6,738,415,616 parameters, 10 steps"
    built.trained_parameters = 1024
    title = Report(64, "bfloat16", None, [built]).title()
    assert title.endswith(", 6,738,415,616 parameters (1,024 trained)")


def test_slices_that_were_not_compiled_are_no_evidence():
    refused = SliceReport("v5e-16", 16, error="16 devices do not divide a batch of 1,000.")
    assert "Compiled with" not in Report(1000, "float32", None, [refused]).text()
    both = Report(1000, "float32", None, [refused, filled("v3-8")]).text()
    assert "Compiled with" in both and "v3: 8 train" in both and "for v5e" not in both


def test_the_json_has_the_fields_that_other_commands_read():
    report = json.loads(Report(1024, "mixed_bfloat16", 10, [filled("v3-8")]).to_json())
    wanted = {"slice", "compiles", "fits", "hbm_bytes", "hbm_limit_bytes", "step_ms", "mfu"}
    wanted |= {"step_ms_low", "step_ms_high", "flops", "bytes_accessed", "estimated_cycles"}
    wanted |= {"usd_per_1000_steps", "replicas", "per_core_batch"}
    assert wanted <= set(report["slices"][0])


def test_every_figure_of_the_text_has_the_unit_that_fits():
    item = filled("v3-8", 108e-6, steps=900, examples_per_epoch=102_400)
    text = Report(1024, "mixed_bfloat16", 900, [item]).text(explain=True)
    (row,) = [line for line in text.splitlines() if line.startswith("v3-8 ")]
    # 4 chips of $2 an hour for 900 steps of 108 us: 97.2 ms.
    for figure in ("5 GiB of 15.5 GiB", " 108 us ", " 97.2-119 us ", " 0.024 cents ", " 97.2 ms "):
        assert figure in row
    assert "1 TFLOP" in text and "10 GB of HBM traffic" in text and "100 Mcycles" in text
    assert "0.0216 cents and 97.2 ms for the run, 23.8 mWh" in text
    assert "75.6 us" in text and "e-" not in row
    assert all(line == line.rstrip() for line in text.splitlines())


def test_a_narrow_terminal_gets_fewer_columns_and_no_cut_figures():
    report = Report(1024, "mixed_bfloat16", 900, [filled("v3-8", 108e-6, steps=900)])
    for width in (70, 80, 100, 120):
        header, row = report.text(width=width).splitlines()[1:3]
        assert len(header) <= width and len(row) <= width
        assert "…" not in header + row
        assert "HBM" in header and "step" in header and "cost/run" in header
    assert "bound" in header and "range" in header


def test_what_lies_in_the_hosts_memory_is_shown_for_a_core_and_for_a_host():
    one, several = (filled(name) for name in ("v6e-8", "v5p-16"))
    assert "memory of the host" not in Report(1024, "float32", 600, [one, several]).text()
    for item in (one, several):
        item.host_bytes = 6 << 30
    text = Report(1024, "float32", 600, [one, several]).text()
    assert "memory of the host: 6 GiB for each core, 48 GiB for all cores of a host" in text
    assert "memory of the host: 6 GiB for each core, 24 GiB for all cores of a host" in text


def test_what_exceeds_the_hosts_memory_does_not_fit_and_both_figures_are_named():
    item = filled("v5e-8")
    item.host_limit_bytes = parse_slice("v5e-8").host_limit
    item.host_bytes = 48 * 10**9
    assert not item.exceeds_host
    item.host_bytes += 1 << 30
    assert item.exceeds_host
    item.fits, item.error = False, describe_host_excess(item.host_bytes, parse_slice("v5e-8"))
    text = Report(1024, "float32", 600, [item]).text()
    assert "Does not fit: It needs 45.7 GiB of the host's memory for each device" in text
    assert "a host of v5e has 44.7 GiB for a device" in text


def test_a_slice_whose_hosts_have_too_little_memory_is_not_the_cheapest():
    small, large = filled("v5e-8"), filled("v6e-8", 10.0)
    small.fits, small.error = False, "It needs too much of the host's memory."
    assert small.usd_per_1000_steps < large.usd_per_1000_steps
    report = Report(1024, "float32", 600, [small, large])
    assert report.cheapest is report.fastest is report.ranked()[0] is large
