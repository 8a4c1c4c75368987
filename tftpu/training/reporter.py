"""Output of a run for its users: lines, curves, samples, notes, and the account of its time."""

import contextlib
import dataclasses
import io
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

import keras

from tftpu.engines.engine import Executor
from tftpu.observe import samples, telemetry, writers
from tftpu.observe.background import CLOSING, Background, Worker
from tftpu.observe.console import Console, Progress
from tftpu.runtime import goodput
from tftpu.runtime.goodput import Account, Facts
from tftpu.storage import files, locks
from tftpu.tpu.hardware import Hardware

logger = logging.getLogger(__name__)

HOST_EVERY = 10.0  # seconds between two points of goodput and telemetry, at least
# Seconds that a checkpoint waits for the lines before it; a run that resumes from it lacks none.
PATIENCE = 10.0

HyperParameter = bool | int | float | str


@dataclasses.dataclass(frozen=True)
class RunOutput:
    """Destinations and fixed facts of a run's output.

    Attributes:
        model_name: name of the model.
        summary: the model's layers, as text.
        executor: for the learning rate and for predictions.
        account: of the run's time.
        hardware: the chips.
        model_flops: returns the model FLOPs of a global batch.
        global_batch_size: examples per step.
        replicas: number of devices that share a global batch.
        hyperparameters: the settings of the run, by name.
        workdir: written to; None: nothing is.
        writers: further destinations.
        samples: returns a text that shows what the model can do; None: nothing is shown.
        images: whether predictions of images are shown, which needs a single host.
        verbose: whether the console shows the run.
        live: whether a terminal shows it as a live line.
        chief: whether this process speaks for all.
    """

    model_name: str
    summary: Callable[[], str]
    executor: Executor
    account: Account
    hardware: Hardware
    model_flops: Callable[[], int]
    global_batch_size: int
    replicas: int
    hyperparameters: dict[str, HyperParameter]
    workdir: str | None
    writers: tuple[writers.Writer, ...]
    samples: Callable[[], str] | None
    images: bool
    verbose: bool
    live: bool
    chief: bool


