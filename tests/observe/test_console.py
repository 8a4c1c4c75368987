"""The live line of a run at any width, and the numbers in it."""

import contextlib
import io
import os
import pty
import re
import shutil
import subprocess
import sys
import time

import pytest
from rich.console import Console as RichConsole

from tftpu.engines.tensorflow.lowering import flops
from tftpu.observe import console
from tftpu.observe.console import Console, LiveLine, Progress
from tftpu.runtime import slow
from tftpu.tpu import hardware
from tftpu.tpu.slices import GENERATIONS

FULL = Progress(step=340, loss=0.61234, rate=4 * 7388.4, mfu=0.412, eta=125.0, usd=12.345)


def drawn(
    progress: Progress,
    width: int,
    phase: str = "training",
    chips: int | None = 4,
    metric: tuple[str, float] | None = None,
) -> str:
    line = LiveLine(900, 0, chips)
    line.metric = metric
    line.set_phase(phase)
    line.progress = progress
    return line.format_text(width)


def test_a_wide_line_shows_everything():
    text = drawn(FULL, 120)
    for part in ("training 340/900 37%", "loss 0.6123", "7,388 ex/s/chip", "MFU 41.2%", "ETA 2:05"):
        assert part in text
    assert "$12.35" in text or "$12.34" in text
    assert "━" in text


def test_everything_fits_into_80_columns():
    text = drawn(FULL, 80)
    assert all(part in text for part in ("340/900", "loss", "ex/s/chip", "MFU", "ETA", "$"))


def test_throughput_is_per_chip_on_tpus_and_the_total_elsewhere():
    assert "7,388 ex/s/chip" in drawn(FULL, 120)
    text = drawn(FULL, 120, chips=None)
    assert "29,554 ex/s" in text and "chip" not in text


def test_a_metric_of_training_is_shown():
    assert "loss 0.6123  accuracy 0.9123" in drawn(FULL, 120, metric=("accuracy", 0.91234))
    assert "accuracy" in drawn(FULL, 80, metric=("accuracy", 0.91234))  # rather than dollars
    shown = Console(900)
    shown.write(50, "train", {"loss": 1.0, "head_loss": 1.0, "learning_rate": 0.1, "accuracy": 0.5})
    assert shown._line.metric == ("accuracy", 0.5)


def test_only_the_last_step_is_100_percent():
    assert "899/900 99%" in drawn(FULL._replace(step=899), 120)
    assert "900/900 100%" in drawn(FULL._replace(step=900), 120)


def test_the_line_is_never_wider_than_the_terminal():
    for width in range(5, 200):
        text = drawn(FULL, width)
        assert len(text) <= width
        assert text.startswith("training"[:width])


def test_the_least_important_parts_are_dropped_first():
    assert "loss" in drawn(FULL, 40) and "MFU" not in drawn(FULL, 40)
    assert "ETA" in drawn(FULL, 45) and "$" not in drawn(FULL, 45)


def test_unknown_numbers_are_not_shown():
    text = drawn(Progress(0), 80, "compiling")
    assert text.startswith("compiling 0/900 0:00")
    assert not any(part in text for part in ("loss", "ex/s", "MFU", "ETA", "$", "None"))


def test_on_a_terminal_lines_are_printed_above_the_live_one():
    screen = io.StringIO()
    shown = Console(900)
    shown._console = RichConsole(file=screen, force_terminal=True, width=80, highlight=False)
    shown._live = console.Live(shown._line, console=shown._console, auto_refresh=False)
    shown._live.start()
    shown.update_progress(FULL)
    shown.write(340, "train", {"loss": 0.6})  # in the live line already
    shown.write(340, "eval", {"loss": 0.5})
    shown.write(340, "host", {"machine/cpu_percent": 50.0})
    shown.close()
    text = re.sub(r"\x1b\[\S*?[A-Za-z]", "", screen.getvalue())
    assert "eval  step 340/900  loss 0.5" in text
    assert "train step" not in text and "cpu_percent" not in text
    assert text.rindex("stopped at 340/900") > text.index("eval  step")


DRAWING = """
import sys, time
from tftpu.observe.console import Console, Progress
console = Console(900)
console.start()
for number in range(20):
    console.say(f"line {number}")
console.update_progress(Progress(450, 0.5, 1000.0, None, 60.0))
time.sleep(60)
"""


LEAVING = """
from tftpu.observe.console import Console, Progress
from tftpu.runtime import leaving
console = Console(900)
console.start()
console.update_progress(Progress(450, 0.5))
console.say("a line")
leaving.exit_at_once(124)
"""


