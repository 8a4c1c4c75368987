"""The executor and the train loops of a model, each prepared when it is first needed."""

import contextlib
import warnings
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from tftpu.config import TrainConfig
from tftpu.engines import keras_internals
from tftpu.engines.data.arrays import Arrays
from tftpu.engines.data.gate import Gate
from tftpu.engines.data.py_dataset import one_pass
from tftpu.engines.data.streams import Stream, describe_arrays
from tftpu.engines.engine import Dataset, Engine, Epoch, Executor, TrainLoop
from tftpu.engines.objectives.losses import count_examples
from tftpu.engines.objectives.objective import Objective
from tftpu.engines.own_steps import check_options
from tftpu.errors import OwnStepsNeeded, UserError, counted
from tftpu.runtime.goodput import Clock
from tftpu.runtime.watchdog import Watchdog
from tftpu.tensors import Nest
from tftpu.training import agreement, batch_values
from tftpu.training.agreement import explained
from tftpu.training.callbacks import BuildHooks
from tftpu.training.epoch_loop import EpochBatches, EpochLoop, StreamLoop


class Programs:
    """The programs that an engine runs for one model.

    Args:
        engine: the engine that runs the programs.
        model: the compiled model.
        options: the options of training.
        objectives: the objectives that replace the model's compiled loss; empty: none.

    Attributes:
        engine, model, options, objectives: the arguments.
        undivided_because: the reason why the model's own steps run, on whole batches; "" if they do
            not run.
    """

    def __init__(
        self,
        engine: Engine,
        model: keras.Model,
        options: TrainConfig,
        objectives: Sequence[Objective] = (),
    ):
        self.engine = engine
        self.objectives = objectives
        self.model = model
        self.options = options
        self._executor: Executor | None = None
        self._own_steps: Executor | None = None  # runs model.train_step, not the engine's step
        self.undivided_because = ""
        self._predictor: Executor | None = None  # predicts for data without labels
        self._own_predictor: Executor | None = None  # as `_predictor`, but runs model.predict_step
        # How the model was compiled, and which layers were frozen, when its executor was made.
        self._setup: tuple[Any, ...] | None = None
        self._loops: dict[str, TrainLoop] = {}

    @property
    def executor(self) -> Executor:
        """The executor of the model on the engine's devices.

        Raises:
            UserError: nothing was trained, evaluated, predicted or restored yet.
        """
        executor = self._find_executor()
        if executor is None:
            raise UserError(
                "The model is not on the devices yet: call fit, evaluate, predict or "
                "restore_for_evaluation first."
            )
        return executor

    @property
    def step(self) -> int:
        """The number of training steps done, including those of a restored run; 0 at first."""
        executor = self._find_executor()
        return executor.step if executor is not None else 0

    def _find_executor(self) -> Executor | None:
        return self._own_steps or self._executor or self._predictor or self._own_predictor

    def prepare_executor(self, spec: Nest) -> Executor:
        """Returns the executor; the first call creates it, for a batch of this spec.

        Raises:
            OwnStepsNeeded: only the model's own steps can train it.
            UserError: the model cannot be trained, or not with such batches.
        """
        self._check_model_unchanged()
        if self._own_steps is not None:
            return self._own_steps
        self._check_spec(spec)
        if self._executor is None:
            self._executor = self._prepare(spec)
            self._take_over(self._executor)
        return self._executor

    def prepare_for_evaluation(self, dataset: Dataset) -> Executor:
        """Returns the executor, after checking that it can evaluate a finite data set.

        Raises:
            UserError: the model cannot be evaluated with such data.
        """
        self._check_model_unchanged()
        self.follow_weights()
        if self._own_steps is not None:
            return self._own_steps
        try:
            spec = self.engine.evaluation_spec(dataset)
            executor = self.prepare_executor(spec)
            self._check_values(dataset)
            with explained(spec, "evaluate"):
                executor.check_evaluation(spec, dataset)
        except OwnStepsNeeded as reason:
            executor = self._prepare_own_steps(dataset, reason)
        return executor

    def prepare_for_prediction(self, dataset: Dataset) -> Executor:
        """Returns the executor for a finite data set, which may have no labels.

        Raises:
            UserError: the model cannot predict for such data.
        """
        self._check_model_unchanged()
        self.follow_weights()
        executor = self._own_steps or self._executor
        whole = self.engine.whole_spec(dataset)
        self._check_spec(whole, labels=False)
        compiled = bool(getattr(self.model, "compiled", False))
        labelled = bool(self.objectives) or (compiled and not agreement.is_unlabelled(whole))
        try:
            spec = self.engine.evaluation_spec(dataset)
            if executor is not None:
                return executor
            if labelled:
                return self.prepare_executor(spec)
            if self._predictor is None:
                self._predictor = self._prepare(spec, labelled=False)
            return self._predictor
        except OwnStepsNeeded as reason:
            if self._own_steps is not None:
                return self._own_steps
            if executor is None and labelled:
                return self._prepare_own_steps(dataset, reason)
            check_options(self.options, reason)
            if self._own_predictor is None:
                self._own_predictor = self.engine.prepare_own_steps(
                    self.model, whole, reason, labelled=False
                )
            return self._own_predictor

    def prepare_training(
        self, dataset: Dataset, class_weight: dict[int, float] | None, epoch: Epoch | None
    ) -> tuple[TrainLoop, int]:
        """Returns the train loop for a data set, and the number of examples of a global batch.

        Args:
            dataset: the data set to train on.
            class_weight: the weight of each label; None: all weights are 1.
            epoch: the length of an epoch; None: the batches are one endless stream.

        Raises:
            UserError: the model cannot be trained, or not with such data.
        """
        self._check_model_unchanged()
        try:
            if self._own_steps is None:
                return self._prepare_loop_of_shards(dataset, class_weight, epoch)
        except OwnStepsNeeded as reason:
            self._prepare_own_steps(dataset, reason)
        spec = self.engine.whole_spec(dataset, class_weight)
        return self.executor.training(spec), count_examples(spec)

    def open_batches(
        self,
        dataset: Dataset,
        position: int,
        class_weight: dict[int, float] | None,
        epoch: Epoch | None,
        gate: Gate | None,
    ) -> Any:
        """Returns the batches of a run from a position on, for its train loop.

        Args:
            dataset, position, class_weight, epoch, gate: as for `Engine.batches`.
        """
        arguments = (dataset, position, class_weight, epoch, gate)
        if self._own_steps is not None:
            return self.engine.whole_batches(*arguments)
        batches = self.engine.batches(*arguments)
        if epoch is None or epoch.last is None:
            return batches
        return EpochBatches(batches, position, epoch)

    def _prepare_loop_of_shards(
        self, dataset: Dataset, class_weight: dict[int, float] | None, epoch: Epoch | None
    ) -> tuple[TrainLoop, int]:
        """Returns the results of `prepare_training` for the engine's step, which shards a batch."""
        microbatches = self.options.gradient_accumulation_steps
        spec = self.engine.training_spec(dataset, microbatches, class_weight)
        executor = self.prepare_executor(self.engine.building_spec(spec))
        self._check_values(dataset)
        size = self.engine.count_examples(dataset)
        new, loop = not self._loops, self._prepare_loop(spec, size)
        # This runs the model, so it comes after the preparation, which checks it for side effects.
        if new:
            executor.warn_of_mixing(dataset, class_weight)
        if size % (self.engine.data_shards * microbatches):
            warnings.warn(
                f"{counted(self.engine.data_shards, 'device')} with "
                f"{counted(microbatches, 'microbatch')} cannot share a batch of {size} examples "
                "equally, so they compute some or all of it more than once. A multiple of their "
                "product is faster.",
                stacklevel=2,
            )
        if epoch is not None and epoch.last is not None:
            last = self.engine.last_spec(spec, epoch.last, microbatches)
            ending = self._prepare_loop(last, epoch.last)
            loop = EpochLoop(loop, ending, epoch, executor.train_sums)
        if isinstance(dataset, Stream):
            loop = StreamLoop(loop, size, self._prepare_loop_for, executor.train_sums)
        return loop, size

    def _prepare_loop_for(self, batch: Nest) -> TrainLoop:
        """Returns the train loop for batches shaped like `batch`, which holds NumPy arrays."""
        size = count_examples(batch)
        microbatches = self.options.gradient_accumulation_steps
        return self._prepare_loop(
            self.engine.last_spec(describe_arrays(batch), size, microbatches), size
        )

    def _prepare_own_steps(self, dataset: Dataset, reason: OwnStepsNeeded) -> Executor:
        """Returns the executor of the model's own steps; `reason`: why they are needed."""
        check_options(self.options, reason)
        if self._own_steps is None:
            spec = self.engine.whole_spec(dataset)
            self._check_spec(spec)
            with explained(spec):
                self._own_steps = self.engine.prepare_own_steps(self.model, spec, reason)
            self._setup = keras_internals.describe_training_setup(self.model)
            self._take_over(self._own_steps)
            self.undivided_because = str(reason)
        return self._own_steps

    def _take_over(self, executor: Executor) -> None:
        """Copies the step and the averaged weights of an earlier executor to a new one."""
        earlier = self._predictor or self._own_predictor
        if self._executor is not None and self._executor is not executor:
            earlier = self._executor
        if earlier is None:
            return
        before, now = earlier.state(), executor.state()
        for group in ("step", "ema"):
            for old, new in zip(before[group], now[group]):
                new.assign({region: old.read(region) for region in new.held})

    def follow_weights(self, first: int = 0) -> None:
        """Sets the averages of weights to the weights, unless a step was trained or restored.

        The weights may have been loaded after the executor was made.

        Args:
            first: the step with which a run begins, if it counts earlier epochs as done.
        """
        executor = self._find_executor()
        if executor is None or executor.step > first or self.options.ema_momentum is None:
            return
        state = executor.state()
        weights = {f"ema/{leaf.name}": leaf for leaf in state["model"]}
        for average in state["ema"]:
            weight = weights[average.name]
            average.assign({region: np.array(weight.read(region)) for region in average.held})

    def evaluate(
        self,
        dataset: Dataset,
        clock: Clock,
        watchdog: Watchdog,
        build_hooks: BuildHooks | None = None,
    ) -> dict[str, float]:
        """Returns the results of an evaluation of a finite data set that was already checked.

        Args:
            dataset: the data set to evaluate.
            clock: the clock of the run, for the time of compiling.
            watchdog: the watchdog of the run, paused while the evaluation is compiled.
            build_hooks: a function that builds the hooks for every execution; None: there are none.
        """
        executor = self.executor
        paused = contextlib.nullcontext() if executor.evaluation_compiled else watchdog.paused()
        with paused, one_pass(dataset, evaluates=True):
            hooks = build_hooks(executor.eval_sums.read) if build_hooks is not None else None
            try:
                sums = executor.evaluate(dataset, lambda: clock.spend("compiling"), hooks)
            except OwnStepsNeeded as reason:
                raise UserError(
                    f"{reason} This holds for a later batch of the evaluation, but not for the "
                    "first: make all batches alike."
                ) from reason
        return executor.eval_sums.read(sums)

    def _prepare_loop(self, spec: Nest, examples: int) -> TrainLoop:
        """Returns the train loop for batches of a spec; keeps it, because it compiles a program."""
        key = f"{examples} of {spec}"
        if key not in self._loops:
            self._check_spec(spec)
            with explained(spec):
                self._loops[key] = self.executor.training(spec, examples)
        return self._loops[key]

    def _prepare(self, spec: Nest, labelled: bool = True) -> Executor:
        if not self.objectives:
            agreement.check_names(self.model)
        with explained(spec, "train" if labelled else "predict with"):
            executor = self.engine.prepare(
                self.model, self.options, spec, self.objectives, labelled
            )
        self._setup = keras_internals.describe_training_setup(self.model)
        return executor

    def _check_values(self, dataset: Dataset) -> None:
        """Raises `UserError` if the data are arrays with labels or ids outside of their range.

        Data sets are not checked, because reading them may be slow or use up batches. A wrong label
        in them makes the loss NaN.
        """
        if isinstance(dataset, Arrays) and not self.objectives:
            batch_values.check_ranges(self.model, dataset.parts)

    def _check_spec(self, spec: Nest, labels: bool = True) -> None:
        """Raises `UserError` for batches that a compiled model cannot take."""
        if not self.objectives:  # a loss function may take any batch
            agreement.check_parts(self.model, spec, labels)
            agreement.check_features(self.model, spec)

    def _check_model_unchanged(self) -> None:
        """Raises `UserError` if the model was compiled or frozen since its executor was made."""
        if self._setup not in (None, keras_internals.describe_training_setup(self.model)):
            raise UserError(
                "The model was compiled again, or its layers were frozen or unfrozen, after this "
                "Trainer had begun to use it. To train the changed model, make a new "
                "Trainer(model, ...)."
            )