class Reporter:
    """The reporter of one call of `fit`.

    Args:
        output: destinations and fixed facts.
        steps: total length of the run.
        start: the step that it begins at.
    """

    def __init__(self, output: RunOutput, steps: int, start: int):
        self._output = output
        self._account = output.account
        self._steps = steps
        self._start = start
        chips = output.hardware.chips if output.hardware.is_tpu else None
        self._console = Console(steps, start, chips, live=output.live) if output.verbose else None
        self._lines = self._build_line_files()
        sinks = self._build_sinks()
        self._writers = writers.Writers(sinks)
        self._seen = bool(sinks)
        self._facts = Facts(
            step=start,
            steps=steps,
            global_batch_size=output.global_batch_size,
            chips=output.hardware.chips,
        )
        self._state = goodput.RUNNING
        self._accounting = Worker("goodput", 1)  # one that waits writes the newest facts
        on_tpu = output.hardware.is_tpu
        self._telemetry = telemetry.Telemetry(output.workdir, self._write_account, tpu=on_tpu)
        self._pace: tuple[float, int] | None = None  # time and step after the first device loop
        self._seconds = self._account.clock.seconds()  # by part, at the last point of goodput
        self._host_at = -HOST_EVERY  # when goodput and telemetry were last written
        self._noted: set[str] = set()
        self._sampled: tuple[Any, ...] | None = None  # features and labels that samples show

    @property
    def global_batch_size(self) -> int:
        """Examples a step."""
        return self._output.global_batch_size

    def begin(self) -> None:
        """Writes the facts known before the first step."""
        if self._console:
            self._console.start()
        self._update_facts(self._start)
        self._write_account()
        self._writers.begin(self._build_config())
        self._writers.write_text(self._start, "model", f"```\n{self._output.summary()}\n```")
        if self._seen:
            self._telemetry.start()

    def say(self, text: str, always: bool = False) -> None:
        """Writes a message to all destinations that accept text.

        Args:
            text: the message.
            always: whether it is logged where no console shows the run.
        """
        self._writers.say(text)
        if always and self._console is None and self._output.chief:
            logger.warning(text)

    @contextlib.contextmanager
    def doing(self, phase: str, part: str) -> Iterator[None]:
        """Assigns the block's time to a part of the account, and shows the current activity."""
        if self._console:
            self._console.phase(phase)
        with self._account.clock.spend(part):
            yield

    def advance(self, step: int, loss: float) -> None:
        """Updates the live line after a device loop."""
        self._update_facts(step)
        if self._console:
            facts = self._facts
            rate = facts.examples_per_sec
            self._console.advance(
                Progress(step, loss, rate, facts.mfu, facts.eta_seconds, facts.usd)
            )

    def log(self, step: int, scalars: dict[str, float]) -> None:
        """Writes the means since the last line, where the time went, and the machine's state.

        Raises:
            LockLostError: the workdir was deleted, or another run uses it.
        """
        if self._output.workdir is not None:
            with contextlib.suppress(OSError):  # a bucket that is away for a while
                locks.check_lock(self._output.workdir)
        self._writers.write(step, "train", scalars)
        now = time.monotonic()
        if now - self._host_at < HOST_EVERY and step < self._steps:
            return
        self._host_at = now
        seconds = self._account.clock.seconds()
        since = {part: s - self._seconds[part] for part, s in seconds.items()}
        self._seconds = seconds
        total = self._account.seconds()
        host = {f"goodput/{part}": goodput.share(total, part) for part in total}
        facts = {"mfu": self._facts.mfu, "usd": self._facts.usd}
        host |= {f"goodput/{name}": value for name, value in facts.items() if value is not None}
        sample = self._telemetry.latest
        host |= {f"machine/{name}": value for name, value in sample.items()}
        self._writers.write(step, writers.HOST, host)
        for about, sentence in telemetry.alerts(sample, since).items():
            if about not in self._noted:  # once a run
                self._noted.add(about)
                self.say(f"Note at step {step}: {sentence}")

    def evaluated(self, step: int, results: dict[str, float], dataset: Any) -> None:
        """Writes the results of an evaluation, and samples of its data set."""
        self._writers.write(step, "eval", results)
        if not self._output.images:
            return
        self._show_images(step, dataset)
        text = self._output.samples() if self._output.samples else None
        if text:
            self._writers.write_text(step, "sample", f"```\n{text}\n```")

    def flush(self) -> None:
        """Waits until the lines so far are written durably; in the thread that saves."""
        for lines in self._lines:
            lines.flush(durable=True)
        for lines in self._lines:
            lines.wait(PATIENCE)

    def roll_back(self, step: int) -> None:
        """Drops the lines after a step that the run returns to."""
        self._writers.roll_back(step)

    def saved(self) -> None:
        """Writes the account after a checkpoint: a run killed now loses nothing."""
        self._write_account()

    def end(self, state: str) -> None:
        """Closes all destinations, and the account with the run's final state."""
        self._telemetry.stop()
        self._writers.close()
        self._state = state
        self._write_account()
        self._accounting.close(CLOSING)

    def _build_sinks(self) -> list[writers.Writer]:
        output = self._output
        sinks: list[writers.Writer] = [self._console] if self._console else []
        if output.workdir:
            sinks += [*self._lines, Background(writers.TensorBoard(output.workdir, self._start))]
        return [*sinks, *output.writers]

    def _build_line_files(self) -> list[Background]:
        workdir = self._output.workdir
        if workdir is None:
            return []
        metrics = writers.JsonLines(files.join(workdir, "metrics.jsonl"), self._start)
        log = writers.LogFile(files.join(workdir, "train.log"), self._steps)
        return [Background(metrics), Background(log)]

    def _write_account(self) -> None:
        self._accounting.submit(lambda: self._account.write(self._state, self._facts))

    def _update_facts(self, step: int) -> None:
        """Updates the account's facts."""
        clock, hardware, now = self._account.clock, self._output.hardware, time.monotonic()
        eta = mfu = None
        if self._pace is None and step > self._start:
            self._pace = now, step
            self._seconds = clock.seconds()  # buffers fill while the first loop compiles
        elif self._pace and step > self._pace[1]:
            each = (now - self._pace[0]) / (step - self._pace[1])
            eta = round(each * (self._steps - step), 1)
        rate = clock.current_rate()
        if rate and hardware.generation is not None:  # counting FLOPs traces the model
            each = self._output.model_flops() / self._output.global_batch_size
            mfu = hardware.mfu(each * rate)
        usd = hardware.usd(sum(self._account.seconds().values()))
        self._facts = dataclasses.replace(
            self._facts,
            step=step,
            eta_seconds=eta,
            examples_per_sec=round(rate, 1) if rate else None,
            mfu=_round_value(mfu),
            usd=_round_value(usd),
        )

    def _show_images(self, step: int, dataset: Any) -> None:
        if self._sampled is None:
            batch = next(iter(dataset.take(1)))
            x, y, _ = keras.utils.unpack_x_y_sample_weight(batch)
            cut: Any = keras.tree.map_structure(lambda t: t[: samples.COUNT].numpy(), (x, y))
            self._sampled = cut if samples.are_images(x) else ()
        if not self._sampled:
            return
        x, y = self._sampled
        outputs = self._output.executor.predict_batch(x)
        self._writers.write_images(step, "samples", samples.captioned(x, y, outputs))

    def _build_config(self) -> dict[str, HyperParameter]:
        optimizer = self._output.executor.optimizer_name
        known: dict[str, HyperParameter] = {
            "model": self._output.model_name,
            "optimizer": optimizer,
            # Rounded to the digits that were typed: the variable is float32.
            "learning_rate": float(f"{self._output.executor.learning_rate:.7g}"),
            "global_batch_size": self.global_batch_size,
            "replicas": self._output.replicas,
            "steps": self._steps,
        }
        return known | {k: _to_plain(v) for k, v in self._output.hyperparameters.items()}


def summary_of(model: keras.Model) -> str:
    """Returns Keras's summary of a model."""
    text = io.StringIO()
    model.summary(print_fn=lambda line, **_: text.write(line + "\n"))
    return text.getvalue()


def _round_value(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def _to_plain(value: Any) -> HyperParameter:
    return value if isinstance(value, bool | int | float | str) else str(value)
