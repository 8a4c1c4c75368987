"""`Trainer`: fits, evaluates and predicts with a compiled Keras model on an engine."""

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras

from tftpu.checkpoint.store import Checkpoints, Restored
from tftpu.config import TrainOptions
from tftpu.engines.engine import Dataset, Engine, Executor, Nest, TrainLoop
from tftpu.engines.objective import LossFunction, Objective, objectives_of
from tftpu.engines.selection import engine_of
from tftpu.errors import UserError
from tftpu.inference import export
from tftpu.observe import writers
from tftpu.observe.profiler import Profiler
from tftpu.observe.writers import Writer
from tftpu.runtime import goodput
from tftpu.runtime.watchdog import Watchdog
from tftpu.storage import files, side_files
from tftpu.training.callbacks import Callbacks
from tftpu.training.context import RunContext
from tftpu.training.reporter import HyperParameter, Reporter, RunOutput, summary_of
from tftpu.training.session import Session
from tftpu.training.timetable import Timetable


class Trainer:
    """Trainer of a compiled Keras model, with its own loss, metrics and optimizer.

    With a workdir, a run that was stopped resumes from its last checkpoint.

    Args:
        model: compiled, and built in the scope of its engine.
        workdir: folder of checkpoints, metrics.jsonl and TensorBoard events, local or `gs://`;
            None writes nothing.
        options: options of training.
        loss_fn: `loss_fn(model, batch, training)` returns the loss of each example, (batch, ...),
            in place of the model's own loss; or that and a dictionary of further values for each
            example, which are logged. The batch is what the data set yields. Evaluation calls it
            as well. The model is compiled with an optimizer only.
        objectives: several loss functions, each with its own variables and optimizer, in place of
            what the model is compiled with.
        engine: runs the steps; None is the engine whose scope the model was built in.
        writers: further destinations of the metrics.
        hyperparameters: settings of the run that the writers record.
        sample: returns a text that shows what the model can do, at every evaluation.

    Attributes:
        model, workdir, options, engine: the arguments.
        hosts: the processes that train together.
        checkpoints: of the workdir; None: it has none.
        account: the account of the run's time.

    Raises:
        UserError: an option is not allowed, or the model cannot be trained as it is.

    Example:

    ```python
    engine = tftpu.connect()
    with engine.scope():
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(2)])
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    trainer = tftpu.Trainer(model, "runs/mine", tftpu.TrainOptions(global_clipnorm=1.0))
    history = trainer.fit(dataset, steps=600, validation_data=dataset)
    ```
    """

    def __init__(
        self,
        model: keras.Model,
        workdir: str | None = None,
        options: TrainOptions | None = None,
        *,
        loss_fn: LossFunction | None = None,
        objectives: Sequence[Objective] = (),
        engine: Engine | None = None,
        writers: Sequence[Writer] = (),
        hyperparameters: Mapping[str, HyperParameter] | None = None,
        sample: Callable[["Trainer"], str] | None = None,
    ):
        if not isinstance(options, TrainOptions | None):
            raise UserError(
                f"options is {type(options).__name__} {options!r}: pass "
                "tftpu.TrainOptions(steps_per_loop=…)."
            )
        self.options = TrainOptions() if options is None else dataclasses.replace(options)
        self.options.validate()
        self.engine: Engine = engine_of(model) if engine is None else engine
        self._objectives = objectives_of(model, loss_fn, objectives)
        self.engine.refuse(model, self._objectives)
        if (writers or self.options.writers) and workdir is None:
            raise UserError("writers need a workdir, which identifies their run.")
        self.model = model
        self.workdir = str(workdir) if workdir is not None else None
        self.hosts = self.engine.hosts
        self._writes_to = self.workdir if self.hosts.chief else None
        self._writers = tuple(writers)
        self._hyperparameters = dict(hyperparameters or {})
        self._sample = sample
        self.account = goodput.Account(self._writes_to, goodput.Clock())
        self._watchdog = Watchdog(self.options.watchdog_seconds)
        keep, keep_every = self.options.keep, self.options.keep_every
        self.checkpoints = Checkpoints(self.workdir, keep, keep_every) if self.workdir else None
        self._profiler = Profiler(self._writes_to, self.options.profile, self.engine.tracer)
        self._prepared: Executor | None = None
        self._loops: dict[Any, TrainLoop] = {}

    @property
    def executor(self) -> Executor:
        """The model on the engine's devices.

        Raises:
            UserError: nothing was trained, evaluated or restored yet.
        """
        if self._prepared is None:
            raise UserError(
                "The model is not on the devices yet: call fit, evaluate or "
                "restore_for_evaluation first."
            )
        return self._prepared

    @property
    def step(self) -> int:
        """The number of training steps done; 0 before `fit`."""
        return self._prepared.step if self._prepared is not None else 0

    def fit(
        self,
        dataset: Dataset,
        steps: int,
        *,
        validation_data: Dataset = None,
        eval_every: int | None = None,
        callbacks: Sequence[keras.callbacks.Callback] = (),
        class_weight: dict[int, float] | None = None,
        verbose: bool = True,
    ) -> keras.callbacks.History:
        """Trains up to a step, evaluating and saving on the way.

        Args:
            dataset: batches of the global batch, `(x, y)` or `(x, y, sample_weight)`. A finite one
                is repeated; one whose order is deterministic resumes where a stopped run left it.
            steps: total length of the run; the steps of a checkpoint or an earlier call count.
            validation_data: finite; every example counts once.
            eval_every: steps between two evaluations, which Keras calls an epoch; None: at the
                end only.
            callbacks: Keras's own or yours. Batch methods are called once a device loop.
            class_weight: weight of each label, as in Keras's `fit`.
            verbose: whether to show a live line on a terminal, and lines elsewhere.

        Returns:
            The history of the run, one entry per epoch, complete also for a resumed run.

        Raises:
            UserError: the data or the model cannot be used, or the loss is no longer finite.
            Preempted: the run was asked to stop, after a checkpoint was saved.
            HostLost: another host of the run failed.
        """
        timetable = Timetable.of(self.options, steps, eval_every)
        if validation_data is not None:
            self.engine.evaluation_spec(validation_data)  # mistakes are found before training
        writes_to = self._writes_to
        with files.claim(writes_to) if writes_to else contextlib.nullcontext():
            self.account.clock.turn_to("starting")
            microbatches = self.options.gradient_accumulation_steps
            spec = self.engine.training_spec(dataset, microbatches, class_weight)
            executor = self._executor_for(spec)
            if not self._loops:
                executor.warn_of_mixing(dataset, class_weight)
            loop = self._loop_for(spec)
            output = self._output(executor, loop, spec, verbose)
            session = Session(
                self._context(executor),
                loop,
                timetable,
                lambda position: self.engine.batches(dataset, position, class_weight),
                validation_data,
                Callbacks(callbacks, self.model, timetable),
                lambda start: Reporter(output, timetable.steps, start),
            )
            return session.run()

    def evaluate(self, dataset: Dataset) -> dict[str, float]:
        """Returns the loss and the metrics over a data set, counting every example once.

        Args:
            dataset: finite, batched, `(x, y)` or `(x, y, sample_weight)`.

        Returns:
            Means over all examples, by name.

        Raises:
            UserError: the data cannot be used.
        """
        executor = self._executor_for_evaluation(dataset)
        compiled, clock = executor.evaluation_compiled, self.account.clock
        with contextlib.nullcontext() if compiled else self._watchdog.paused():
            sums = executor.evaluate(dataset, lambda: clock.spend("compiling"))
        return executor.eval_sums.read(sums)

    def predict(self, dataset: Dataset) -> Nest:
        """Returns the model's outputs for a data set, in its order.

        Args:
            dataset: finite, batched; labels and weights are ignored.

        Returns:
            NumPy arrays of shape (examples, ...), nested as the model's output.

        Raises:
            UserError: the data cannot be used, or several hosts train together.
        """
        if self.hosts.count > 1:
            raise UserError("predict works on one host: restore the checkpoint there.")
        return self._executor_for_evaluation(dataset).predict(dataset)

    def predict_same(self, x: Nest) -> Nest:
        """Returns the model's output for one batch, which every replica receives in full.

        For batches too small to be divided, such as the one text that a language model continues.

        Args:
            x: the features, of one shape from call to call.

        Returns:
            NumPy arrays of shape (batch, ...), nested as the model's output.

        Raises:
            UserError: nothing was trained, evaluated or restored yet.
        """
        return self.executor.predict_replicated(x)

    def restore(self, step: int | None = None) -> Restored | None:
        """Loads a checkpoint of the workdir; returns None if there is none.

        Several hosts load the checkpoint that the chief found to be complete.

        Args:
            step: of the checkpoint; None is the newest.

        Raises:
            UserError: the checkpoint belongs to another model or is damaged, or nothing was
                trained or evaluated yet.
        """
        if self.checkpoints is None:
            return None
        leaves, found = self.executor.state(), None
        if self.hosts.chief:
            found = self.checkpoints.restore(leaves, step)
        step = self.hosts.from_chief(found.step if found else None)
        if step is None or found is not None:
            return found
        if not files.exists(self.checkpoints.folder):
            raise UserError(
                f"The chief resumes from step {step}, and this host has no checkpoints in "
                f"{self.workdir!r}: all hosts have to see the same workdir, such as "
                "gs://BUCKET/RUN."
            )
        return self.checkpoints.restore(leaves, step)

    def restore_for_evaluation(self, dataset: Dataset) -> Restored | None:
        """Loads the best checkpoint, or the newest if none is marked best; None if none.

        Args:
            dataset: as for `evaluate`; a model that is not built yet is built for it.
        """
        self._executor_for_evaluation(dataset)
        return self.restore(self.checkpoints.best()) if self.checkpoints else None

    def has_checkpoint(self) -> bool:
        """Returns whether the workdir has a complete checkpoint for `fit` to resume from."""
        return self.checkpoints is not None and bool(self.checkpoints.steps())

    def export_weights(self, path: str) -> None:
        """Writes the weights that evaluation uses: their averages where those are kept.

        Args:
            path: local or `gs://`; ends in `.weights.h5` (Keras reads it) or `.safetensors` (by
                the paths of the variables).

        Raises:
            UserError: another ending, or nothing was trained or restored yet.
        """
        export.write_weights(self.model, self.executor.averaged_weights(), path)

    # Preparation

    def _executor_for(self, spec: Nest) -> Executor:
        """Returns the executor; the first call creates it, for a batch of this spec."""
        if self._prepared is None:
            self._prepared = self.engine.prepare(self.model, self.options, spec, self._objectives)
        return self._prepared

    def _executor_for_evaluation(self, dataset: Dataset) -> Executor:
        if self._prepared is not None:
            return self._prepared
        return self._executor_for(self.engine.evaluation_spec(dataset))

    def _loop_for(self, spec: Nest) -> TrainLoop:
        """Returns the train loop for batches of a spec; it is kept with its compiled program."""
        key = str(spec)
        if key not in self._loops:
            self._loops[key] = self._executor_for(spec).training(spec)
        return self._loops[key]

    def _context(self, executor: Executor) -> RunContext:
        return RunContext(
            model=self.model,
            engine=self.engine,
            executor=executor,
            options=self.options,
            workdir=self.workdir,
            writes=self._writes_to is not None,
            checkpoints=self.checkpoints,
            account=self.account,
            profiler=self._profiler,
            watchdog=self._watchdog,
            evaluate=self.evaluate,
            restore=self.restore,
            config=_config_of(self.workdir),
        )

    def _output(self, executor: Executor, loop: TrainLoop, spec: Nest, verbose: bool) -> RunOutput:
        share = keras.tree.flatten(spec)[0].shape[0]
        sample = self._sample
        workdir, named = self._writes_to, ()
        if workdir is not None:
            named = tuple(writers.BY_NAME[name](workdir) for name in self.options.writers)
        return RunOutput(
            model_name=self.model.name,
            summary=lambda: summary_of(self.model),
            executor=executor,
            account=self.account,
            hardware=self.engine.hardware,
            model_flops=lambda: loop.model_flops,
            global_batch_size=share * self.engine.data_shares,
            replicas=self.engine.data_shares,
            hyperparameters=self._hyperparameters,
            workdir=workdir,
            writers=(*self._writers, *named) if self.hosts.chief else (),
            samples=(lambda: sample(self)) if sample is not None else None,
            images=self.hosts.count == 1 and self.workdir is not None,
            verbose=verbose and self.hosts.chief,
        )


def _config_of(workdir: str | None) -> dict[str, Any] | None:
    """Returns the experiment of a workdir as JSON; None if it has none."""
    return side_files.read(files.join(workdir, "config.json")) if workdir else None