def test_a_process_that_ends_at_once_leaves_the_terminal_fit_for_a_prompt():
    ours, its = pty.openpty()
    done = subprocess.run(
        [sys.executable, "-c", LEAVING],
        stdout=its,
        stderr=its,
        env={**os.environ, "TERM": "xterm-256color"},
        timeout=60,
        check=False,
    )
    os.close(its)
    text = b""
    with contextlib.suppress(OSError):  # the end of a terminal is an error
        while more := os.read(ours, 4096):
            text += more
    os.close(ours)
    assert done.returncode == 124
    assert b"training 450/900" in text
    assert b"\x1b[?25l" not in text  # the cursor is never hidden, as a kill could not undo it
    assert text.endswith(b"\r\x1b[J")  # the live line is erased


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("tmux"), reason="no tmux here: apt-get install tmux")
def test_a_terminal_that_is_resized_shows_one_line():
    """Runs in tmux, which rewraps the lines on the screen as most terminals do."""

    env = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    env |= {"TERM": "xterm-256color", "LANG": "C.UTF-8"}  # one that sets no size

    def tmux(*arguments: str) -> str:
        command = ["tmux", "-u", "-L", f"tftpu-{os.getpid()}", *arguments]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
        return done.stdout

    def screen(columns: int) -> list[str]:
        tmux("resize-window", "-t", "0", "-x", str(columns), "-y", "12")
        time.sleep(1.2)
        text = tmux("capture-pane", "-p", "-S", "-", "-t", "0")  # including the scrollback
        return [line for line in text.splitlines() if line]

    tmux("new-session", "-d", "-x", "110", "-y", "12", sys.executable, "-c", DRAWING)
    try:
        end = time.monotonic() + 30
        while "training" not in tmux("capture-pane", "-p", "-t", "0"):
            assert time.monotonic() < end
            time.sleep(0.1)
        for columns in (110, 35, 120, 42):
            *above, line = screen(columns)
            assert above == [f"line {number}" for number in range(20)]
            assert line.startswith("training 450/900 50%")
            assert ("━" in line) == (columns > 60)
    finally:
        tmux("kill-server")


# Peak and price of a chip


def test_mfu_and_dollars_are_known_for_known_chips():
    v5e = hardware.Hardware(8, GENERATIONS["v5e"])
    assert v5e.compute_mfu(8 * 197e12 / 2) == pytest.approx(0.5)
    assert v5e.compute_price(1800) == pytest.approx(8 * 1.20 / 2)
    cpu = hardware.Hardware(1)
    assert cpu.compute_price(3600) is None


def test_the_tpu_is_found_by_its_pci_device_or_the_environment(tmp_path, monkeypatch):
    monkeypatch.delenv("TPU_ACCELERATOR_TYPE", raising=False)
    assert hardware.find_attached_tpu(str(tmp_path)) is None
    for name, vendor, device in (("00:01", "0x8086", "0x0063"), ("00:05", "0x1ae0", "0x0063")):
        folder = tmp_path / "sys/bus/pci/devices" / name
        folder.mkdir(parents=True)
        (folder / "vendor").write_text(f"{vendor}\n")
        (folder / "device").write_text(f"{device}\n")
    assert hardware.find_attached_tpu(str(tmp_path)) == "v5e"
    (folder / "device").write_text("0x0076\n")
    assert hardware.find_attached_tpu(str(tmp_path)) == "tpu7x"
    monkeypatch.setenv("TPU_ACCELERATOR_TYPE", "v3-8")
    assert hardware.find_attached_tpu(str(tmp_path)) == "v3"
    monkeypatch.setenv("TPU_ACCELERATOR_TYPE", "v5litepod-4")
    assert hardware.find_attached_tpu(str(tmp_path)) == "v5e"


# FLOPs of a step


def counted(function, *shapes) -> int:
    import tensorflow as tf

    from tftpu.engines.origins import Origin

    specs = [tf.TensorSpec(shape) for shape in shapes]
    graph = tf.function(function, autograph=False).get_concrete_function(*specs).graph
    return flops.count_step_flops(
        graph, [Origin.DATA] * len(specs)
    )  # nothing is trained: forward alone


