"""Measures the cost of observing a run: writers, telemetry and the live line, on `digits_resnet`.

    python -m tests.benchmarks.overhead [turns]

A clock measures the training thread while it is in them; the processor time of their threads
(the line is drawn twice a second, the machine sampled every ten seconds) is added. The second
measurement is from outside: the same training with all of them (a workdir, a terminal) and with
none alternates in one process, a line of the log each, and the ratios of these turns include
everything else they change, within the noise of the machine.
"""

import contextlib
import os
import pty
import statistics
import sys
import tempfile
import threading
import time

import psutil

import tftpu
from tftpu.launch import benchmark as bench
from tftpu.launch.run import experiment as build
from tftpu.launch.settings import config_flags
from tftpu.training import reporter

BAR = 0.01


def main(turns: int) -> None:
    bench.TURNS = turns
    experiment = config_flags.load("digits_resnet", ["--config.train.checkpoint_every=0"])
    engine = tftpu.connect("none", None)
    steps = experiment.train.log_every

    def train(turn: bench.ContestantThread, seen: bool) -> None:
        experiment.train.log_every = steps if seen else bench.FOREVER
        with tempfile.TemporaryDirectory() as workdir:
            with engine.scope():
                trainer = build.build_trainer(experiment, workdir if seen else None)
            data = build.build_training_data(experiment)
            trainer.fit(
                data, steps=bench.FOREVER, callbacks=[bench.TurnCallback(turn)], verbose=seen
            )

    watch, inside = _Threads(), _Inside()
    with _terminal(), inside.measured():
        times = bench.take_turns(
            {
                "seen": lambda turn: train(turn, True),
                "unseen": lambda turn: train(turn, False),
                "threads": watch.contestant,
            },
            steps,
        )
    ratios = [a / b for a, b in zip(times["seen"], times["unseen"])]
    foreground = statistics.median(ratios) - 1
    quartiles = statistics.quantiles(ratios, n=4)
    for name in ("seen", "unseen"):
        print(f"{name:8}{statistics.median(times[name]) / steps * 1e3:9.3f} ms a step")
    print(
        f"seen / unseen           {foreground:+.2%} (quartiles {quartiles[0] - 1:+.2%}, "
        f"{quartiles[2] - 1:+.2%}; {turns} turns of {steps} steps)"
    )
    share = inside.seconds / (inside.steps * statistics.mean(times["seen"]) / steps)
    print(f"in the training thread  {share:+.2%}")
    print(f"in their own threads {watch.share:+.2%}")
    total = share + watch.share
    print(f"together                {total:+.2%}; the bar is {BAR:.0%}: {total <= BAR}")


class _Inside:
    """A counter of the seconds that the training thread spends reporting."""

    seconds, steps = 0.0, 0

    @contextlib.contextmanager
    def measured(self):
        before = reporter.Reporter.advance, reporter.Reporter.log
        reporter.Reporter.advance, reporter.Reporter.log = map(self._timed, before)
        try:
            yield
        finally:
            reporter.Reporter.advance, reporter.Reporter.log = before

    def _timed(self, method):
        def timed(of: reporter.Reporter, step: int, *args) -> None:
            began = time.perf_counter()
            method(of, step, *args)
            if of._seen:
                self.seconds += time.perf_counter() - began
                self.steps = max(self.steps, step)

        return timed


class _Threads:
    """Processor time of the drawing and sampling threads, as a share of elapsed time."""

    share = 0.0

    def contestant(self, turn: bench.ContestantThread) -> None:
        """Reads the clocks at each of its turns, which are otherwise empty."""
        began, spent = None, 0.0
        while True:
            turn(turn.steps)
            now, used = time.monotonic(), self._used()
            if began is None:
                began, spent = now, used
            else:
                self.share = (used - spent) / (now - began)

    @staticmethod
    def _used() -> float:
        background = {
            thread.native_id
            for thread in threading.enumerate()
            if thread.name == "telemetry" or type(thread).__name__ == "_RefreshThread"
        }
        assert len(background) == 2, [thread.name for thread in threading.enumerate()]
        times = psutil.Process().threads()
        return sum(t.user_time + t.system_time for t in times if t.id in background)


@contextlib.contextmanager
def _terminal():
    """Replaces stdout with a terminal of 100 columns whose output is read and dropped."""
    reader, writer = pty.openpty()

    def drain() -> None:
        with contextlib.suppress(OSError):
            while os.read(reader, 65536):
                pass

    threading.Thread(target=drain, daemon=True).start()
    os.environ["COLUMNS"] = "100"
    with os.fdopen(writer, "w") as terminal, contextlib.redirect_stdout(terminal):
        yield


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 40)
