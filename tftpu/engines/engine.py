"""The protocol of an engine: the interface between the trainer and what runs its steps.

The trainer, checkpoints, telemetry and writers depend only on the types in this file. An engine
turns a compiled Keras model into an `Executor`, with its state as `Leaf`s.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from tftpu.config import TrainConfig
from tftpu.engines.leaf import Leaf
from tftpu.tpu.hardware import Hardware

if TYPE_CHECKING:  # checkpoints import this file, and load no Keras
    import keras

    from tftpu.engines.data.gate import Gate
    from tftpu.engines.objectives.objective import Objective
    from tftpu.engines.objectives.sums import EvalSums, TrainSums

Nest = Any  # as in tftpu.tensors, which loads Keras
# A data set: a `tf.data.Dataset`, `Arrays`, `PyBatches`, or a pipeline of `tftpu.input_pipelines`.
Dataset = Any


class LoopResult(NamedTuple):
    """The result of one device loop.

    Attributes:
        sums: the sums of losses and metrics over the loop, float64; `Executor.train_sums` reads
            them.
        input_wait: seconds that the loop waited for its input. Where the host runs ahead of the
            devices, as on a TPU, an upper bound of what the devices waited.
    """

    sums: np.ndarray
    input_wait: float


@dataclasses.dataclass(frozen=True)
class Epoch:
    """One pass over a data set.

    Attributes:
        steps: number of batches.
        examples: number of examples of a batch.
        last: number of examples of the last batch; None: as many as every other.
    """

    steps: int
    examples: int
    last: int | None = None


class Exchange(Protocol):
    """Texts that pass between hosts, in any thread, which all use the names in the same order."""

    def collect(self, name: str, text: str) -> list[str]:
        """Returns on the chief what all hosts gave under a name, by host; [] on the others."""
        ...

    def announce(self, name: str, text: str) -> str:
        """Returns the chief's text on all hosts."""
        ...


