"""`Trainer`: fits, evaluates and predicts with a compiled Keras model on an engine."""

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Literal, overload

import keras

from tftpu.checkpoint.frozen_base import Base
from tftpu.checkpoint.store import Checkpoints, Restored
from tftpu.config import TrainConfig
from tftpu.engines import keras_internals
from tftpu.engines.data.preprocessed import find_preprocess
from tftpu.engines.data.py_dataset import one_pass
from tftpu.engines.data.streams import ReadOnce, Stream, read_once
from tftpu.engines.engine import Dataset, Engine, Executor, Nest
from tftpu.engines.objectives.objective import LossFunction, Objective, list_objectives
from tftpu.engines.selection import find_engine
from tftpu.errors import UserError
from tftpu.inference import export, quantizing
from tftpu.observe import background
from tftpu.observe.profiler import Profiler
from tftpu.observe.writers import Writer
from tftpu.runtime import goodput, slow
from tftpu.runtime.watchdog import Watchdog
from tftpu.storage import locks
from tftpu.training import arguments, data_arguments, restoring
from tftpu.training.arguments import CallbackArgument, check_keras_arguments
from tftpu.training.callbacks import BuildHooks, Callbacks, evaluate_with, predict_with
from tftpu.training.epoch_loop import Feed
from tftpu.training.programs import Programs
from tftpu.training.progress import RunProgress
from tftpu.training.reporter import HyperParameter, Reporter
from tftpu.training.saver import Saver
from tftpu.training.session import Session
from tftpu.training.timetable import Length


