"""How the machine does while a run goes on: load, memory, disk, network, TPU; and alerts."""

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable

import psutil

from tftpu.storage import files

GIB = 2.0**30
MB = 1e6

# libtpu's names, ours, and how the values of several chips become one.
_TPU_METRICS = (
    ("duty_cycle_pct", "tpu_duty_cycle_percent", 1.0, "mean"),
    ("tensorcore_util", "tpu_tensorcore_percent", 1.0, "mean"),
    ("hbm_capacity_usage", "tpu_memory_gib", GIB, "max"),
    ("hbm_capacity_total", "tpu_memory_total_gib", GIB, "max"),
)


class Telemetry:
    """Takes a sample of the machine every few seconds, in a thread of its own.

    Args:
        workdir: whose disk is looked at; a remote one has none.
        beat: called after each sample, from that thread.
        every: seconds between two samples.
        tpu: whether this host has a TPU: without one, asking libtpu hangs for minutes.
    """

    def __init__(
        self,
        workdir: str | None,
        beat: Callable[[], None],
        every: float = 10.0,
        tpu: bool = False,
    ):
        self._folder = workdir if workdir and not files.is_remote(workdir) else None
        self._beat = beat
        self._every = every
        self._tpu = tpu
        self._over = threading.Event()
        self._process = psutil.Process()
        self._counters = _counters()
        psutil.cpu_percent(None)  # the first call has nothing to compare with
        self._said: set[str] = set()  # what went wrong, once each
        self.latest: dict[str, float] = {}  # the last sample; replaced whole
        self._thread = threading.Thread(target=self._watch, name="telemetry", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread; it does not wait for a libtpu that does not answer."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join(timeout=5.0)

    def sample(self) -> dict[str, float]:
        """What the machine does now; rates are means since the last call."""
        before, self._counters = self._counters, _counters()
        (then, moved_then), (now, moved) = before, self._counters
        memory = psutil.virtual_memory()
        result = {
            "cpu_percent": psutil.cpu_percent(None),
            "memory_percent": memory.percent,
            "process_memory_gib": self._process.memory_info().rss / GIB,
        }
        for name, count in moved.items():
            result[name] = (count - moved_then[name]) / MB / max(now - then, 1e-9)
        if self._folder and os.path.isdir(self._folder):
            disk = psutil.disk_usage(self._folder)
            result["disk_free_gib"] = disk.free / GIB
            result["disk_percent"] = disk.percent
        if self._tpu:
            result.update(tpu_sample())
        return result

    def _watch(self) -> None:
        while not self._over.wait(self._every):
            try:
                self.latest = self.sample()
                self._beat()
            except Exception as error:  # a run does not end because nobody could look at it
                if str(error) not in self._said:
                    logging.warning("The machine could not be looked at: %s", error)
                self._said.add(str(error))


def tpu_sample() -> dict[str, float]:
    """Duty cycle, TensorCore utilisation and memory of this host's chips, by libtpu's monitoring.

    Metrics that this libtpu does not have are left out; all of them where there is no libtpu.
    """
    try:
        from libtpu.sdk import tpumonitoring
    except ImportError:
        return {}
    result = {}
    for name, ours, unit, how in _TPU_METRICS:
        with contextlib.suppress(RuntimeError, ValueError):
            values = [float(value) / unit for value in tpumonitoring.get_metric(name).data()]
            if values:
                result[ours] = max(values) if how == "max" else sum(values) / len(values)
    return result


def alerts(sample: dict[str, float], seconds: dict[str, float]) -> dict[str, str]:
    """What a user should know about, in words, by what it is about.

    Args:
        sample: the last one of the machine; may be empty.
        seconds: of each part of the run since the last look.
    """
    found = {}
    training = seconds["step"] + seconds["input_wait"]
    if training and seconds["input_wait"] > 0.2 * training:
        percent = 100 * seconds["input_wait"] / training
        found["input"] = f"Input wait is {percent:.0f} % of the step: see tftpu data check."
    whole = sum(seconds.values())
    if whole and seconds["checkpoint_wait"] > 0.1 * whole:
        percent = 100 * seconds["checkpoint_wait"] / whole
        found["checkpoint"] = (
            f"Checkpoint wait is {percent:.0f} % of the time: save less often "
            "(--config.train.checkpoint_every)."
        )
    if sample.get("memory_percent", 0) > 90:
        found["memory"] = (
            f"The host's memory is {sample['memory_percent']:.0f} % full, this process holds "
            f"{sample['process_memory_gib']:.1f} GiB: smaller shuffle buffers, and no cache() of "
            "data that do not fit."
        )
    if sample.get("disk_percent", 0) > 95:
        found["disk"] = (
            f"The workdir's disk is {sample['disk_percent']:.0f} % full, "
            f"{sample['disk_free_gib']:.1f} GiB are left: keep fewer checkpoints "
            "(--config.train.keep) or make room."
        )
    used, total = sample.get("tpu_memory_gib", 0), sample.get("tpu_memory_total_gib", 0)
    if total and used > 0.95 * total:
        found["tpu_memory"] = (
            f"The TPU's memory is {100 * used / total:.0f} % full ({used:.1f} of {total:.1f} GiB): "
            "tftpu preflight says what takes it."
        )
    return found


def _counters() -> tuple[float, dict[str, float]]:
    """The time, and the bytes moved since the machine started, of what it counts."""
    moved = {}
    disk = psutil.disk_io_counters()
    if disk is not None:  # none in some containers
        moved |= {"disk_read_mb_s": disk.read_bytes, "disk_write_mb_s": disk.write_bytes}
    net = psutil.net_io_counters()
    if net is not None:
        moved |= {"net_received_mb_s": net.bytes_recv, "net_sent_mb_s": net.bytes_sent}
    return time.monotonic(), moved