class Hosts(Protocol):
    """The processes that train together, which all call these methods in the same order."""

    @property
    def index(self) -> int:
        """The number of this process."""
        ...

    @property
    def count(self) -> int:
        """The number of processes."""
        ...

    @property
    def chief(self) -> bool:
        """True for the process that writes files shared by all."""
        ...

    @property
    def exchange(self) -> Exchange | None:
        """Passes texts between hosts that each write a part of a checkpoint; None: one writes."""
        ...

    def any(self, *flags: bool) -> list[bool]:
        """Returns, for each flag, whether it is set on any host."""
        ...

    def from_chief(self, step: int | None) -> int | None:
        """Broadcasts the chief's value to all hosts (a barrier)."""
        ...

    def together(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context that all hosts are in at the same time: one that ends is lost."""
        ...


class Tracer(Protocol):
    """The device profiler, whose traces TensorBoard shows."""

    def start(self, logdir: str) -> bool:
        """Starts a trace; returns False if another one is running in this process."""
        ...

    def stop(self) -> None:
        """Ends the trace and writes it. Raises `OSError` if it cannot be written."""
        ...

    def marker(self, step: int) -> contextlib.AbstractContextManager[Any]:
        """Returns a context that marks a step in the trace."""
        ...

    def note(self, name: str, **numbers: int) -> None:
        """Writes an event with numbers into the trace."""
        ...


class Executor(Protocol):
    """A compiled Keras model, prepared for an engine's devices."""

    @property
    def train_sums(self) -> "TrainSums":
        """The layout of the sums of training steps."""
        ...

    @property
    def eval_sums(self) -> "EvalSums":
        """The layout of the sums of an evaluation."""
        ...

    @property
    def step(self) -> int:
        """The number of training steps done, skipped ones included."""
        ...

    @property
    def optimizer_name(self) -> str:
        """The class name of the optimizer, of the first of several."""
        ...

    @property
    def evaluation_compiled(self) -> bool:
        """True once the evaluation loop is compiled, which the first `evaluate` does."""
        ...

    @property
    def learning_rate(self) -> float:
        """The learning rate at this step, of the first of several optimizers."""
        ...

    def begin_at(self, step: int) -> None:
        """Counts the steps before this one as done, although they were not trained."""
        ...

    @property
    def weight_norm(self) -> float:
        """The global norm of the trainable weights."""
        ...

    def warn_of_mixing(self, dataset: Dataset, class_weight: dict[int, float] | None) -> None:
        """Warns if the loss of an example depends on the other examples of its batch.

        Args:
            dataset, class_weight: as for `Engine.batches`.
        """
        ...

    def training(self, shard_spec: Nest) -> "TrainLoop":
        """Prepares training on batches whose shares have this spec.

        Raises:
            UserError: the batch cannot be divided, or the model cannot be trained.
        """
        ...

    def bare(self, shard_spec: Nest, batch: Any) -> Callable[[int], None]:
        """Returns a function that runs a number of training steps on one batch, and waits for them.

        Nothing is fetched or logged in between: it shows what the rest of a run costs.

        Args:
            shard_spec: spec of a shard of the batch.
            batch: one of `Engine.batches`.
        """
        ...

    def check_evaluation(self, batch_spec: Nest) -> None:
        """Traces an evaluation; what does not fit raises before anything is trained.

        Args:
            batch_spec: of the padded global batches, as `Engine.evaluation_spec` returns it.
        """
        ...

    def evaluate(
        self, dataset: Dataset, compiling: Callable[[], contextlib.AbstractContextManager[Any]]
    ) -> np.ndarray:
        """Runs over a finite data set once; returns sums that `eval_sums` reads.

        Args:
            dataset: batches of `(x, y)` or `(x, y, sample_weight)`.
            compiling: returns a context to enter while the loop is compiled.
        """
        ...

    def predictions(self, dataset: Dataset) -> Iterator[Nest]:
        """Yields the outputs for each batch of a finite data set, in order, as NumPy arrays."""
        ...

    def predict_batch(self, x: Nest) -> Nest:
        """Returns the outputs for one batch of features of any size, as NumPy arrays.

        The batch is not divided: it may be smaller than the number of shares.
        """
        ...

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Compiles a function, as `tftpu.engines.functions`, with the weights of evaluation."""
        ...

    def state(self) -> dict[str, list[Leaf]]:
        """Returns all variables that a checkpoint holds, by group."""
        ...

    def averaged_weights(self) -> Mapping[str, np.ndarray]:
        """Returns the averages of the trainable weights by path; empty if none are kept."""
        ...


class TrainLoop(Protocol):
    """Training steps of an `Executor` for one shape of batches."""

    @property
    def model_flops(self) -> int:
        """The model FLOPs of a global batch, forward and backward."""
        ...

    def compiled(self, batches: Iterator[Any]) -> bool:
        """Returns whether the device loop of the next batch is compiled, which `run` does."""
        ...

    def run(self, batches: Iterator[Any], steps: int) -> LoopResult:
        """Runs training steps on the devices.

        Args:
            batches: an iterator of `Engine.batches`.
            steps: number of steps, each of one global batch.
        """
        ...

    def diverged(self, sums: np.ndarray) -> bool:
        """Returns whether the sums of a loop show a loss that is no longer finite."""
        ...


class Engine(Protocol):
    """Devices that run steps, and the division of a global batch among them."""

    @property
    def description(self) -> str:
        """The devices in words, such as "8 replica(s)"."""
        ...

    @property
    def data_shards(self) -> int:
        """The number of shards that a global batch is cut into."""
        ...

    @property
    def hosts(self) -> Hosts:
        """The processes that train together."""
        ...

    @property
    def hardware(self) -> Hardware:
        """The chips, with their prices and peaks where they are known."""
        ...

    @property
    def compiler_options(self) -> Mapping[str, str]:
        """The options of XLA that the train step is compiled with, where the engine sets any."""
        ...

    @property
    def tracer(self) -> Tracer:
        """The profiler."""
        ...

    def lost_host(self, error: BaseException) -> bool:
        """Returns whether an exception means that another host is lost."""
        ...

    def scope(self) -> contextlib.AbstractContextManager[Any]:
        """Returns the context in which models are built."""
        ...

    def refuse(self, model: "keras.Model", objectives: Sequence["Objective"] = ()) -> None:
        """Raises `UserError` for a model that cannot be trained as it is."""
        ...

    def epoch(self, dataset: Dataset) -> Epoch:
        """Returns the length of one pass over a data set; may have to read all of it.

        Raises:
            UserError: not a data set, or one that never ends.
        """
        ...

    def training_spec(
        self,
        dataset: Dataset,
        microbatches: int,
        class_weight: dict[int, float] | None,
    ) -> Nest:
        """Returns the spec of one shard of the complete global batches that `batches` would give.

        Args:
            dataset, class_weight: as for `batches`.
            microbatches: number of microbatches that a shard is cut into.

        Raises:
            UserError: not a data set, or one that is empty, not batched, or cannot be divided.
        """
        ...

    def last_spec(self, spec: Nest, examples: int, microbatches: int) -> Nest:
        """Returns the spec of one shard of the smaller batch that an epoch ends with.

        Args:
            spec: of one shard of a complete batch.
            examples: number of examples of the smaller batch.
            microbatches: number of microbatches that a shard is cut into.

        Raises:
            UserError: the batch cannot be divided.
        """
        ...

    def batches(
        self,
        dataset: Dataset,
        position: int,
        class_weight: dict[int, float] | None,
        epoch: Epoch | None,
        gate: "Gate | None" = None,
    ) -> Iterator[Any]:
        """Returns an endless iterator over global batches, divided among the devices.

        Args:
            dataset: batched by the global batch; repeated if it is finite.
            position: number of batches to skip.
            class_weight: weight of each label, which becomes the sample weight.
            epoch: of the data set, whose last batch then is a smaller one if it is in the data: its
                shares are padded, and a train loop of its spec leaves the padding out. None: one
                epoch follows the other, and all batches are complete.
            gate: that holds the data set back; None: it is read ahead.
        """
        ...

    def evaluation_spec(self, dataset: Dataset) -> Nest:
        """Returns the spec of the padded global batches of an evaluation.

        Raises:
            UserError: not a finite data set.
        """
        ...

    def prepare(
        self,
        model: "keras.Model",
        options: TrainConfig,
        batch_spec: Nest,
        objectives: Sequence["Objective"] = (),
        labelled: bool = True,
    ) -> Executor:
        """Prepares a model for the devices.

        Args:
            model: built in `scope`; compiled, unless there are objectives.
            options: those of its step.
            batch_spec: spec of a batch, or of one shard of it; a model that is not built yet is
                built for it.
            objectives: instead of what the model was compiled with.
            labelled: False: the batch holds features alone, and the executor only predicts and
                restores.

        Raises:
            UserError: the model cannot be trained or evaluated as it is.
        """
        ...
