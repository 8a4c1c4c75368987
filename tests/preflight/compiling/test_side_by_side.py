"""Several slices at once: their threads, their compilers' processes, what is shown meanwhile."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
import types
from typing import Any

import keras
import pytest
import tensorflow as tf

from tftpu import preflight
from tftpu.engines.lowered import StateBytes
from tftpu.errors import UserError
from tftpu.preflight.compiling import processes, progress
from tftpu.preflight.compiling.caller import Caller, StoppedError
from tftpu.preflight.compiling.compiler import Compiled
from tftpu.preflight.compiling.processes import Processes
from tftpu.preflight.compiling.progress import Progress
from tftpu.preflight.compiling.work_folder import open_work_folder
from tftpu.preflight.examining import changes, examiner
from tftpu.preflight.slice_report import SliceReport
from tftpu.tpu.slices import parse_slice

V3, V5E = parse_slice("v3-8"), parse_slice("v5e-8")


def nothing():
    pass


@pytest.fixture
def stand_in(monkeypatch, tmp_path):
    """Replaces the compiler by a program that notes its start and end and takes some seconds."""
    script = tmp_path / "compiler"

    def replace(seconds, work="sleep {}"):
        job = "${4}"
        script.write_text(
            f'#!/bin/sh\ndate +%s.%N > "{job}/times"\n{work.format(seconds)}\n'
            f'date +%s.%N >> "{job}/times"\n'
        )
        script.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(script))

    return replace


@pytest.fixture
def jobs(tmp_path):
    """Returns the folders of two small programs, with their slices."""
    made = []
    for target in (V3, V5E):
        folder = tmp_path / target.name
        folder.mkdir()
        (folder / "module.mlir").write_bytes(b"module")
        made.append((folder, target))
    return made


def run_both(jobs, compilers, limits=(60.0, 60.0)):
    """Compiles both programs in threads; returns their errors and seconds."""
    numbered = list(zip(jobs, limits))
    return Caller().map_items(
        lambda item: compilers.run(*item[0], item[1], False, "compiling"), numbered, compilers.stop
    )


def times(jobs):
    return [tuple(map(float, (job / "times").read_text().split())) for job, _ in jobs]


@pytest.mark.medium
def test_two_compilers_run_side_by_side_where_memory_and_cores_allow(stand_in, jobs, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    stand_in(2)
    assert [error for error, _ in run_both(jobs, Processes(Progress()))] == ["", ""]
    (start, end), (other_start, other_end) = times(jobs)
    assert max(start, other_start) < min(end, other_end)


@pytest.mark.medium
@pytest.mark.parametrize(("cores", "memory"), [({0}, 1e12), ({0, 1}, 1e8)])
def test_the_second_waits_for_a_core_and_for_memory(stand_in, jobs, monkeypatch, cores, memory):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: cores)
    monkeypatch.setattr(processes, "measure_available_memory", lambda: memory)
    stand_in(0.5)
    progress, phases = Progress(), []
    show = progress.show_phase
    monkeypatch.setattr(
        progress, "show_phase", lambda text, *others: phases.append(text) or show(text, *others)
    )
    run_both(jobs, Processes(progress))
    assert phases.count("waiting for another compiler to end, compiling") == 1
    first, second = sorted(times(jobs))
    assert first[1] <= second[0]


@pytest.mark.slow
def test_each_compiler_has_its_own_time_limit(stand_in, jobs):
    stand_in(1_000_000, "i=0; while [ $i -lt {} ]; do i=$((i+1)); done")  # some seconds
    (slow, seconds), (done, _) = run_both(jobs, Processes(Progress()), (0.3, 60.0))
    assert "had not finished after 0 s" in slow and seconds >= 0.3
    assert done == ""


@pytest.mark.medium
def test_the_time_in_which_a_compiler_gets_no_processor_does_not_count(stand_in, jobs):
    stand_in(1)
    assert [e for e, _ in run_both(jobs, Processes(Progress()), (0.2, 0.2))] == ["", ""]


def test_a_compiler_that_hangs_is_stopped(stand_in, jobs, monkeypatch):
    monkeypatch.setattr(processes, "_IDLE", 0.5)
    monkeypatch.setattr(processes, "_LOOK", 0.1)
    stand_in(60)
    errors = [error for error, _ in run_both(jobs, Processes(Progress()))]
    assert all("used no processor time" in error for error in errors)


def test_ctrl_c_ends_all_compilers(stand_in, jobs):
    stand_in(60)
    compilers = Processes(Progress())
    started: list[subprocess.Popen] = []

    def interrupt():
        while len(compilers._running) < 2:
            time.sleep(0.05)
        started.extend(compilers._running)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    threading.Thread(target=interrupt).start()
    start = time.monotonic()
    # Processes that run tests beside others ignore the signal.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            run_both(jobs, compilers)
    finally:
        signal.signal(signal.SIGINT, before)
    assert time.monotonic() - start < 20
    assert [process.poll() for process in started] == [-signal.SIGKILL] * 2


def test_the_callers_thread_serves_all_and_results_keep_their_order():
    caller, here = Caller(), threading.get_ident()

    def examined(seconds):
        time.sleep(seconds)
        return seconds, caller.run(threading.get_ident), threading.get_ident()

    found = caller.map_items(examined, [0.3, 0.0, 0.1], nothing)
    assert [item[0] for item in found] == [0.3, 0.0, 0.1]
    assert {item[1] for item in found} == {here}
    assert len({here, *(item[2] for item in found)}) == 4


def test_an_error_in_one_thread_stops_the_others_and_is_raised():
    caller, stopped = Caller(), threading.Event()

    def failing():
        raise UserError("no TPU can run it")

    def examined(first):
        if first:
            caller.run(failing)
        assert stopped.wait(20)
        caller.run(nothing)  # nobody serves it any more, and it does not hang

    with pytest.raises(UserError, match="no TPU can run it"):
        caller.map_items(examined, [True, False], stopped.set)


@pytest.mark.medium
def test_slices_of_as_many_devices_share_one_model_and_one_lowered_step(monkeypatch):
    built, lowered = [], {}

    def refuse(step, target, *_):
        lowered[target.name] = step
        return Compiled("no compiler", False, "", {}, 0.0, 1.0, False)

    def model_fn():
        built.append(threading.get_ident())
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        model.compile("sgd", "mse")
        return model

    monkeypatch.setattr(examiner, "compile_program", refuse)
    spec = (tf.TensorSpec((64, 4)), tf.TensorSpec((64, 2)))
    names = ["v3-8", "v5e-4", "v5e-8", "v2-8"]
    report = preflight.check(model_fn, spec, names)
    assert [item.slice for item in report.slices] == names
    assert built == [threading.get_ident()] * 2  # for 8 devices and for 4
    assert lowered["v3-8"] is lowered["v5e-8"] is lowered["v2-8"] is not lowered["v5e-4"]


@pytest.mark.medium
def test_a_change_without_an_answer_is_not_called_a_misfit_and_costs_no_other_slice(monkeypatch):
    late, full = "had not finished after 20 s", "Used 20.00G of 15.75G hbm."

    def answer(step, target, chosen, limit, verbose, processes, text):
        if "5e" not in target.name:
            return Compiled("no compiler", False, "", {}, 0.0, 1.0, False)
        undecided = " with " in text
        found = late if undecided else full
        return Compiled(found, not undecided, "", {}, 0.0, 1.0, False, undecided=undecided)

    def model_fn():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        model.compile("sgd", "mse")
        return model

    monkeypatch.setattr(examiner, "compile_program", answer)
    spec = (tf.TensorSpec((64, 4)), tf.TensorSpec((64, 2)))
    report = preflight.check(model_fn, spec, ["v5e-8", "v3-8"])
    refused, other = report.slices
    field = "--config.train.gradient_accumulation_steps=2"
    assert other.error == "no compiler" and refused.largest_per_core_batch is None
    assert refused.advice == [
        f"The search for a change that fits has stopped. With {field}: {late}"
    ]
    assert late in report.text() and "is not enough" not in report.text()


def test_a_mesh_that_fits_is_kept_if_another_has_no_answer(monkeypatch):
    fits = SliceReport("v5e-8", 8, mesh="fsdp:8", compiles=True, fits=True)
    undecided = SliceReport("v5e-8", 8, mesh="fsdp:4", undecided=True, error="late")
    finer = [
        types.SimpleNamespace(examine_once=lambda _, report=report: report)
        for report in (undecided, fits)
    ]
    running = types.SimpleNamespace(progress=Progress())
    examining: Any = types.SimpleNamespace(list_finer=lambda _: finer, processes=running, tried=[])
    assert changes._try_wider_meshes(examining, parse_slice("v5e-8")) is fits
    finer.pop()
    with pytest.raises(UserError, match="With the mesh fsdp:4: late"):
        changes._try_wider_meshes(examining, parse_slice("v5e-8"))


@pytest.mark.parametrize("fitting", ["steps=4", "no microbatches"])
def test_the_answer_to_each_change_that_is_tried_is_shown_when_it_comes(
    fitting, monkeypatch, capfd
):
    size = ("argument", "output", "alias", "temp", "generated_code")
    memory = {f"{part}_size_in_bytes": 2**20 for part in size} | {"peak_memory_in_bytes": 2**22}
    full = "Used 20.00G of 15.75G hbm."

    def answer(step, target, chosen, limit, verbose, processes, text):
        fits = "a batch of 3" in text or fitting in text
        return Compiled("" if fits else full, not fits, "", memory, 0.0, 1.0, False)

    def model_fn():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        model.compile("sgd", "mse")
        return model

    monkeypatch.setattr(progress, "_LONG", 0.0)
    monkeypatch.setattr(examiner, "compile_program", answer)
    preflight.check(model_fn, (tf.TensorSpec((64, 4)), tf.TensorSpec((64, 2))), ["v5e-8"])
    said = [line for line in capfd.readouterr().err.splitlines() if line.startswith("v5e-8 with")]
    field = "v5e-8 with --config.train.gradient_accumulation_steps"
    assert said[0] == f"{field}=2: does not fit, 20 GiB needed"
    smaller = [line for line in said if " per core, as 8 are too many: " in line]
    if fitting == "steps=4":  # nothing else is compiled then
        assert said[1:] == [f"{field}=4: fits, 3 MiB"]
    else:
        assert said[1:3] == [
            f"{field}=4: does not fit, 20 GiB needed",
            f"{field}=8: does not fit, 20 GiB needed",
        ]
        assert "v5e-8 with a batch of 3 per core, as 8 are too many: fits, 3 MiB" in smaller


@pytest.mark.medium
@pytest.mark.parametrize(
    ("slices", "known"),
    [
        (["v3-8", "v5e-8"], "Known before the interruption:\n  v3-8: no\nNot finished: v5e-8."),
        (["v5e-8"], "No results yet, except for the estimates above: v5e-8.\n"),
    ],
)
def test_an_interrupted_check_says_which_slices_were_finished(slices, known, monkeypatch, capfd):
    def finish(step, target, *_):
        if target.name != "v3-8":
            time.sleep(1.0)
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            raise StoppedError  # as a compiler that is stopped does
        return Compiled("no compiler", False, "", {}, 0.0, 1.0, False)

    def model_fn():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        model.compile("sgd", "mse")
        return model

    monkeypatch.setattr(examiner, "compile_program", finish)
    spec = (tf.TensorSpec((64, 4)), tf.TensorSpec((64, 2)))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            preflight.check(model_fn, spec, slices)
    finally:
        signal.signal(signal.SIGINT, before)
    said = capfd.readouterr().err
    assert known in said


def shown(capfd, seconds):
    with Progress() as progress, progress.show_phase("lowering") as phase:
        sleeper = subprocess.Popen(["sleep", "60"])
        with progress.show_phase("compiling v5e-8", sleeper.pid, 100.0):
            time.sleep(seconds)
            phase.text = "lowering more"
        sleeper.kill()
        sleeper.wait()
    return capfd.readouterr().err


@pytest.mark.medium
def test_plain_lines_are_sparse_and_name_phase_seconds_and_memory(capfd):
    first, second = sorted(shown(capfd, 3.2).splitlines())  # one each in three seconds
    assert re.fullmatch(r"compiling v5e-8, [123] s, \d\S* [KM]iB", first)
    assert re.fullmatch("lowering, [123] s", second)


@pytest.mark.medium
def test_a_terminal_gets_one_live_line_with_all_phases(capfd, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "120")
    said = shown(capfd, 1.8)
    assert "\n" not in said
    assert re.search(r"\rlowering, 1 s; compiling v5e-8, 1 s, \d\S* [KM]iB", said)
    assert re.search(r"\r +\r$", said)  # nothing is left


def test_a_phase_that_is_over_soon_is_not_shown(capfd):
    assert shown(capfd, 0.2) == ""


def test_folders_of_killed_processes_are_removed_and_others_stay(tmp_path):
    code = (
        "import sys, time; from pathlib import Path\n"
        "from tftpu.preflight.compiling.work_folder import open_work_folder\n"
        "with open_work_folder(Path(sys.argv[1])) as folder:\n"
        "    print(folder, flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    made = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    folders = [process.stdout.readline().strip() for process in made]
    killed, living, young = made
    for process in (killed, young):
        process.kill()
        process.wait()
    for folder in folders[:2]:
        os.utime(folder, (0, 0))
    with open_work_folder(tmp_path) as mine:
        assert mine.exists()
        assert [os.path.exists(folder) for folder in folders] == [False, True, True]
    living.kill()
    living.wait()
    assert sorted(map(str, tmp_path.iterdir())) == sorted(folders[1:])


def test_microbatches_are_tried_until_what_does_not_shrink_is_too_large(monkeypatch):
    tried: list[int] = []

    def refuse(examiner, step, target, change):
        tried.append(int(change.rpartition("=")[2]))
        error = f"Used {shared + 16 / tried[-1]:.2f}G of 15.75G hbm."
        return Compiled(error, True, "", {}, 0.0, 1.0, False), None, ""

    monkeypatch.setattr(changes, "_try_change", refuse)
    examiner = examiner_of(4 << 30)
    examiner.caller = types.SimpleNamespace(run=lambda build: build())
    examiner.microbatches, examiner.lower = 1, lambda *_, **__: None
    examiner.options = types.SimpleNamespace(batch_unit=None)
    for shared, expected in ((16, [4, 8, 16]), (18, [4, 8]), (40, [8])):
        tried.clear()
        found = changes._suggest_accumulation(
            examiner, parse_slice("v5e-8"), 16, (shared + 16) << 30
        )
        assert found == (None, ["Gradient accumulation is not enough to make this batch fit."])
        assert tried == expected


def examiner_of(state: int):
    """Returns what has the state of a device, in bytes."""
    built = types.SimpleNamespace(state_bytes=StateBytes(state, 0, 0))
    return types.SimpleNamespace(build_shared=lambda *_: built)


def test_a_large_state_that_no_mesh_divides_is_named_beside_what_fits(monkeypatch):
    monkeypatch.setattr(changes, "_suggest_accumulation", lambda *_: (None, []))
    monkeypatch.setattr(changes, "suggest_recomputing", lambda *_: (1.0, ["remat"]))
    for mesh, count in (("", 3), ("fsdp:8", 1)):
        report = SliceReport("v5e-8", 8, per_core_batch=8, error="no room", mesh=mesh)
        changes._add_fixes(examiner_of(8 << 30), report, parse_slice("v5e-8"))
        assert len(report.advice) == count
    report.mesh, report.advice = "", []
    changes._add_fixes(examiner_of(8 << 30), report, parse_slice("v5e-8"))
    assert report.advice[1] == "Weights and optimizer's state take 8 GiB of each device."
    assert (
        "--config.cluster.mesh=fsdp:-1 divides it: 1 GiB per device. `tftpu plan`"
        in (report.advice[2])
    )


@pytest.mark.parametrize(
    ("divided", "recomputed", "expected"),
    [(2.0, 1.0, "remat, parts"), (1.0, 2.0, "parts, remat"), (None, 2.0, "remat, parts")],
)
def test_the_fastest_change_that_fits_comes_first(divided, recomputed, expected, monkeypatch):
    report = SliceReport("v5e-8", 8, per_core_batch=8, error="no room")
    monkeypatch.setattr(changes, "_suggest_accumulation", lambda *_: (divided, ["parts"]))
    monkeypatch.setattr(changes, "suggest_recomputing", lambda *_: (recomputed, ["remat"]))
    changes._add_fixes(examiner_of(1 << 20), report, parse_slice("v5e-8"))
    assert ", ".join(report.advice) == expected
    assert report.largest_per_core_batch is None


def test_a_change_that_fits_is_kept_if_the_other_search_has_no_answer(monkeypatch):
    def stop(*_):
        raise UserError("Late.")

    report = SliceReport("v5e-8", 8, per_core_batch=8, error="no room")
    monkeypatch.setattr(changes, "_suggest_accumulation", stop)
    monkeypatch.setattr(changes, "suggest_recomputing", lambda *_: (1.0, ["remat"]))
    changes._add_fixes(examiner_of(1 << 20), report, parse_slice("v5e-8"))
    assert report.advice == ["remat", "Another change could not be checked. Late."]
    monkeypatch.setattr(changes, "suggest_recomputing", lambda *_: (None, ["not enough"]))
    with pytest.raises(UserError, match=r"Late\."):
        changes._add_fixes(examiner_of(1 << 20), report, parse_slice("v5e-8"))


def test_the_advice_on_a_mesh_that_was_chosen_names_it(monkeypatch):
    report = SliceReport("v5e-8", 8, mesh="fsdp:8")
    report.advice = ["--config.train.remat=block makes this batch fit: 1 GiB.", "Not enough."]
    monkeypatch.setattr(changes, "examine", lambda *_: report)
    finer = types.SimpleNamespace(options=types.SimpleNamespace(mesh="auto"))
    assert changes._examine_mesh(finer, parse_slice("v5e-8")).advice == [
        "--config.cluster.mesh=fsdp:8 --config.train.remat=block makes this batch fit: 1 GiB.",
        "Not enough.",
    ]