def test_the_flops_of_products_and_convolutions_are_those_on_paper():
    import tensorflow as tf

    assert counted(tf.matmul, (4, 5), (5, 6)) == 2 * 4 * 5 * 6
    assert counted(lambda a, b: tf.matmul(a, b, transpose_a=True), (5, 4), (5, 6)) == 240
    assert counted(tf.matmul, (3, 4, 5), (5, 6)) == 3 * 240
    assert counted(lambda a, b: tf.einsum("btd,dhk->bthk", a, b), (2, 7, 8), (8, 3, 4)) == (
        2 * 2 * 7 * 8 * 3 * 4
    )
    # Attention's, of activations with activations.
    assert counted(tf.matmul, (3, 4, 5), (3, 5, 6)) == 0
    assert counted(lambda a, b: tf.einsum("bqhd,bkhd->bhqk", a, b), *[(2, 7, 3, 4)] * 2) == 0
    valid = lambda x, k: tf.nn.conv2d(x, k, 1, "VALID")  # noqa: E731
    assert counted(valid, (2, 8, 8, 3), (3, 3, 3, 16)) == 2 * 2 * 6 * 6 * 16 * 3 * 3 * 3
    padded = lambda x, k: tf.nn.conv2d(x, k, 1, "SAME")  # noqa: E731
    # Along an axis 8 outputs of 3 taps; the first and the last one meet the padding.
    assert counted(padded, (2, 8, 8, 3), (3, 3, 3, 16)) == 2 * 2 * 22 * 22 * 16 * 3
    assert counted(tf.add, (4, 5), (4, 5)) == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "config", ["digits_resnet", pytest.param("python_gpt", marks=pytest.mark.slow)]
)
def test_the_model_flops_are_those_that_preflight_counts_in_the_compiled_program(config):
    import tftpu
    from tests.support.steps.lowering import lower
    from tests.support.steps.stepping import train_step
    from tftpu import input_pipelines
    from tftpu.launch.run import experiment
    from tftpu.launch.settings import config_flags

    settings = config_flags.load(config, [])
    batch = input_pipelines.batch_spec(settings.data, settings.data.global_batch_size)
    with tftpu.connect(virtual_devices=1).scope():
        step = train_step(experiment.build_model(settings), batch)
    program = lower(lambda: experiment.build_model(settings), batch, 1, "float32")
    assert step.model_flops == pytest.approx(program.model_flops, rel=0.02)


@pytest.mark.slow
def test_computing_statistics_does_not_count_as_model_flops():
    """Neither count includes them: a ResNet of large groups computes products for them."""
    import keras
    import tensorflow as tf

    import tftpu
    from tests.support.steps.lowering import lower
    from tests.support.steps.stepping import train_step
    from tftpu import models
    from tftpu.models.sizes import ResNet

    def compiled(norm_batch):
        fields = {"blocks": (1, 1), "width": 8, "stem": "small", "image_size": 8, "num_classes": 5}
        model = models.build(ResNet("tiny", norm_batch=norm_batch, **fields))
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model

    batch = tf.TensorSpec((64, 8, 8, 3)), tf.TensorSpec((64,), tf.int32)
    found = set()
    for norm_batch in (32, 64):
        with tftpu.connect(virtual_devices=1).scope():
            found.add(train_step(compiled(norm_batch), batch).model_flops)
        program = lower(lambda n=norm_batch: compiled(n), batch, 1, "float32")
        found.add(program.model_flops)
    assert len(found) == 1


def test_the_model_flops_of_a_step_count_the_global_batch(tmp_path):
    """Two dense layers, 6 to 16 to 4, on 16 examples: forward, and backward twice."""
    import tensorflow as tf

    import tftpu
    from tests.support.models.training import compiled
    from tests.support.steps.stepping import train_step

    for replicas, gradient_accumulation_steps in ((1, 1), (2, 2)):
        share = tf.TensorSpec((16 // replicas, 6)), tf.TensorSpec((16 // replicas,), tf.int32)
        with tftpu.connect(virtual_devices=replicas).scope():
            step = train_step(
                compiled(), share, gradient_accumulation_steps=gradient_accumulation_steps
            )
        assert step.model_flops == 3 * 2 * 16 * (6 * 16 + 16 * 4)


def test_the_only_line_of_a_run_says_that_it_is_a_mean(capsys):
    for logged in ((30,), (10, 20, 30)):
        lines = Console(30)
        for step in logged:
            lines.write(step, "train", {"loss": 1.0})
        last = capsys.readouterr().out.splitlines()[-1]
        assert last.endswith("(means of 30 steps)") == (len(logged) == 1)


def test_seconds_of_compiling_are_counted_without_a_terminal(monkeypatch, capfd):
    monkeypatch.setattr(slow, "_FIRST", 0.1)
    with Console(4).show_compiling():
        time.sleep(0.3)
    said = capfd.readouterr()
    assert said.out == "Compiling the train step ...\n"
    assert said.err.startswith("Compiling the train step: 0 s so far\n")
