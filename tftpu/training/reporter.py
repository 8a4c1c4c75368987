"""The output of a run for its users: lines, curves, samples, notes, and the account of its time."""

import contextlib
import dataclasses
import io
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras

from tftpu.engines.data.preprocessed import find_preprocess
from tftpu.engines.data.streams import Stream
from tftpu.engines.engine import TrainLoop
from tftpu.observe import samples, telemetry
from tftpu.observe.background import CLOSING, Background, Worker
from tftpu.observe.console import Console, Progress
from tftpu.observe.writers import HOST, JsonLines, LogFile, TensorBoard, Writer, Writers
from tftpu.runtime import goodput
from tftpu.runtime.goodput import Account, Facts
from tftpu.storage import files, locks
from tftpu.training.programs import Programs

logger = logging.getLogger(__name__)

HOST_EVERY = 10.0  # minimum seconds between two writes of goodput and telemetry
# Maximum seconds that a checkpoint waits until the metrics before it are written.
PATIENCE = 10.0

_LONG = 10.0  # seconds of steps after which the time left is shown, even if no evaluation was timed

HyperParameter = bool | int | float | str


@dataclasses.dataclass(frozen=True)
class Evaluations:
    """The frequency and duration of a run's evaluations, to estimate the time left.

    Attributes:
        step: the step of the last evaluation, or 0 at the start of a run; None: unknown.
        every: the largest number of steps between two evaluations so far; 0: unknown.
        spent: the seconds of all evaluations together.
        count: the number of evaluations.
        last: the seconds of the last evaluation; None: unknown, because the first one compiles.
    """

    step: int | None
    every: int = 0
    spent: float = 0.0
    count: int = 0
    last: float | None = None

    def follow(self, step: int, spent: float) -> "Evaluations":
        """Returns the record after an evaluation at `step`; `spent`: seconds of all evaluations."""
        every = self.every if self.step is None else max(self.every, step - self.step)
        last = spent - self.spent if self.count else None
        return Evaluations(step, every, spent, self.count + 1, last)

    def estimate_seconds_left(self, steps: int) -> float:
        """Returns the seconds of the evaluations up to the end of a run; 0 if they are unknown."""
        if self.step is None or self.last is None:
            return 0.0
        return math.ceil((steps - self.step) / self.every) * self.last


