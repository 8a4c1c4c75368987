"""Programs that the compiler makes, and that this version of jaxlib cannot read."""

import keras
import pytest
import tensorflow as tf

from tftpu import preflight
from tftpu.preflight.compiling.compiler import Compiled
from tftpu.preflight.report import Report
from tftpu.preflight.slice_report import SliceReport, fill_unpriced
from tftpu.tpu.slices import parse_slice


@pytest.mark.slow
@pytest.mark.compiles
def test_a_large_vocabulary_on_v6e_is_priced():
    # Its gathers run on the SparseCore, in a program that jaxlib cannot read.
    def words():
        logits = keras.layers.Dense(32_000, dtype="float32")
        layers = [keras.Input((512,), dtype="int32"), keras.layers.Embedding(32_000, 768), logits]
        built = keras.Sequential(layers)
        built.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return built

    tokens = tf.TensorSpec((64, 512), tf.int32)
    [item] = preflight.check(words, (tokens, tokens), ["v6e-8"]).slices
    assert item.fits and item.step_ms is not None
    assert item.model_flops == 3 * 2 * 8 * 512 * 768 * 32_000


def test_a_program_that_cannot_be_read_has_its_memory_and_no_price():
    target = parse_slice("v5e-1")
    report = SliceReport(
        "v5e-1", 1, 8, compiles=True, fits=True, hbm_limit_bytes=target.generation.hbm_limit
    )
    kinds = ("argument_size", "output_size", "alias_size", "temp_size", "generated_code_size")
    memory = {f"{kind}_in_bytes": 1 << 30 for kind in kinds} | {"peak_memory_in_bytes": 3 << 30}
    compiled = Compiled("", False, "", memory, 0.0, 0.0, False)
    fill_unpriced(report, compiled, 197 * 10**9, target)
    assert report.hbm_bytes == 3 << 30  # arguments with the outputs, temporaries, code
    assert report.roofline_ms == pytest.approx(1e3 * 2**30 / 819e9)
    said = Report(8, "float32", None, [report]).text()
    assert "does not" not in said and "3 GiB of 15.8 GiB" in said
    assert "time: not priced; roofline 1.31 ms" in said
    assert "jaxlib cannot read it" in said
    failed = SliceReport("v5e-4", 4, error="no")
    assert Report(8, "float32", None, [report, failed]).cheapest is None
    assert "by layer" not in Report(8, "float32", None, [report]).text(explain=True)
