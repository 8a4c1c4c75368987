"""Telemetry of the machine during a run: load, memory, disk, network and TPU; and alerts."""

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable

import psutil

from tftpu.amounts import format_size
from tftpu.storage import files

_log = logging.getLogger(__name__)

GIB = 2.0**30
MB = 1e6

_FASTER_DATA = (
    "`tftpu data check` measures the data of a config. In your own tf.data pipeline, cache() data "
    "that fit into memory, and use map(…, num_parallel_calls=tf.data.AUTOTUNE)."
)
_PREPARE_ONCE = (
    "The model's preprocessor runs again for each batch of each epoch. For data that fit into "
    "memory, run it once: x, y, weights = model.preprocessor(data); model.preprocessor = None; "
    "trainer.fit(x, y, sample_weight=weights, …)."
)
# libtpu's name, our name, the unit, and how the values of several chips are combined.
_TPU_METRICS = (
    ("duty_cycle_pct", "tpu_duty_cycle_percent", 1.0, "mean"),
    ("tensorcore_util", "tpu_tensorcore_percent", 1.0, "mean"),
    ("hbm_capacity_usage", "tpu_memory_gib", GIB, "max"),
    ("hbm_capacity_total", "tpu_memory_total_gib", GIB, "max"),
)
_NOTICEABLE = 1.0  # seconds; shorter waits and evaluations cause no alert


class Telemetry:
    """A thread that samples the machine every few seconds.

    Args:
        workdir: the folder whose disk is measured, unless it is remote; None: no disk is measured.
        beat: a function that is called after each sample, in the thread.
        every: seconds between two samples.
        tpu: whether this host has a TPU; without one, libtpu's monitoring hangs for minutes.

    Attributes:
        latest: the last sample; each new one replaces it as a whole.
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
        self._counters = _read_counters()
        psutil.cpu_percent(None)  # the first call always returns 0
        self._reported: set[str] = set()  # errors that were already logged
        self.latest: dict[str, float] = {}
        self._thread = threading.Thread(target=self._watch, name="telemetry", daemon=True)

    def start(self) -> None:
        """Starts sampling."""
        self._thread.start()

    def stop(self) -> None:
        """Stops sampling; waits at most 5 seconds, because libtpu may not answer."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join(timeout=5.0)

    def sample(self) -> dict[str, float]:
        """Returns the current load of the machine by name; rates are means since the last call."""
        before, self._counters = self._counters, _read_counters()
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
            result.update(read_tpu_sample())
        return result

    def _watch(self) -> None:
        while not self._over.wait(self._every):
            try:
                self.latest = self.sample()
                self._beat()
            except Exception as error:  # telemetry must not end a run
                if str(error) not in self._reported:
                    _log.warning("Telemetry of this machine failed: %s", error)
                self._reported.add(str(error))


def read_tpu_sample() -> dict[str, float]:
    """Returns duty cycle, TensorCore utilisation and memory of this host's chips, from libtpu.

    Metrics that the installed libtpu lacks are left out. Without libtpu, the result is empty.
    """
    try:
        from libtpu.sdk import tpumonitoring  # pyright: ignore[reportMissingImports] (TPU hosts)
    except ImportError:
        return {}
    result = {}
    for name, ours, unit, how in _TPU_METRICS:
        with contextlib.suppress(RuntimeError, ValueError):
            values = [float(value) / unit for value in tpumonitoring.get_metric(name).data()]
            if values:
                result[ours] = max(values) if how == "max" else sum(values) / len(values)
    return result


def find_alerts(
    sample: dict[str, float], seconds: dict[str, float], preprocessed: bool = False
) -> dict[str, str]:
    """Returns messages about problems that users should know about, by topic.

    Args:
        sample: the last sample of the machine, by name; may be empty.
        seconds: the seconds of each activity since the last call, by name, such as "input_wait".
        preprocessed: whether the model's own preprocessor is mapped over the data.
    """
    found = {}
    training = seconds["step"] + seconds["input_wait"]
    if seconds["input_wait"] > max(0.2 * training, _NOTICEABLE):
        percent = 100 * seconds["input_wait"] / training
        found["input"] = (
            f"Input wait is {percent:.0f} % of the step: the data are slower than the devices. "
            f"{_PREPARE_ONCE if preprocessed else _FASTER_DATA}"
        )
    whole = sum(seconds.values())
    if seconds["evaluation"] > max(0.5 * whole, _NOTICEABLE):
        percent = 100 * seconds["evaluation"] / whole
        found["evaluation"] = (
            f"Evaluation took {percent:.0f} % of the last {whole:.0f} s: evaluate less often "
            "(eval_every of `fit`, or --config.train.eval_every)."
        )
    if seconds["checkpoint_wait"] > max(0.1 * whole, _NOTICEABLE):
        percent = 100 * seconds["checkpoint_wait"] / whole
        found["checkpoint"] = (
            f"Checkpoint wait is {percent:.0f} % of the time: save less often "
            "(TrainConfig.checkpoint_every)."
        )
    if sample.get("memory_percent", 0) > 90:
        held = format_size(GIB * sample["process_memory_gib"])
        found["memory"] = (
            f"The host's memory is {sample['memory_percent']:.0f} % full, this process holds "
            f"{held}: use smaller shuffle buffers, and do not cache() data that does not fit."
        )
    if sample.get("disk_percent", 0) > 95:
        found["disk"] = (
            f"The workdir's disk is {sample['disk_percent']:.0f} % full, "
            f"{format_size(GIB * sample['disk_free_gib'])} are left: keep fewer checkpoints "
            "(TrainConfig.keep) or free some space."
        )
    used, total = sample.get("tpu_memory_gib", 0), sample.get("tpu_memory_total_gib", 0)
    if total and used > 0.95 * total:
        found["tpu_memory"] = (
            f"The TPU's memory is {100 * used / total:.0f} % full ({format_size(GIB * used)} of "
            f"{format_size(GIB * total)}): `tftpu preflight` shows what uses it."
        )
    return found


def _read_counters() -> tuple[float, dict[str, float]]:
    """Returns the time in seconds, and the bytes moved since the machine started, by name."""
    moved = {}
    disk = psutil.disk_io_counters()
    if disk is not None:  # some containers have no disk counters
        moved |= {"disk_read_mb_s": disk.read_bytes, "disk_write_mb_s": disk.write_bytes}
    net = psutil.net_io_counters()
    if net is not None:
        moved |= {"net_received_mb_s": net.bytes_recv, "net_sent_mb_s": net.bytes_sent}
    return time.monotonic(), moved