class Reporter:
    """Writer of the output of one call of `fit` to the console, to files and to other writers.

    Args:
        programs: the programs of the model.
        account: the account of the run's time.
        loop: the train loop, which knows the model FLOPs of a step.
        global_batch_size: the number of examples per step.
        steps: the total length of the run; None: unknown.
        start: the step at which the call begins.
        evaluates: whether the run evaluates.
        workdir: the folder to write to; None: no files are written.
        writers: further destinations.
        hyperparameters: the settings of the run, by name.
        sample: a function that returns a text that shows what the model can do, called on one host
            with a workdir; None: nothing is shown.
        verbose: as in Keras: 0 shows nothing on the console, 2 shows no live line.

    Attributes:
        global_batch_size: the number of examples per step.
    """

    def __init__(
        self,
        programs: Programs,
        account: Account,
        loop: TrainLoop,
        global_batch_size: int,
        steps: int | None,
        start: int,
        *,
        evaluates: bool,
        workdir: str | None,
        writers: Sequence[Writer],
        hyperparameters: Mapping[str, HyperParameter],
        sample: Callable[[], str] | None,
        verbose: int,
    ):
        self._model = programs.model
        self._executor = programs.executor
        self._engine = programs.engine
        self._account = account
        self._loop = loop
        self.global_batch_size = global_batch_size
        self._steps = steps
        self._start = start
        self._workdir = workdir
        self._hyperparameters = hyperparameters
        self._sample = sample
        # Not on several hosts, which would all have to take part.
        self._shows_samples = self._engine.hosts.count == 1 and workdir is not None
        # Not with a loss function, whose batch and outputs may be anything.
        self._shows_images = self._shows_samples and not programs.objectives
        hardware = self._engine.hardware
        self._console: Console | None = None
        if verbose and self._engine.hosts.chief:
            chips = hardware.chips if hardware.is_tpu else None
            self._console = Console(steps, start, chips, live=verbose != 2)
        self._lines = self._build_line_files()
        sinks = [*self._build_sinks(), *writers]
        self._writers = Writers(sinks)
        self._seen = bool(sinks)
        self._writes = workdir is not None or bool(writers)
        self._facts = Facts(
            step=start,
            steps=steps and max(steps, start),  # a resumed run may already have more steps
            global_batch_size=global_batch_size,
            chips=hardware.chips,
        )
        self._state = goodput.RUNNING
        # One waiting task is enough, because a task writes the newest facts when it runs.
        self._accounting = Worker("goodput", 1)
        self._telemetry = telemetry.Telemetry(workdir, self.write_account, tpu=hardware.is_tpu)
        # Seconds and step after the first device loop, from which the pace is measured.
        self._pace: tuple[float, int] | None = None
        self._evaluates = evaluates
        spent = account.clock.sum_seconds()["evaluation"]  # in earlier calls of `fit`
        self._evaluations = Evaluations(0 if start == 0 else None, spent=spent)
        # Seconds of each part of the account when goodput was last written.
        self._seconds = self._account.clock.sum_seconds()
        self._host_at = -HOST_EVERY  # the time when goodput and telemetry were last written
        self._noted: set[str] = set()
        self._sampled: tuple[Any, ...] | None = None  # the features and labels that samples show

    def begin(self) -> None:
        """Opens the console and the writers, and writes the facts known before the first step."""
        if self._console:
            self._console.start()
        self._update_facts(self._start)
        self.write_account()
        self._writers.begin(self._build_config())
        if self._writes:
            summary = _summarize_model(self._model)
            if summary:
                self._writers.write_text(self._start, "model", f"```\n{summary}\n```")
        if self._seen:
            self._telemetry.start()

    def write_message(self, text: str, always: bool = False) -> None:
        """Writes a message to all destinations that accept text.

        Args:
            text: the message.
            always: whether it is logged if no console shows the run.
        """
        self._writers.say(text)
        if always and self._console is None and self._engine.hosts.chief:
            logger.warning(text)

    @contextlib.contextmanager
    def doing(self, phase: str, part: str) -> Iterator[None]:
        """Counts the `with` block's time under `part` of the account; shows `phase` meanwhile."""
        if self._console:
            self._console.show_phase(phase)
        with self._account.clock.spend(part):
            yield

    def show_compiling(self) -> contextlib.AbstractContextManager[None]:
        """Shows on the console that the `with` block compiles the train step."""
        return self._console.show_compiling() if self._console else contextlib.nullcontext()

    def advance(self, step: int, loss: float) -> None:
        """Updates the live line after a device loop."""
        self._update_facts(step)
        if self._console:
            facts = self._facts
            rate = facts.examples_per_sec
            self._console.update_progress(
                Progress(step, loss, rate, facts.mfu, facts.eta_seconds, facts.usd)
            )

    def log(self, step: int, scalars: dict[str, float]) -> None:
        """Writes metrics; at intervals also goodput, telemetry, and notes about problems in them.

        Raises:
            LockLostError: the workdir was deleted, or another run uses it.
        """
        if self._workdir is not None:
            with contextlib.suppress(OSError):  # the bucket may be unreachable for a while
                locks.check_lock(self._workdir)
        self._writers.write(step, "train", scalars)
        now = time.monotonic()
        if now - self._host_at < HOST_EVERY and step != self._steps:
            return
        self._host_at = now
        seconds = self._account.clock.sum_seconds()
        since = {part: s - self._seconds[part] for part, s in seconds.items()}
        self._seconds = seconds
        if self._evaluations.last is None:  # the first evaluation also compiles
            since["evaluation"] = 0.0
        total = self._account.sum_seconds()
        host = {f"goodput/{part}": goodput.compute_share(total, part) for part in total}
        facts = {"mfu": self._facts.mfu, "usd": self._facts.usd}
        host |= {f"goodput/{name}": value for name, value in facts.items() if value is not None}
        sample = self._telemetry.latest
        host |= {f"machine/{name}": value for name, value in sample.items()}
        self._writers.write(step, HOST, host)
        preprocessed = find_preprocess(self._model) is not None
        for about, sentence in telemetry.find_alerts(sample, since, preprocessed).items():
            if about not in self._noted:  # noted once in a run
                self._noted.add(about)
                self.write_message(f"Note at step {step}: {sentence}")

    def log_evaluation(self, step: int, results: dict[str, float], dataset: Any) -> None:
        """Writes the results of an evaluation, and samples of its data set."""
        self._writers.write(step, "eval", results)
        if self._shows_images:
            self._show_images(step, dataset)
        if self._shows_samples and self._sample:
            text = self._sample()
            if text:
                self._writers.write_text(step, "sample", f"```\n{text}\n```")
        spent = self._account.clock.sum_seconds()["evaluation"]
        self._evaluations = self._evaluations.follow(step, spent)

    def flush(self) -> None:
        """Waits until the lines so far are durable, up to `PATIENCE` seconds for each file."""
        for lines in self._lines:
            lines.flush(durable=True)
        for lines in self._lines:
            lines.wait(PATIENCE)

    def roll_back(self, step: int) -> None:
        """Drops the lines after the step to which the run returns."""
        self._writers.roll_back(step)

    def end(self, state: str) -> None:
        """Closes all destinations, and the account with the final state of the run."""
        self._telemetry.stop()
        self._writers.close()
        self._state = state
        self.write_account()
        self._accounting.close(CLOSING)

    def _build_sinks(self) -> list[Writer]:
        sinks: list[Writer] = [self._console] if self._console else []
        if self._workdir:
            sinks += [*self._lines, Background(TensorBoard(self._workdir, self._start))]
        return sinks

    def _build_line_files(self) -> list[Background]:
        if self._workdir is None:
            return []
        metrics = JsonLines(files.join(self._workdir, "metrics.jsonl"), self._start)
        log = LogFile(files.join(self._workdir, "train.log"), self._steps)
        return [Background(metrics), Background(log)]

    def write_account(self) -> None:
        """Writes the account with the run's state and facts, in a background thread."""
        self._accounting.submit(lambda: self._account.write(self._state, self._facts))

    def _update_facts(self, step: int) -> None:
        """Updates the facts of the account: step, speed, time left, MFU and cost."""
        clock, hardware = self._account.clock, self._engine.hardware
        now = self._measure_pace_seconds()
        eta = mfu = None
        if self._pace is None and step > self._start:
            self._pace = now, step
            # Leaves out the first loop, during which buffers fill.
            self._seconds = clock.sum_seconds()
        elif self._pace and step > self._pace[1]:
            each = (now - self._pace[0]) / (step - self._pace[1])
            # In a short run, evaluations may take longer than steps: their time must be known.
            known = self._evaluations.last is not None or now - self._pace[0] > _LONG
            known = known or not self._evaluates
            if self._steps is not None and known:
                left = self._steps - step
                evaluating = self._evaluations.estimate_seconds_left(self._steps) if left else 0.0
                eta = round(each * left + evaluating, 1)
        rate = clock.compute_current_rate()
        # Counting FLOPs traces the model, so only if the MFU can be computed from them.
        if rate and hardware.generation is not None:
            flops = self._loop.model_flops
            mfu = flops and hardware.compute_mfu(flops / self.global_batch_size * rate)
        usd = hardware.compute_price(sum(self._account.sum_seconds().values()))
        self._facts = dataclasses.replace(
            self._facts,
            step=step,
            eta_seconds=eta,
            examples_per_sec=round(rate, 1) if rate else None,
            mfu=_round_value(mfu),
            usd=_round_value(usd),
        )

    def _measure_pace_seconds(self) -> float:
        """Returns a clock's time in seconds, without the time of compilations and evaluations."""
        seconds = self._account.clock.sum_seconds()
        return time.monotonic() - seconds["compiling"] - seconds["evaluation"]

    def _show_images(self, step: int, dataset: Any) -> None:
        if isinstance(dataset, Stream):  # a stream's batch may be readable only once
            return
        if self._sampled is None:
            batch = next(iter(dataset.take(1)))
            x, y, _ = keras.utils.unpack_x_y_sample_weight(batch)
            cut: Any = keras.tree.map_structure(lambda t: t[: samples.COUNT].numpy(), (x, y))
            self._sampled = cut if samples.is_image_batch(x) else ()
        if not self._sampled:
            return
        x, y = self._sampled
        outputs = self._executor.predict_batch(x)
        self._writers.write_images(step, "samples", samples.draw_captions(x, y, outputs))

    def _build_config(self) -> dict[str, HyperParameter]:
        known: dict[str, HyperParameter] = {
            "model": self._model.name,
            "optimizer": self._executor.optimizer_name,
            # float32 has more digits than the user typed, so they are rounded away.
            "learning_rate": float(f"{self._executor.learning_rate:.7g}"),
            "global_batch_size": self.global_batch_size,
            "replicas": self._engine.data_shards,
        }
        known |= {} if self._steps is None else {"steps": self._steps}
        return known | {k: _to_plain(v) for k, v in self._hyperparameters.items()}


def _summarize_model(model: keras.Model) -> str:
    """Returns Keras's summary of a model; "" if Keras cannot make one."""
    text = io.StringIO()
    try:
        model.summary(print_fn=lambda line, **_: text.write(line + "\n"))
    except Exception:  # a model may have its own `summary`, or none
        logger.info("The model has no summary.", exc_info=True)
    return text.getvalue()


def _round_value(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def _to_plain(value: Any) -> HyperParameter:
    return value if isinstance(value, bool | int | float | str) else str(value)
