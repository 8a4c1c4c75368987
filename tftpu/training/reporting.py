"""What people get to see of a run: lines, curves, samples, alerts, and the account of its time."""

import contextlib
import io
import time
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from tftpu.observe import samples, telemetry, writers
from tftpu.observe.console import Console, Progress
from tftpu.runtime import goodput
from tftpu.storage import files
from tftpu.tpu import hardware

if TYPE_CHECKING:
    from tftpu.training.trainer import Trainer

HOST_EVERY = 10.0  # seconds between two points of goodput and telemetry, at least


class Report:
    """Tells the sinks of one `fit` how it goes.

    Args:
        trainer: whose books are told.
        steps: of the whole run.
        start: the step that it begins at.
    """

    def __init__(self, trainer: "Trainer", steps: int, start: int):
        self._trainer = trainer
        self._steps = steps
        self._start = start
        self._hardware = hardware.of(trainer.strategy)
        self._console = self._make_console() if trainer.verbose else None
        sinks: list[writers.Writer] = [self._console] if self._console else []
        workdir = trainer.workdir if trainer.writes else None
        if workdir:
            sinks += [
                writers.JsonLines(files.join(workdir, "metrics.jsonl"), start),
                writers.LogFile(files.join(workdir, "train.log"), steps),
                writers.TensorBoard(workdir, start),
            ]
        sinks += [
            w if isinstance(w, writers.Writer) else writers.BY_NAME[w](workdir)
            for w in trainer.writers
            if trainer.hosts.chief
        ]
        self._writers = writers.Writers(sinks)
        self._seen = bool(sinks)
        self._telemetry = telemetry.Telemetry(
            workdir, self._beat, tpu=isinstance(trainer.strategy, tf.distribute.TPUStrategy)
        )
        self._facts = goodput.Facts()
        self._pace: tuple[float, int] | None = None  # time and step after the first device loop
        self._seconds = trainer.clock.seconds()  # of each part at the last point of goodput
        self._host_at = -HOST_EVERY  # when goodput and telemetry were last written
        self._alerted: set[str] = set()
        self._sampled: tuple | None = None  # features and labels that samples are shown of

    def _make_console(self) -> Console:
        on_tpu = isinstance(self._trainer.strategy, tf.distribute.TPUStrategy)
        return Console(self._steps, self._start, self._hardware.chips if on_tpu else None)

    def begin(self) -> None:
        """Writes what is known before the first step."""
        if self._console:
            self._console.start()
        self._facts = self._facts_at(self._start)
        self._trainer.account.write(goodput.RUNNING, self._facts)
        self._writers.begin(self._config())
        text = io.StringIO()
        self._trainer.model.summary(print_fn=lambda line, **_: text.write(line + "\n"))
        self._writers.write_text(self._start, "model", f"```\n{text.getvalue()}\n```")
        if self._seen:
            self._telemetry.start()

    def say(self, text: str) -> None:
        """A sentence to everyone who can hold it."""
        self._writers.say(text)

    @contextlib.contextmanager
    def doing(self, phase: str, part: str):
        """Books the block to a part of the time, and shows what is being done."""
        if self._console:
            self._console.phase(phase)
        with self._trainer.clock.spend(part):
            yield

    def advance(self, step: int, loss: float) -> None:
        """After every device loop."""
        self._facts = self._facts_at(step)
        if self._console:
            facts = self._facts
            rate = facts.examples_per_sec
            self._console.advance(
                Progress(
                    step,
                    loss,
                    rate,
                    facts.mfu,
                    facts.eta_seconds,
                    facts.usd,
                )
            )

    def log(self, step: int, scalars: dict[str, float]) -> None:
        """The means since the last line, where the time went, and how the machine does."""
        self._writers.write(step, "train", scalars)
        now = time.monotonic()
        if now - self._host_at < HOST_EVERY and step < self._steps:
            return
        self._host_at = now
        seconds = self._trainer.clock.seconds()
        since = {part: s - self._seconds[part] for part, s in seconds.items()}
        self._seconds = seconds
        total = self._trainer.account.seconds()
        host = {f"goodput/{part}": goodput.share(total, part) for part in total}
        price = {"mfu": self._facts.mfu, "usd": self._facts.usd}
        host |= {f"goodput/{name}": value for name, value in price.items() if value is not None}
        sample = self._telemetry.latest
        host |= {f"machine/{name}": value for name, value in sample.items()}
        self._writers.write(step, writers.HOST, host)
        for about, sentence in telemetry.alerts(sample, since).items():
            if about not in self._alerted:  # once a run
                self._alerted.add(about)
                self.say(f"Note at step {step}: {sentence}")

    def evaluated(self, step: int, results: dict[str, float], data: tf.data.Dataset) -> None:
        """The results of an evaluation, and samples of it."""
        self._writers.write(step, "eval", results)
        if self._trainer.hosts.count > 1:  # samples are predicted by one host
            return
        if self._trainer.workdir or self._trainer.writers:
            self._show_images(step, data)
            text = self._trainer.sample(self._trainer) if self._trainer.sample else None
            if text:
                self._writers.write_text(step, "sample", f"```\n{text}\n```")

    def saved(self) -> None:
        """After a checkpoint: a run that is killed now has lost nothing."""
        self._trainer.account.write(goodput.RUNNING, self._facts)

    def end(self, state: str) -> None:
        """Closes everything, and the account with how the run stands."""
        self._telemetry.stop()
        self._writers.close()
        self._trainer.account.write(state, self._facts)

    def _beat(self) -> None:
        self._trainer.account.write(goodput.RUNNING, self._facts)

    def _facts_at(self, step: int) -> goodput.Facts:
        """Returns the progress of the run at a step."""
        trainer, now = self._trainer, time.monotonic()
        facts: dict[str, Any] = {
            "step": step,
            "steps": self._steps,
            "global_batch_size": trainer.global_batch_size,
            "chips": self._hardware.chips,
        }
        if self._pace is None and step > self._start:
            self._pace = now, step
            self._seconds = trainer.clock.seconds()  # buffers fill while the first loop compiles
        elif self._pace and step > self._pace[1]:
            each = (now - self._pace[0]) / (step - self._pace[1])
            facts["eta_seconds"] = round(each * (self._steps - step), 1)
        rate = trainer.clock.current_rate()
        if rate:
            facts["examples_per_sec"] = round(rate, 1)
            if self._hardware.generation is not None:
                each = trainer.step.model_flops / trainer.global_batch_size
                facts["mfu"] = round(self._hardware.mfu(each * rate), 4)
        usd = self._hardware.usd(sum(trainer.account.seconds().values()))
        if usd is not None:
            facts["usd"] = round(usd, 4)
        return goodput.Facts(**facts)

    def _show_images(self, step: int, data: tf.data.Dataset) -> None:
        if self._sampled is None:
            batch = next(iter(data.take(1)))
            x, y, _ = keras.utils.unpack_x_y_sample_weight(batch)
            first = keras.tree.map_structure(lambda t: t[: samples.COUNT].numpy(), (x, y))
            self._sampled = first if samples.are_images(x) else ()
        if not self._sampled:
            return
        x, y = self._sampled
        outputs = self._trainer.predict(tf.data.Dataset.from_tensors(x))
        self._writers.write_images(step, "samples", samples.captioned(x, y, outputs))

    def _config(self) -> dict[str, Any]:
        trainer = self._trainer
        optimizer = trainer.step.optimizer
        known = {
            "model": trainer.model.name,
            "optimizer": type(optimizer).__name__,
            "learning_rate": _rate(optimizer),
            "global_batch_size": trainer.global_batch_size,
            "replicas": trainer.strategy.num_replicas_in_sync,
            "steps": self._steps,
        }
        return known | {k: _plain(v) for k, v in trainer.config.items()}


def _rate(optimizer: keras.optimizers.Optimizer) -> float:
    """The learning rate now, in the digits that were typed: it is kept in float32."""
    return float(f"{float(keras.ops.convert_to_numpy(optimizer.learning_rate)):.7g}")


def _plain(value: Any) -> Any:
    return value if isinstance(value, bool | int | float | str) else str(value)
