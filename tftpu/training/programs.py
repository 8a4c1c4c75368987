"""The executor and the train loops of a model, each prepared when it is first needed."""

from collections.abc import Sequence
from typing import Any

import keras

from tftpu.config import TrainConfig
from tftpu.engines import keras_internals
from tftpu.engines.data.arrays import Arrays
from tftpu.engines.engine import Dataset, Engine, Epoch, Executor, TrainLoop
from tftpu.engines.objectives.objective import Objective
from tftpu.errors import UserError
from tftpu.tensors import Nest
from tftpu.training import agreement, batch_values
from tftpu.training.agreement import explained
from tftpu.training.epoch_loop import EpochLoop


class Programs:
    """The programs that an engine runs for one model.

    Args:
        engine: runs them.
        model: compiled.
        options: of training.
        objectives: instead of what the model was compiled with.
    """

    def __init__(
        self,
        engine: Engine,
        model: keras.Model,
        options: TrainConfig,
        objectives: Sequence[Objective] = (),
    ):
        self._engine = engine
        self._objectives = objectives
        self._model = model
        self._options = options
        self._executor: Executor | None = None
        self._predictor: Executor | None = None  # made for data without labels
        self._setup: tuple[Any, ...] | None = None  # of the model, when its executor was made
        self._loops: dict[str, TrainLoop] = {}

    @property
    def executor(self) -> Executor:
        """The model on the engine's devices.

        Raises:
            UserError: nothing was trained, evaluated or restored yet.
        """
        executor = self._executor or self._predictor
        if executor is None:
            raise UserError(
                "The model is not on the devices yet: call fit, evaluate, predict or "
                "restore_for_evaluation first."
            )
        return executor

    @property
    def step(self) -> int:
        """The number of training steps done; 0 before `fit`."""
        executor = self._executor or self._predictor
        return executor.step if executor is not None else 0

    def executor_for(self, spec: Nest) -> Executor:
        """Returns the executor; the first call creates it, for a batch of this spec.

        Raises:
            UserError: the model cannot be trained, or not on such batches.
        """
        self._refuse_changed_model()
        self._refuse_other_spec(spec)
        if self._executor is None:
            self._executor = self._prepare(spec)
            if self._predictor is not None:  # which may hold what was restored
                before, now = self._predictor.state(), self._executor.state()
                for group in ("step", "ema"):
                    for old, new in zip(before[group], now[group]):
                        new.assign({region: old.read(region) for region in new.held})
        return self._executor

    def executor_for_evaluation(self, dataset: Dataset) -> Executor:
        """Returns the executor, after checking that it can evaluate a finite data set.

        Raises:
            UserError: the model cannot be evaluated on such data.
        """
        spec = self._engine.evaluation_spec(dataset)
        executor = self.executor_for(spec)
        self._refuse_values(dataset)
        with explained(spec, "evaluate"):
            executor.check_evaluation(spec)
        return executor

    def executor_for_prediction(self, dataset: Dataset) -> Executor:
        """Returns the executor, for a finite data set that may hold no labels.

        Raises:
            UserError: the model cannot predict for such data.
        """
        spec = self._engine.evaluation_spec(dataset)
        self._refuse_changed_model()
        self._refuse_other_spec(spec, labels=False)
        if self._executor is not None:
            return self._executor
        if self._objectives or not agreement.unlabelled(spec):
            return self.executor_for(spec)
        if self._predictor is None:
            self._predictor = self._prepare(spec, labelled=False)
        return self._predictor

    def training(
        self, dataset: Dataset, class_weight: dict[int, float] | None, epoch: Epoch | None
    ) -> tuple[TrainLoop, Nest]:
        """Returns the train loop for a data set, and the spec of a share of its batches.

        Args:
            dataset: to train on.
            class_weight: weight of each label.
            epoch: of the data set, if its epochs end with their own last batch.

        Raises:
            UserError: the model cannot be trained, or not on such data.
        """
        microbatches = self._options.gradient_accumulation_steps
        spec = self._engine.training_spec(dataset, microbatches, class_weight)
        executor = self.executor_for(spec)
        self._refuse_values(dataset)
        new, loop = not self._loops, self._prepare_loop(spec)
        if new:  # and known to change nothing but the model
            executor.warn_of_mixing(dataset, class_weight)
        if epoch is not None and epoch.last is not None:
            last = self._engine.last_spec(spec, epoch.last, microbatches)
            loop = EpochLoop(loop, self._prepare_loop(last), epoch, executor.train_sums)
        return loop, spec

    def _prepare_loop(self, spec: Nest) -> TrainLoop:
        """Returns the train loop for batches of a spec; it is kept with its compiled program."""
        key = str(spec)
        if key not in self._loops:
            self._refuse_other_spec(spec)
            with explained(spec):
                self._loops[key] = self.executor.training(spec)
        return self._loops[key]

    def _prepare(self, spec: Nest, labelled: bool = True) -> Executor:
        if not self._objectives:
            agreement.refuse_unknown_names(self._model)
        with explained(spec, "train" if labelled else "predict with"):
            executor = self._engine.prepare(
                self._model, self._options, spec, self._objectives, labelled
            )
        self._setup = keras_internals.training_setup(self._model)
        return executor

    def _refuse_values(self, dataset: Dataset) -> None:
        """Raises `UserError` for labels and ids outside of their range, in arrays.

        Other data are not read for it: that may be slow, or use up batches. The step sees them.
        """
        if isinstance(dataset, Arrays) and not self._objectives:
            batch_values.refuse_outside(self._model, dataset.parts)

    def _refuse_other_spec(self, spec: Nest, labels: bool = True) -> None:
        """Raises `UserError` for batches that a compiled model cannot take."""
        if not self._objectives:  # a loss function takes what it likes
            agreement.refuse_other_parts(self._model, spec, labels)
            agreement.refuse_other_features(self._model, spec)

    def _refuse_changed_model(self) -> None:
        """Raises `UserError` if the model is no longer the one that was put on the devices."""
        if self._setup not in (None, keras_internals.training_setup(self._model)):
            raise UserError(
                "The model was compiled again, or its layers were frozen or unfrozen, after this "
                "Trainer had begun to use it: make a new Trainer(model, ...), which trains the "
                "model as it now is."
            )
