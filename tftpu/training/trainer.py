"""`Trainer`: fit, evaluate and predict a compiled Keras model on any strategy."""

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tftpu.checkpoint.store import Checkpoints, Restored
from tftpu.config import Train
from tftpu.engines.tensorflow import checks, feed
from tftpu.engines.tensorflow.hosts import Hosts
from tftpu.engines.tensorflow.leaves import leaves_of
from tftpu.engines.tensorflow.step import Step
from tftpu.engines.tensorflow.tracer import TensorFlowTracer
from tftpu.errors import HostLost, Preempted, UserError
from tftpu.inference import export
from tftpu.observe.profiler import Profiler
from tftpu.observe.writers import Writer
from tftpu.runtime import goodput
from tftpu.runtime.preemption import PreemptionNotice
from tftpu.runtime.watchdog import Watchdog
from tftpu.storage import files
from tftpu.training.session import Run

# What the collectives of the hosts that are left fail with.
_HOST_ERRORS = (
    tf.errors.AbortedError,
    tf.errors.CancelledError,
    tf.errors.DeadlineExceededError,
    tf.errors.InternalError,
    tf.errors.UnavailableError,
)


class Trainer:
    """Trains a compiled Keras model: its loss, metrics and optimizer as they are.

    The model has to be built in the scope of the strategy that it is to be trained with. With a
    workdir, a run that was stopped goes on from its last checkpoint.

    Args:
        model: compiled. What cannot be honoured is refused with a sentence.
        workdir: for checkpoints, metrics.jsonl and TensorBoard events, local or `gs://`; None:
            nothing is written.
        gradient_accumulation_steps: microbatches that each replica's share of a batch is cut into.
        global_clipnorm: the largest global norm of the gradient, after its sum over replicas.
        ema_momentum: decay of the average of the weights, which evaluation then uses.
        steps_per_loop: device steps between two visits to the host.
        log_every: in steps.
        checkpoint_every: in steps; 0: at the end only.
        checkpoint_minutes: a checkpoint is also due so many minutes after the last; 0: not.
        keep: newest checkpoints kept, besides the best.
        keep_every: checkpoints of its multiples are kept as well; 0: none.
        grace_seconds: seconds from a SIGTERM to the end of the process.
        watchdog: ends the process, with 124 and the stacks of its threads, when no step was
            finished for so many seconds; more than an evaluation takes. None: never.
        best_metric: of the evaluation; "" is the loss. Losses and errors are best when small.
        seed: of dropout and of every other layer that draws random numbers.
        profile: "100:110" writes a TensorBoard profile of those steps, "slow" one of the steps
            after each of the slowest 1 % of device loops, "100:110,slow" both.
        on_nan: "stop" ends the run at a loss that is not finite; "rollback" goes back to the last
            checkpoint and skips the batches since, at most `max_rollbacks` times.
        verbose: a live line on a terminal, lines elsewhere.
        writers: more sinks besides those of the workdir: "mlflow", "wandb", or a
            `tftpu.observe.writers.Writer` of your own.
        config: what the run was set to, for the sinks: numbers, booleans and strings by name.
        sample: gives a text that shows what the model can do, at every evaluation.

    Raises:
        UserError: the model cannot be trained as it is.
    """

    def __init__(
        self,
        model: keras.Model,
        workdir: str | None = None,
        *,
        gradient_accumulation_steps: int = 1,
        global_clipnorm: float | None = None,
        ema_momentum: float | None = None,
        steps_per_loop: int = 50,
        log_every: int = 50,
        checkpoint_every: int = 0,
        checkpoint_minutes: float = 0.0,
        keep: int = 3,
        keep_every: int = 0,
        grace_seconds: float = 25.0,
        watchdog: float | None = None,
        best_metric: str = "",
        seed: int = 0,
        profile: str = "",
        on_nan: str = "stop",
        max_rollbacks: int = 3,
        verbose: bool = True,
        writers: Sequence[str | Writer] = (),
        config: dict[str, Any] | None = None,
        sample: Callable[["Trainer"], str] | None = None,
    ):
        checks.refuse_model(model)
        Train(
            steps_per_loop=steps_per_loop,
            log_every=log_every,
            checkpoint_every=checkpoint_every,
            checkpoint_minutes=checkpoint_minutes,
            keep=keep,
            keep_every=keep_every,
            grace_seconds=grace_seconds,
            gradient_accumulation_steps=gradient_accumulation_steps,
            global_clipnorm=global_clipnorm,
            ema_momentum=ema_momentum,
            on_nan=on_nan,
            max_rollbacks=max_rollbacks,
            profile=profile,
            writers=tuple(w for w in writers if isinstance(w, str)),
        ).validate()
        if watchdog is not None and not watchdog > 0:
            raise UserError(f"watchdog is {watchdog}: it must be above 0, or None.")
        if writers and workdir is None:
            raise UserError("writers need a workdir: it says which run theirs belongs to.")
        self.model = model
        self.workdir = str(workdir) if workdir is not None else None
        self.strategy = model.distribute_strategy
        self.hosts = Hosts(self.strategy)
        self.writes = self.workdir is not None and self.hosts.chief
        self._step_options = {
            "gradient_accumulation_steps": gradient_accumulation_steps,
            "global_clipnorm": global_clipnorm,
            "ema_momentum": ema_momentum,
            "seed": seed,
        }
        self.seed = seed
        self.steps_per_loop = steps_per_loop
        self.log_every = log_every
        self.checkpoint_every = checkpoint_every
        self.checkpoint_minutes = checkpoint_minutes
        self.grace_seconds = grace_seconds
        self.watchdog = Watchdog(watchdog)
        self.best_metric = best_metric or "loss"
        self.on_nan = on_nan
        self.max_rollbacks = max_rollbacks
        self.verbose = verbose and self.hosts.chief
        self.writers = tuple(writers)
        self.config = dict(config or {})
        self.sample = sample
        self.checkpoints = Checkpoints(self.workdir, keep, keep_every) if self.workdir else None
        self.profiler = Profiler(self.workdir if self.writes else None, profile, TensorFlowTracer())
        self.clock = goodput.Clock()
        self.account: goodput.Account | None = None
        self.step: Step | None = None
        self._train_loop = self._eval_loop = self._predict = None
        self._predict_same = self._weight_norm = None

    def fit(
        self,
        dataset: Any,
        steps: int,
        validation_data: tf.data.Dataset | None = None,
        eval_every: int | None = None,
        callbacks: Sequence[keras.callbacks.Callback] = (),
        class_weight: dict[int, float] | None = None,
    ) -> keras.callbacks.History:
        """Trains up to a step, evaluating and saving on the way.

        Args:
            dataset: batches of the global batch, `(x, y)` or `(x, y, sample_weight)`. A finite
                one is repeated; one whose order is deterministic is taken up where a stopped run
                left it.
            steps: of the whole run; what a checkpoint or an earlier call has done counts.
            validation_data: finite; every example counts once.
            eval_every: in steps; None: at the end only. It is what Keras calls an epoch.
            callbacks: Keras's own or yours. Batch methods are called once a device loop.
            class_weight: weight of each label, as in Keras's `fit`.

        Returns:
            The history of the run, one entry an epoch; that of a resumed run is whole.

        Raises:
            UserError: the data or the model cannot be used, or the loss is not finite any more.
            Preempted: the run was asked to stop, after a checkpoint was saved.
        """
        if steps < 1 or steps != int(steps):
            raise UserError(f"steps is {steps}: it must be a whole number, 1 or more.")
        if eval_every is not None and eval_every < 1:
            raise UserError(f"eval_every is {eval_every}: it must be 1 or more, or None.")
        if validation_data is not None:
            feed.finite(validation_data)  # a mistake is found before the first epoch is trained
        with files.claim(self.workdir) if self.writes else contextlib.nullcontext():
            self.clock.turn_to("starting")
            self.account = self.account or goodput.Account(
                self.workdir if self.writes else None, self.clock
            )
            self._prepare(feed.for_training(dataset, 0, class_weight))
            run = Run(self, int(steps), validation_data, eval_every, callbacks)
            self._fit(run, dataset, class_weight)
            return run.history

    def evaluate(self, dataset: tf.data.Dataset) -> dict[str, float]:
        """The loss and the metrics over a whole data set, every example once.

        Args:
            dataset: finite, batched, `(x, y)` or `(x, y, sample_weight)`.

        Returns:
            Means over all examples, by name.
        """
        batches = feed.for_evaluation(dataset, self.strategy.num_replicas_in_sync)
        if self.step is None:
            self._build_step(feed.features_spec(batches), training=False)
        compiled = self._eval_loop is not None
        if not compiled:
            self._eval_loop = self._make_loop(lambda pair: self.step.evaluate(*pair))
        self.step.eval_totals.drain()
        with contextlib.nullcontext() if compiled else self.watchdog.paused():
            self._run_through(batches, self._eval_loop)
        return self.step.eval_totals.read(self.step.eval_totals.drain())

    def predict(self, dataset: tf.data.Dataset) -> Any:
        """The model's outputs for a whole data set, in its order.

        Args:
            dataset: finite, batched; labels and weights are left aside.

        Returns:
            NumPy arrays of shape (examples, ...), nested as the model's output.
        """
        if self.hosts.count > 1:
            raise UserError("predict works on one host: restore the checkpoint there.")
        batches = feed.for_evaluation(dataset, self.strategy.num_replicas_in_sync)
        if self.step is None:
            self._build_step(feed.features_spec(batches), training=False)

        if self._predict is None:

            @tf.function(autograph=False)
            def predict(batch, valid):
                x, _, _ = keras.utils.unpack_x_y_sample_weight(batch)
                return self.strategy.run(lambda x: (self.step.predict(x), valid), args=(x,))

            self._predict = predict
        collected = []
        for batch, valid in feed.distribute(batches, self.strategy):
            outputs = self._predict(batch, valid)
            collected.append(keras.tree.map_structure(lambda t: self._gather(t).numpy(), outputs))
        outputs, valid = keras.tree.map_structure(lambda *parts: np.concatenate(parts), *collected)
        return keras.tree.map_structure(lambda t: t[valid > 0], outputs)

    def predict_same(self, x: Any) -> np.ndarray:
        """The model's output for one batch that every replica is given whole.

        For batches too small to be shared, as the one text that a language model goes on with.

        Args:
            x: the features, of one shape from call to call.
        """
        if self._predict_same is None:
            self._predict_same = tf.function(
                lambda x: self.strategy.run(self.step.predict, args=(x,)), autograph=False
            )
        outputs = self._predict_same(tf.convert_to_tensor(x))
        return self.strategy.experimental_local_results(outputs)[0].numpy()

    def weight_norm(self) -> float:
        """The global norm of the trainable weights."""
        if self._weight_norm is None:
            self._weight_norm = tf.function(
                lambda: self.strategy.run(self.step.weight_norm), autograph=False
            )
        # The same on every replica.
        return float(self.strategy.experimental_local_results(self._weight_norm())[0])

    def restore(self, step: int | None = None) -> Restored | None:
        """Loads a checkpoint of the workdir, the newest if no step is named; None if none.

        Several hosts take the one that the chief found whole.
        """
        if self.checkpoints is None or self.step is None:
            return None
        found = None
        if self.hosts.chief:
            found = self.checkpoints.restore(leaves_of(self.step.variables), step)
        step = self.hosts.from_chief(found.step if found else None)
        if step is None or found is not None:
            return found
        if not files.exists(self.checkpoints.folder):
            raise UserError(
                f"The chief goes on from step {step}, and this host has no checkpoints in "
                f"{self.workdir!r}: all hosts have to see the same workdir, as gs://BUCKET/RUN."
            )
        return self.checkpoints.restore(leaves_of(self.step.variables), step)

    def restore_for_evaluation(self, dataset: tf.data.Dataset) -> Restored | None:
        """Loads the best checkpoint, or the newest if none is marked best; None if none.

        Args:
            dataset: as for `evaluate`; a model that is not built yet is built for it.
        """
        batches = feed.for_evaluation(dataset, self.strategy.num_replicas_in_sync)
        if self.step is None:
            self._build_step(feed.features_spec(batches), training=False)
        return self.restore(self.checkpoints.best()) if self.checkpoints else None

    def export_weights(self, path: str) -> None:
        """Writes the weights alone: those that evaluation uses, so the averages where there are.

        Args:
            path: local or `gs://`; ends in `.weights.h5` (Keras reads it) or `.safetensors` (by
                the paths of the variables).

        Raises:
            UserError: another ending, or nothing was trained or restored yet.
        """
        if self.step is None:
            raise UserError("There are no weights yet: call fit or restore_for_evaluation first.")
        export.write_weights(self.model, self.step.averages, path)

    # One device loop

    def _fit(self, run: Run, dataset: Any, class_weight: dict[int, float] | None) -> None:
        def iterator_here():
            return feed.training_iterator(dataset, run.position, self.strategy, class_weight)

        try:
            run.begin()
            iterator = iterator_here()
            with (
                PreemptionNotice(self.grace_seconds, run.newest) as notice,
                self.watchdog as watchdog,
                self.profiler.listening(),
            ):
                run.evaluate()  # if a run that was asked to stop left that
                while not run.over():
                    count, compiled = run.next_stop() - run.step, self._train_loop is not None
                    began = time.monotonic()
                    totals = self._advance(iterator, count, run)
                    watchdog.beat(run.step + count)
                    if compiled:
                        notice.measured(count, time.monotonic() - began)
                    if self.step.diverged(totals):
                        run.roll_back(totals)
                        iterator = iterator_here()
                        continue
                    run.account(totals)
                    asked = self._any_asks(notice)
                    run.log()
                    if not asked:  # an evaluation may take longer than there is time
                        run.evaluate()
                        asked = self._any_asks(notice)
                        run.log()  # where a callback has just ended the run
                    run.save(now=asked)
                    if asked and (run.evaluation_due() or not run.over()):
                        saved = self.hosts.from_chief(run.settle())
                        raise Preempted(notice.requested or "another host", run.step, saved)
                run.finish()
        except BaseException as error:
            run.state_at_end = _state_after(error)
            if self.hosts.count > 1 and isinstance(error, _HOST_ERRORS):
                raise HostLost(
                    f"Another host of the run was lost after step {run.step}, or failed: see what "
                    "it said. Started again on all hosts, the same command goes on from the last "
                    f"checkpoint. ({str(error).strip().rpartition(chr(10))[2][:200]})"
                ) from error
            raise
        finally:
            run.end()

    def _any_asks(self, notice: PreemptionNotice) -> bool:
        """Whether any host was asked to stop; where a callback ends the run, it ends on all."""
        asked = notice.requested is not None
        asked, self.model.stop_training = self.hosts.any(asked, self.model.stop_training)
        return asked

    def _advance(self, iterator: Any, count: int, run: Run) -> np.ndarray:
        """Runs `count` steps on the devices; the sums of their losses and metrics."""
        first = self._train_loop is None
        if first:
            self._train_loop = self._make_loop(self.step.train, self.step.synchronise)
        part = "compiling" if first else "profiling" if self.profiler.running else run.part
        start = time.monotonic()
        with self.clock.spend(part), self.profiler.marker(run.step):
            waited = self._train_loop(iterator, tf.constant(count))
            totals = self.step.train_totals.drain()
        self.profiler.note_wait(float(waited))
        if part in ("compiling", "step"):
            self.clock.move(float(waited), part, "input_wait")
        if part in ("step", "restart"):
            seconds = time.monotonic() - start
            self.clock.count(count * self.global_batch_size, seconds)
            self.profiler.observe(seconds / count)
        return totals

    def _make_loop(self, function: Callable, afterwards: Callable | None = None) -> Callable:
        """A loop of steps in one `tf.function`, traced once whatever the number of steps.

        It returns the seconds that it waited for its input. Where the host runs ahead of the
        devices, as on a TPU, that is the most that the devices can have waited.
        """
        # Keras traces its layers without AutoGraph, too. No jit_compile: a TPU compiles everything
        # anyway, and a nested XLA function would run on its host ("could not find registered
        # transfer manager for platform Host"); on a CPU, XLA's convolutions are the slower ones.
        function = tf.autograph.experimental.do_not_convert(function)

        @tf.function
        def loop(iterator, count):
            waited = tf.zeros((), tf.float64)
            for _ in tf.range(count):
                asked = tf.timestamp()
                with tf.control_dependencies([asked]):
                    batch = next(iterator)
                with tf.control_dependencies(tf.nest.flatten(batch, expand_composites=True)):
                    waited += tf.timestamp() - asked
                self.strategy.run(function, args=(batch,))
            if afterwards is not None:
                self.strategy.run(afterwards)
            return waited

        return loop

    def _run_through(self, batches: tf.data.Dataset, loop: Callable) -> None:
        """Runs the loop over all of a finite dataset."""
        count = int(batches.cardinality())
        if self.hosts.count > 1:
            # Endless, of which all hosts take the same number: see feed.
            count = count if count >= 0 else int(batches.reduce(0, lambda n, _: n + 1))
            batches = batches.repeat()
        iterator = iter(feed.distribute(batches, self.strategy))
        with self.clock.spend("compiling"):  # once: it is kept
            loop.get_concrete_function(iterator, tf.constant(1))
        if count >= 0:
            loop(iterator, tf.constant(count))
            return
        while True:
            try:
                loop(iterator, tf.constant(1))
            except (tf.errors.OutOfRangeError, StopIteration):
                return

    def _gather(self, value: Any) -> tf.Tensor:
        return tf.concat(self.strategy.experimental_local_results(value), 0)

    # Preparation

    def _prepare(self, dataset: tf.data.Dataset) -> None:
        replicas = self.strategy.num_replicas_in_sync
        spec = feed.share_spec(dataset, replicas, self._step_options["gradient_accumulation_steps"])
        self.global_batch_size = keras.tree.flatten(dataset.element_spec)[0].shape[0]
        if self.step is None:
            self._build_step(spec, training=True)
        elif not self.step.prepared:
            with self.strategy.scope():
                self.step.prepare(spec)

    def _build_step(self, spec: Any, training: bool) -> None:
        with self.strategy.scope():
            self.step = Step(self.model, spec, training=training, **self._step_options)


def _state_after(error: BaseException) -> str:
    """How a run stands that an exception ended."""
    if isinstance(error, Preempted):
        return goodput.STOPPED if error.reason == "SIGINT" else goodput.PREEMPTED
    return goodput.STOPPED if isinstance(error, KeyboardInterrupt) else goodput.FAILED