class Trainer:
    """Trainer of a Keras model, with the loss, metrics and optimizer that it is compiled with.

    With a workdir, a run that was stopped resumes from its last checkpoint.

    Args:
        model: a model that is compiled, and built in the scope of its engine.
        workdir: folder of checkpoints, metrics.jsonl and TensorBoard events, local or `gs://`;
            None: no files are written.
        options: options of training.
        loss_fn: `loss_fn(model, batch, training)` returns the loss of each example, (batch, ...),
            or a pair of that loss and a dictionary of further values for each example, which are
            logged. The batch is an element of the data set. Evaluation calls `loss_fn` as well. It
            replaces the compiled loss: the model is compiled with an optimizer only.
        objectives: several loss functions, each with its own variables and optimizer, instead of
            the compiled loss and optimizer.
        engine: the engine that runs the steps; None: the engine in whose scope the model was
            built.
        writers: further destinations of the metrics.
        hyperparameters: settings of the run that the writers record.
        sample: a function of the trainer that returns a text that shows what the model can do. It
            is called at each evaluation of a run on one host with a workdir and a compiled loss.
        base: paths of frozen weights that checkpoints leave out, as `tftpu.models.base_of` returns
            them. A resumed run must give them the same values, which is checked.

    Attributes:
        model, workdir, options, engine: the arguments.
        hosts: the processes that train together.
        checkpoints: the checkpoints of the workdir; None: there is no workdir.
        account: the account of the run's time.

    Raises:
        UserError: an option is not allowed, or the model cannot be trained as it is.

    Example:

    ```python
    engine = tftpu.connect()
    with engine.scope():
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(2)])
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    trainer = tftpu.Trainer(model, "runs/mine", tftpu.TrainConfig(global_clipnorm=1.0))
    history = trainer.fit(x, y, epochs=5, batch_size=100, validation_split=0.1)
    ```
    """

    def __init__(
        self,
        model: keras.Model,
        workdir: str | None = None,
        options: TrainConfig | None = None,
        *,
        loss_fn: LossFunction | None = None,
        objectives: Sequence[Objective] = (),
        engine: Engine | None = None,
        writers: Sequence[Writer] = (),
        hyperparameters: Mapping[str, HyperParameter] | None = None,
        sample: Callable[["Trainer"], str] | None = None,
        base: Collection[str] = (),
    ):
        self.options = arguments.validate_options(options)
        self.engine: Engine = find_engine(model) if engine is None else engine
        objectives = list_objectives(model, loss_fn, objectives)
        self.engine.refuse(model, objectives)
        if (writers or self.options.writers) and workdir is None:
            raise UserError("writers needs a workdir, which identifies the run.")
        self.model = model
        self.workdir = arguments.validate_workdir(workdir)
        self.hosts = self.engine.hosts
        self._writes_to = self.workdir if self.hosts.chief else None
        self._writers = tuple(writers)
        self._hyperparameters = dict(hyperparameters or {})
        self._sample = sample
        self._base = Base(base, lambda: self.executor.state(), self.hosts)
        self.account = goodput.Account(self._writes_to, goodput.Clock())
        self._watchdog = Watchdog(self.options.watchdog_seconds)
        kept = self.options.keep, self.options.keep_every, self.hosts
        self.checkpoints = Checkpoints(self.workdir, *kept) if self.workdir else None
        self._profiler = Profiler(self._writes_to, self.options.profile, self.engine.tracer)
        self._programs = Programs(self.engine, self.model, self.options, objectives)
        self._progress = RunProgress()
        self._done = False  # whether the last call of `fit` completed
        self._once: ReadOnce | None = None  # the data of the last call, if they are an iterator

    @property
    def executor(self) -> Executor:
        """The executor of the model on the engine's devices.

        Raises:
            UserError: nothing was trained, evaluated, predicted or restored yet.
        """
        return self._programs.executor

    @property
    def step(self) -> int:
        """The number of training steps done, including those of a restored run; 0 at first."""
        return self._programs.step

    @check_keras_arguments
    def fit(
        self,
        x: Any = None,
        y: Nest = None,
        batch_size: int | None = None,
        epochs: int | None = None,
        verbose: str | int = "auto",
        callbacks: CallbackArgument = None,
        validation_split: float = 0.0,
        validation_data: Any = None,
        shuffle: bool = True,
        class_weight: dict[int, float] | None = None,
        sample_weight: Nest = None,
        initial_epoch: int = 0,
        steps_per_epoch: int | None = None,
        validation_steps: int | None = None,
        validation_batch_size: int | None = None,
        validation_freq: int | Collection[int] = 1,
        *,
        steps: int | None = None,
        eval_every: int | None = None,
    ) -> keras.callbacks.History:
        """Trains the model, and evaluates and saves it. The arguments are those of Keras's `fit`.

        Either `epochs` or `steps` sets the length of the run. Both count from the beginning of the
        run, not of the call: the same command resumes, and a larger number continues. Without a
        workdir, a call after a completed one counts `epochs` from its own beginning, as in Keras.

        Args:
            x: arrays (NumPy, pandas, tensors, also sparse and ragged ones; nested as the model's
                inputs); or global batches, `(x, y)` or `(x, y, sample_weight)`, as a
                `tf.data.Dataset`, a `keras.utils.PyDataset`, a pipeline of
                `tftpu.input_pipelines`, a generator or another iterable. If the model has a
                `preprocessor`, as in KerasHub, it is applied to each batch; a language model then
                takes texts.
            y: the labels, if `x` are arrays.
            batch_size: the number of examples per step over all devices, if `x` are arrays; None:
                32, or with `steps_per_epoch`, the number of examples divided by it.
            epochs: the number of epochs of the whole run, including those before `initial_epoch`;
                None: 1, unless `steps` is given. An epoch is one pass over the data; its last batch
                may be smaller.
            verbose: "auto" or 1: a live line on a terminal, and lines elsewhere; 2: lines; 0:
                nothing.
            callbacks: Keras's own or yours. Batch methods are called for each batch, or with
                `steps_per_execution` for each execution, as in Keras.
            validation_split: the share of the arrays to validate on, taken from their end.
            validation_data: `(x, y)`, `(x, y, sample_weight)` or a finite data set, evaluated after
                every epoch or `validation_freq` epochs; every example counts once.
            shuffle: whether arrays, and the batches of a `PyDataset`, have another order in each
                epoch; it depends on the seed of the options, and a resumed run continues it.
            class_weight: the weight of each label, for a compiled loss.
            sample_weight: the weight of each example, if `x` are arrays. A `loss_fn` gets it as
                `batch[2]`, and must apply it itself.
            initial_epoch: the index of the epoch with which a run begins.
            steps_per_epoch: the maximum number of steps of an epoch, which also ends with the data,
                as in Keras; the next epoch continues the same pass. None: one pass.
            validation_steps: number of batches to validate on, as `steps` of `evaluate`; None: all.
            validation_batch_size: the batch size for validation arrays; None: `batch_size`.
            validation_freq: the number of epochs between evaluations, or a collection of the epochs
                to evaluate after, counted from 1.
            steps: total steps of the run, instead of `epochs`; the data are an endless stream.
            eval_every: with `steps`, the number of steps between evaluations, which is an epoch for
                callbacks; None: evaluation at the end only.

        Returns:
            The history of the run, one entry per epoch, complete also for a resumed run.

        Raises:
            UserError: the arguments, the data or the model cannot be used, or the loss is no longer
                finite.
            Preempted: the run was asked to stop, after a checkpoint was saved.
            HostLost: another host of the run failed.
        """
        arguments.check_labels_and_weights(
            y, sample_weight, class_weight, bool(self._programs.objectives)
        )
        arguments.check_length(self.options, epochs, steps)
        length = Length(
            epochs=epochs,
            steps=steps,
            steps_per_epoch=steps_per_epoch,
            initial_epoch=initial_epoch,
            eval_every=eval_every,
            validation_freq=validation_freq,
        )
        verbose, listed = arguments.parse_verbosity(verbose), arguments.list_callbacks(callbacks)
        if self._done and self.workdir is None and length.by_epochs:
            self._progress, self.account.reached = RunProgress(begun_at=self.step), 0
        preprocess, arrays = find_preprocess(self.model), (x, y, sample_weight)
        if validation_split and validation_data is None:
            arrays, validation_data = data_arguments.split_arrays(
                *arrays, validation_split, preprocess
            )
        self._once = read_once(x, self._once)
        dataset = data_arguments.prepare_training_data(
            *arrays,
            batch_size=batch_size,
            steps_per_epoch=steps_per_epoch,
            shuffle=shuffle,
            seed=self.options.seed + self._progress.begun_at,
            preprocess=preprocess,
            once=self._once,
        )
        if class_weight and isinstance(dataset, Stream):
            dataset = dataset.weigh(class_weight)
        validation_data = data_arguments.prepare_validation_data(
            validation_data,
            batch_size=validation_batch_size or batch_size,
            steps=validation_steps,
            repeats=eval_every is not None or (epochs or 1) - initial_epoch > 1,
            preprocess=preprocess,
        )
        build = functools.partial(
            *(self._build_session, dataset, length, class_weight, validation_data, listed, verbose)
        )
        return self._run(build, verbose)

    @overload
    def evaluate(
        self, x: Any = ..., y: Nest = ..., batch_size: int | None = ..., verbose: str | int = ...,
        sample_weight: Nest = ..., steps: int | None = ..., callbacks: CallbackArgument = ...,
        *, return_dict: Literal[True],
    ) -> dict[str, float]: ...  # fmt: skip

    @overload
    def evaluate(
        self, x: Any = ..., y: Nest = ..., batch_size: int | None = ..., verbose: str | int = ...,
        sample_weight: Nest = ..., steps: int | None = ..., callbacks: CallbackArgument = ...,
        return_dict: bool = ...,
    ) -> dict[str, float] | list[float] | float: ...  # fmt: skip

    @check_keras_arguments
    def evaluate(
        self,
        x: Any = None,
        y: Nest = None,
        batch_size: int | None = None,
        verbose: str | int = 0,
        sample_weight: Nest = None,
        steps: int | None = None,
        callbacks: CallbackArgument = None,
        return_dict: bool = False,
    ) -> dict[str, float] | list[float] | float:
        """Returns the loss and the metrics over a data set, counting every example once.

        Args:
            x, y, sample_weight: arrays, or as `x` a finite data set of batches, as for `fit`.
            batch_size: the batch size for arrays; None: 32.
            verbose: 0 prints nothing; Keras's other values print the results.
            steps: number of batches; None: all. Without a batch size, arrays are divided into this
                number of batches.
            callbacks: callbacks, whose `on_test_*` methods are called.
            return_dict: whether to return a dictionary.

        Returns:
            Means over all examples, by name; or without `return_dict`, as in Keras, a list in the
            order of `compile`, or a number if there is only the loss.

        Raises:
            UserError: the data cannot be used.
        """
        dataset = self._prepare_data(
            x, y, sample_weight, batch_size=batch_size, steps=steps, name="evaluate"
        )
        self._programs.prepare_for_evaluation(dataset)

        def evaluate(build_hooks: BuildHooks | None) -> dict[str, float]:
            return self._programs.evaluate(dataset, self.account.clock, self._watchdog, build_hooks)

        listed = arguments.list_callbacks(callbacks)
        prints = arguments.parse_verbosity(verbose) > 0 and self.hosts.chief
        with self.hosts.together():
            results = evaluate_with(listed, self.model, evaluate, prints)
        return results if return_dict else keras_internals.list_results(self.model, results)

    @check_keras_arguments
    def predict(
        self,
        x: Any,
        batch_size: int | None = None,
        verbose: str | int = 0,
        steps: int | None = None,
        callbacks: CallbackArgument = None,
    ) -> Nest:
        """Returns the model's outputs for a data set, in its order.

        Args:
            x: arrays, or a finite data set of batches, whose labels and weights are ignored.
            batch_size: the batch size for arrays; None: 32.
            verbose: 0 prints nothing; Keras's other values print the shapes of the outputs.
            steps: see `evaluate`.
            callbacks: callbacks, whose `on_predict_*` methods are called.

        Returns:
            NumPy arrays of shape (examples, ...), nested as the model's output.

        Raises:
            UserError: the data cannot be used, or the engine cannot predict on several hosts.
        """
        dataset = self._prepare_data(x, batch_size=batch_size, steps=steps, name="predict")
        executor = self._programs.prepare_for_prediction(dataset)
        listed, prints = arguments.list_callbacks(callbacks), arguments.parse_verbosity(verbose) > 0
        with self.hosts.together(), one_pass(dataset):
            return predict_with(
                listed, self.model, lambda ahead: executor.predictions(dataset, ahead), prints
            )

    def predict_batches(self, x: Any, batch_size: int | None = None) -> Iterator[Nest]:
        """Yields the model's outputs batch by batch, for data that are larger than memory.

        Args:
            x, batch_size: as for `predict`, which raises the same errors.
        """
        dataset = self._prepare_data(x, batch_size=batch_size, name="predict")
        return self._programs.prepare_for_prediction(dataset).predictions(dataset)

    def restore(self, step: int | None = None, *, optimizer: bool = True) -> Restored | None:
        """Loads a checkpoint of the workdir; returns None if there is none.

        Args:
            step: the step of the checkpoint; None: the newest.
            optimizer: whether to load the optimizer's state, which evaluation does not need.

        Raises:
            UserError: the checkpoint belongs to another model, is missing or is damaged, or nothing
                was trained, evaluated or predicted yet.
        """
        return restoring.restore(
            self.checkpoints, self._base, self.hosts, step, optimizer=optimizer
        )

    def restore_for_evaluation(self, x: Any) -> Restored | None:
        """Loads the checkpoint marked as best, or else the newest; returns None if there is none.

        Args:
            x: arrays or a data set, as for `predict`; an unbuilt model is built for their shapes.
        """
        dataset = self._prepare_data(x, name="restore_for_evaluation")
        self._programs.prepare_for_prediction(dataset)
        best = self.checkpoints.find_best() if self.checkpoints else None
        return self.restore(best, optimizer=False)

    def has_checkpoint(self) -> bool:
        """Returns whether the workdir has a complete checkpoint for `fit` to resume from."""
        return self.checkpoints is not None and bool(self.checkpoints.list_steps())

    def export_weights(self, path: str) -> None:
        """Writes the weights that evaluation uses: their moving averages if the run keeps them.

        Args:
            path: local or `gs://`; ends in `.weights.h5` (Keras reads it) or `.safetensors` (whose
                keys are the paths of the variables).

        Raises:
            UserError: the path has another ending or cannot be written, nothing was trained or
                restored yet, the model has adapters, or several hosts each hold a part of the
                weights.
        """
        export.write_weights(self.model, self.executor.averaged_weights(), path)

    def _prepare_data(self, *data: Any, **arguments: Any) -> Dataset:
        """Returns the data of an evaluation: see `data_arguments.prepare_evaluation_data`."""
        preprocess = find_preprocess(self.model)
        return data_arguments.prepare_evaluation_data(*data, **arguments, preprocess=preprocess)

    # Methods for one call of `fit`

    def _reporting_slow_start(self, verbose: int) -> contextlib.AbstractContextManager[None]:
        """Returns a context manager that prints a line if the preparation in it takes long."""
        if not (verbose and self.hosts.chief):
            return contextlib.nullcontext()
        return slow.reporting_if_slow("Preparing the data and the train step")

    def _run(self, build_session: Callable[[], Session], verbose: int) -> keras.callbacks.History:
        quantizing.refuse_quantized(self.model)
        with locks.locked(self._writes_to) if self._writes_to else contextlib.nullcontext():
            with self._reporting_slow_start(verbose):
                session = build_session()
            self._done = False
            try:
                history = session.run()
                self._done = True
            finally:
                self._progress = session.progress
            return history

    def _build_session(
        self,
        dataset: Dataset,
        length: Length,
        class_weight: dict[int, float] | None,
        validation_data: Dataset,
        callbacks: list[keras.callbacks.Callback],
        verbose: int,
    ) -> Session:
        self.account.clock.turn_to("starting")
        epoch = None
        if length.by_epochs:
            epoch = self.engine.epoch(dataset, endless=length.steps_per_epoch is not None)
        loop_steps = arguments.choose_loop_length(self.options, self.model, callbacks)
        skips = epoch is not None or not isinstance(dataset, Stream)
        timetable = length.build_timetable(self.options, loop_steps, epoch, skips)
        with self.hosts.together():
            loop, batch_size = self._programs.prepare_training(dataset, class_weight, epoch)
            if validation_data is not None:  # finds mistakes before training
                before = self._programs.executor
                if self._programs.prepare_for_evaluation(validation_data) is not before:
                    loop, batch_size = self._programs.prepare_training(dataset, class_weight, epoch)
        writers = ()
        if self._writes_to is not None:
            writers = (*self._writers, *background.open_services(self.options, self._writes_to))
        self._base.begin(self.model)
        return Session(
            self._programs,
            loop,
            timetable,
            Feed(dataset, class_weight, epoch, self._programs.open_batches),
            validation_data,
            Callbacks(
                callbacks,
                self.model,
                timetable.numbered_from + timetable.epochs,
                timetable.epoch_steps,
                loop_steps,
            ),
            Saver(self.checkpoints, self._base, self.hosts, timetable),
            self.account,
            self._profiler,
            self._watchdog,
            self._progress,
            lambda start: Reporter(
                self._programs,
                self.account,
                loop,
                batch_size,
                timetable.steps,
                start,
                evaluates=validation_data is not None,
                workdir=self._writes_to,
                writers=writers,
                hyperparameters=self._hyperparameters,
                sample=functools.partial(self._sample, self) if self._sample else None,
                verbose=verbose,
            ),
        )
