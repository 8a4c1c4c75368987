"""Samples of the machine against the kernel's own figures, and alerts in words."""

import os
import time

import pytest

from tftpu.observe import telemetry
from tftpu.runtime import goodput

SECONDS = dict.fromkeys(goodput.PARTS, 0.0)


def test_a_sample_matches_the_kernels_figures(tmp_path):
    watch = telemetry.Telemetry(str(tmp_path), lambda: None)
    end = time.monotonic() + 0.3
    while time.monotonic() < end:  # one core is busy
        pass
    sample = watch.sample()
    with open("/proc/self/statm") as statm:
        resident = int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    assert sample["process_memory_gib"] == pytest.approx(resident / 2**30, rel=0.05)
    disk = os.statvfs(tmp_path)
    assert sample["disk_free_gib"] == pytest.approx(disk.f_bavail * disk.f_frsize / 2**30, rel=0.01)
    assert 0.5 * 100 / os.cpu_count() < sample["cpu_percent"] <= 100


def test_rates_are_means_since_the_last_sample(tmp_path, monkeypatch):
    moved = {"disk_write_mb_s": 0.0}
    times = iter([0.0, 2.0])
    monkeypatch.setattr(telemetry, "_read_counters", lambda: (next(times), dict(moved)))
    watch = telemetry.Telemetry(str(tmp_path), lambda: None)
    moved["disk_write_mb_s"] = 10e6
    assert watch.sample()["disk_write_mb_s"] == pytest.approx(5.0)


def test_the_thread_samples_and_beats_until_it_is_stopped(tmp_path):
    beats = []
    watch = telemetry.Telemetry(str(tmp_path), lambda: beats.append(1), every=0.05)
    watch.start()
    end = time.monotonic() + 10
    while len(beats) < 3 and time.monotonic() < end:
        time.sleep(0.01)
    watch.stop()
    count = len(beats)
    assert count >= 3 and watch.latest["memory_percent"] > 0
    time.sleep(0.2)
    assert len(beats) == count


def test_a_failing_beat_is_logged_once_and_ends_nothing(tmp_path, caplog):
    tries = []

    def fail():
        tries.append(1)
        raise OSError("the disk is full")

    watch = telemetry.Telemetry(str(tmp_path), fail, every=0.05)
    watch.start()
    end = time.monotonic() + 10
    while len(tries) < 3 and time.monotonic() < end:
        time.sleep(0.01)
    watch.stop()
    assert len(tries) >= 3 and caplog.text.count("the disk is full") == 1


def test_alerts_name_the_problem_and_the_fix():
    assert telemetry.find_alerts({}, SECONDS | {"step": 10.0, "input_wait": 1.0}) == {}
    short = SECONDS | {"step": 0.2, "input_wait": 0.5, "checkpoint_wait": 0.9}
    assert telemetry.find_alerts({}, short) == {}  # which no user would notice
    found = telemetry.find_alerts({}, SECONDS | {"step": 62.0, "input_wait": 38.0})
    assert "Input wait is 38 % of the step" in found["input"] and "cache()" in found["input"]
    found = telemetry.find_alerts({}, SECONDS | {"step": 62.0, "input_wait": 38.0}, True)
    assert "model.preprocessor = None" in found["input"] and "cache()" not in found["input"]
    found = telemetry.find_alerts({}, SECONDS | {"step": 80.0, "checkpoint_wait": 20.0})
    assert "Checkpoint wait is 20 %" in found["checkpoint"]
    assert telemetry.find_alerts({}, SECONDS | {"step": 10.0, "evaluation": 9.0}) == {}
    starting = SECONDS | {"starting": 30.0, "step": 1.0, "evaluation": 9.0}
    assert telemetry.find_alerts({}, starting) == {}
    found = telemetry.find_alerts({}, SECONDS | {"step": 20.0, "evaluation": 60.0})
    assert "Evaluation took 75 % of the last 80 s" in found["evaluation"]
    sample = {
        "memory_percent": 95.0,
        "process_memory_gib": 12.0,
        "disk_percent": 97.0,
        "disk_free_gib": 1.5,
        "tpu_memory_gib": 15.5,
        "tpu_memory_total_gib": 15.75,
    }
    found = telemetry.find_alerts(sample, SECONDS)
    assert "12 GiB" in found["memory"]
    assert "1.5 GiB are left" in found["disk"]
    assert "98 % full" in found["tpu_memory"]


def test_libtpus_figures_become_one_number_each(monkeypatch):
    """Returns metrics as libtpu does: strings, one a chip. There is no TPU here to ask."""
    import sys
    import types

    values = {
        "duty_cycle_pct": ["40.0", "60.0"],
        "hbm_capacity_usage": [str(2**30), str(3 * 2**30)],
        "hbm_capacity_total": [str(16 * 2**30)] * 2,
    }

    def get_metric(name):
        if name not in values:
            raise RuntimeError(f"no metric {name}")
        return types.SimpleNamespace(data=lambda: values[name])

    monitoring = types.SimpleNamespace(get_metric=get_metric)
    package = types.SimpleNamespace(tpumonitoring=monitoring)
    monkeypatch.setitem(sys.modules, "libtpu.sdk", package)
    assert telemetry.read_tpu_sample() == {
        "tpu_duty_cycle_percent": 50.0,
        "tpu_memory_gib": 3.0,
        "tpu_memory_total_gib": 16.0,
    }
