"""The executor and the train loops of a model, each prepared when it is first needed."""

from collections.abc import Sequence

import keras

from tftpu.config import TrainOptions
from tftpu.engines.arrays import Arrays
from tftpu.engines.engine import Dataset, Engine, Epoch, Executor, TrainLoop
from tftpu.engines.objective import Objective
from tftpu.errors import UserError
from tftpu.tensors import Nest
from tftpu.training.agreement import explained, refuse_other_features, refuse_other_labels
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
        options: TrainOptions,
        objectives: Sequence[Objective] = (),
    ):
        self._engine = engine
        self._objectives = objectives
        self._model = model
        self._options = options
        self._executor: Executor | None = None
        self._loops: dict[str, TrainLoop] = {}

    @property
    def executor(self) -> Executor:
        """The model on the engine's devices.

        Raises:
            UserError: nothing was trained, evaluated or restored yet.
        """
        if self._executor is None:
            raise UserError(
                "The model is not on the devices yet: call fit, evaluate or "
                "restore_for_evaluation first."
            )
        return self._executor

    @property
    def step(self) -> int:
        """The number of training steps done; 0 before `fit`."""
        return self._executor.step if self._executor is not None else 0

    def executor_for(self, spec: Nest) -> Executor:
        """Returns the executor; the first call creates it, for a batch of this spec.

        Raises:
            UserError: the model cannot be trained, or not on such batches.
        """
        if self._executor is None:
            if not self._objectives:  # a loss function takes what it likes
                refuse_other_features(self._model, spec)
            with explained(spec):
                self._executor = self._engine.prepare(
                    self._model, self._options, spec, self._objectives
                )
        return self._executor

    def executor_for_evaluation(self, dataset: Dataset) -> Executor:
        """Returns the executor, for a finite data set if it does not exist yet."""
        if self._executor is not None:
            return self._executor
        return self.executor_for(self._engine.evaluation_spec(dataset))

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
        if isinstance(dataset, Arrays) and not self._objectives:
            refuse_other_labels(self._model, dataset.labels)
        if not self._loops:
            executor.warn_of_mixing(dataset, class_weight)
        loop = self._loop_for(spec)
        if epoch is not None and epoch.last is not None:
            last = self._engine.last_spec(spec, epoch.last, microbatches)
            loop = EpochLoop(loop, self._loop_for(last), epoch, executor.train_sums)
        return loop, spec

    def _loop_for(self, spec: Nest) -> TrainLoop:
        """Returns the train loop for batches of a spec; it is kept with its compiled program."""
        key = str(spec)
        if key not in self._loops:
            if not self._objectives:  # a loss function takes what it likes
                refuse_other_features(self._model, spec)
            with explained(spec):
                self._loops[key] = self.executor.training(spec)
        return self._loops[key]
