"""The protocol of an engine: the interface between the trainer and the code that runs its steps.

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
from tftpu.errors import UserError
from tftpu.tpu.hardware import Hardware

if TYPE_CHECKING:  # checkpoints import this file, and must not import Keras
    import keras

    from tftpu.engines.data.gate import Gate
    from tftpu.engines.objectives.objective import Objective

Nest = Any  # a copy of tftpu.tensors.Nest, whose module imports Keras
# A data set: a `tf.data.Dataset`, `Arrays`, `PyBatches`, `Stream`, or a pipeline of
# `tftpu.input_pipelines`.
Dataset = Any


class BatchHooks(Protocol):
    """Hooks that run before and after each execution of an evaluation.

    Attributes:
        every: the number of batches of an execution, as in `steps_per_execution`.
    """

    every: int

    def begin(self, batch: int) -> None:
        """Runs before the execution whose first batch has this number."""
        ...

    def end(self, batch: int, sums: Any) -> bool:
        """Runs after an execution, with the sums so far; returns whether to stop evaluating."""
        ...


class LoopResult(NamedTuple):
    """The result of one device loop.

    Attributes:
        sums: the sums of the losses and metrics over the loop, float64; `Executor.train_sums` reads
            them.
        input_wait: the seconds that the loop waited for its input. Where the host runs ahead of the
            devices, as on a TPU, the devices waited at most this long.
        steps: the number of steps, fewer than requested if the data ended.
    """

    sums: Any
    input_wait: float
    steps: int


@dataclasses.dataclass(frozen=True)
class Epoch:
    """The length of one pass over a data set.

    Attributes:
        steps: number of batches.
        examples: number of examples of a batch.
        last: the number of examples of the last batch; None if it has as many as the others.

    Raises:
        UserError: the last batch is larger than the others.
    """

    steps: int
    examples: int
    last: int | None = None

    def __post_init__(self) -> None:
        if self.last is not None and self.last > self.examples:
            raise UserError(explain_size(self.examples, self.last))


def explain_size(examples: int, found: int | None = None, last: int | None = None) -> str:
    """Returns the error message for a batch whose size differs from earlier batches.

    Args:
        examples: the expected number of examples.
        found: the actual number of examples; None if it is unknown.
        last: the expected number of examples in the last batch of an epoch, if not `examples`.
    """
    held = "a different number of" if found is None else f"{found}"
    ending = f", and the last one {last}" if last not in (None, examples) else ""
    return (
        f"A batch holds {held} examples, but each batch of an epoch must hold {examples}{ending}, "
        "as in the first pass. A generator may yield batches of any size; with steps= in place of "
        "epochs=, batches are filled up to one size."
    )


class Exchange(Protocol):
    """Exchange of texts between hosts. All hosts use the same names in the same order."""

    def collect(self, name: str, text: str) -> list[str]:
        """Returns the texts of all hosts under a name, by host; [] on hosts but the chief."""
        ...

    def announce(self, name: str, text: str) -> str:
        """Broadcasts the chief's text under a name; returns it on all hosts."""
        ...


class Hosts(Protocol):
    """The processes that train together. All of them call these methods in the same order."""

    @property
    def index(self) -> int:
        """The index of this process, from 0."""
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
        """The exchange of texts between hosts; None if one host writes all checkpoints."""
        ...

    def any(self, *flags: bool) -> list[bool]:
        """Returns, for each flag, whether it is set on any host."""
        ...

    def from_chief(self, step: int | None) -> int | None:
        """Broadcasts the chief's value to all hosts (a barrier)."""
        ...

    def together(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context that all hosts enter; a host that ends inside it counts as lost."""
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
        """Writes an event with named integers into the trace."""
        ...


class SumsLayout(Protocol):
    """The layout of the sums of losses and metrics."""

    @property
    def names(self) -> Sequence[str]:
        """The names of the summed values. Only sums with equal names can be added."""
        ...

    @property
    def result_names(self) -> Sequence[str] | None:
        """The names of the results; None if they are still unknown before the first step."""
        ...

    def read(self, sums: Any) -> dict[str, float]:
        """Returns the means of losses and metrics by name."""
        ...


class TrainSumsLayout(SumsLayout, Protocol):
    """The layout of the sums of training steps."""

    def read_gradients(self, sums: Any) -> dict[str, float]:
        """Returns statistics of the gradients, such as their mean norm; {} if unknown."""
        ...

    def compute_loss(self, sums: Any) -> float:
        """Returns the mean of the loss, without the metrics."""
        ...

    def scale(self, sums: Any, weight: float) -> Any:
        """Multiplies the sums of a smaller batch by its size relative to a complete batch."""
        ...


class Executor(Protocol):
    """A compiled Keras model, prepared for an engine's devices."""

    @property
    def train_sums(self) -> TrainSumsLayout:
        """The layout of the sums of training steps."""
        ...

    @property
    def eval_sums(self) -> SumsLayout:
        """The layout of the sums of an evaluation."""
        ...

    @property
    def step(self) -> int:
        """The number of training steps done, skipped ones included."""
        ...

    @property
    def optimizer_name(self) -> str:
        """The class name of the (first) optimizer."""
        ...

    @property
    def evaluation_compiled(self) -> bool:
        """True after the first `evaluate`, which compiles the evaluation loop."""
        ...

    @property
    def learning_rate(self) -> float:
        """The learning rate of the (first) optimizer at this step."""
        ...

    def begin_at(self, step: int) -> None:
        """Sets the number of steps done, without training them."""
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

    def training(self, shard_spec: Nest, examples: int | None = None) -> "TrainLoop":
        """Prepares training on batches whose shards have this spec.

        Args:
            shard_spec: the spec of a shard.
            examples: the number of examples of a batch, if padding fills up its shards.

        Raises:
            UserError: the batch cannot be divided, or the model cannot be trained.
        """
        ...

    def bare(self, shard_spec: Nest, batch: Any) -> Callable[[int], None]:
        """Returns a function that runs a number of training steps on one batch, and waits for them.

        Nothing is fetched or logged between the steps. The difference from the time of a run is the
        overhead of everything but the steps.

        Args:
            shard_spec: spec of a shard of the batch.
            batch: a batch of `Engine.batches`.
        """
        ...

    def check_evaluation(self, batch_spec: Nest, dataset: Dataset) -> None:
        """Traces an evaluation, so that an error appears before training starts.

        Args:
            batch_spec: the spec of the padded global batches, as `Engine.evaluation_spec` returns
                it.
            dataset: the data set to evaluate.
        """
        ...

    def evaluate(
        self,
        dataset: Dataset,
        compiling: Callable[[], contextlib.AbstractContextManager[Any]],
        hooks: BatchHooks | None = None,
    ) -> Any:
        """Evaluates a finite data set; returns the sums, which `eval_sums` reads.

        Args:
            dataset: a data set with batches of `(x, y)` or `(x, y, sample_weight)`.
            compiling: a function that returns a context to enter while the loop is compiled.
            hooks: the hooks that run before and after each execution, or None.
        """
        ...

    def predictions(self, dataset: Dataset, ahead: bool = True) -> Iterator[Nest]:
        """Yields the outputs of each batch of a finite data set, in order, as NumPy arrays.

        Args:
            dataset: the data set.
            ahead: whether the devices compute a batch ahead of the reader.
        """
        ...

    def begin_epoch(self) -> None:
        """Begins an epoch; called before its first step."""
        ...

    def finish_epoch(self, sums: Any) -> Any:
        """Returns the sums of a whole epoch, from the sums of its steps."""
        ...

    def finish_training(self) -> None:
        """Finishes training; called after the last step of a run."""
        ...

    def predict_batch(self, x: Nest) -> Nest:
        """Returns the outputs for one batch of features of any size, as NumPy arrays.

        The batch is not divided, so it may have fewer examples than there are shards.
        """
        ...

    def compiled(
        self, function: Callable[..., Any], replaces_state: bool = False
    ) -> Callable[..., Any]:
        """Compiles a function as `compile_function` does, with the weights that evaluation uses."""
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
    def model_flops(self) -> int | None:
        """The model FLOPs of a global batch, forward and backward; None if unknown."""
        ...

    def compiled(self, batches: Iterator[Any]) -> bool:
        """Returns whether `run` has compiled the device loop for the next batch."""
        ...

    def run(self, batches: Iterator[Any], steps: int) -> LoopResult:
        """Runs training steps on the devices.

        Args:
            batches: an iterator of `Engine.batches`.
            steps: the number of steps; each takes one global batch.
        """
        ...

    def run_each(self, batches: Iterator[Any], steps: int) -> LoopResult:
        """Runs training steps on whole batches in host memory.

        Args:
            batches: an iterator over batches as nested NumPy arrays, all of one size.
            steps: the number of steps; fewer are run if there are fewer batches.
        """
        ...

    def diverged(self, sums: Any) -> bool:
        """Returns whether the sums of a loop show a loss that is no longer finite."""
        ...


class Engine(Protocol):
    """Devices that run steps, and the division of a global batch among them."""

    @property
    def description(self) -> str:
        """The devices in words, such as "8 replicas"."""
        ...

    @property
    def data_shards(self) -> int:
        """The number of shards that a global batch is divided into."""
        ...

    @property
    def hosts(self) -> Hosts:
        """The processes that train together."""
        ...

    @property
    def hardware(self) -> Hardware:
        """The chips; their price and peak FLOPs are known if their generation is."""
        ...

    @property
    def compiler_options(self) -> Mapping[str, str]:
        """The XLA options that the engine sets to compile the train step."""
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

    def epoch(self, dataset: Dataset, endless: bool = False) -> Epoch | None:
        """Returns the length of one pass over a data set; this may read all of it.

        Args:
            dataset: the data set.
            endless: whether an endless data set is allowed.

        Returns:
            The length; None for a stream, and for an endless data set if that is allowed.

        Raises:
            UserError: the argument is not a data set, or never ends.
        """
        ...

    def training_spec(
        self,
        dataset: Dataset,
        microbatches: int,
        class_weight: dict[int, float] | None,
    ) -> Nest:
        """Returns the spec of one shard of the complete global batches that `batches` yields.

        Args:
            dataset, class_weight: as for `batches`.
            microbatches: number of microbatches that a shard is divided into.

        Raises:
            UserError: the argument is not a data set, is empty or not batched, or cannot be
                divided.
        """
        ...

    def count_examples(self, dataset: Dataset) -> int:
        """Returns the number of examples of a complete global batch."""
        ...

    def last_spec(self, spec: Nest, examples: int, microbatches: int) -> Nest:
        """Returns the spec of one shard of the smaller batch that an epoch ends with.

        Args:
            spec: the spec of one shard of a complete batch.
            examples: number of examples of the smaller batch.
            microbatches: number of microbatches that a shard is divided into.

        Raises:
            UserError: the batch cannot be divided.
        """
        ...

    def building_spec(self, shard_spec: Nest) -> Nest:
        """Returns the spec of the batch that a step passes to the model.

        Args:
            shard_spec: the spec of one shard of a global batch.
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
            dataset: a data set of global batches; a finite one is repeated.
            position: number of batches to skip.
            class_weight: weight of each label, which becomes the sample weight.
            epoch: the length of an epoch. If its last batch is smaller, its shards are padded,
                and the train loop ignores the padding. With None, batches may span two epochs,
                and all are complete.
            gate: the gate that holds the data set back; None for unlimited reading ahead.
        """
        ...

    def whole_batches(
        self,
        dataset: Dataset,
        position: int,
        class_weight: dict[int, float] | None,
        epoch: Epoch | None,
        gate: "Gate | None" = None,
    ) -> Iterator[Any]:
        """Returns an endless iterator over whole batches, for the steps of `prepare_own_steps`.

        Args:
            dataset, position, class_weight, epoch, gate: as for `batches`; no batch is padded.
        """
        ...

    def whole_spec(self, dataset: Dataset, class_weight: dict[int, float] | None = None) -> Nest:
        """Returns the spec of a whole batch as `keras.KerasTensor`s, for a model's own steps.

        Args:
            dataset, class_weight: as for `batches`.
        """
        ...

    def evaluation_spec(self, dataset: Dataset) -> Nest:
        """Returns the spec of the padded global batches of an evaluation.

        Raises:
            UserError: the argument is not a finite data set.
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
            model: a model that was built in `scope`, and compiled unless there are objectives.
            options: the options of the train step.
            batch_spec: the spec of a batch, or of one shard of it, which builds the model if
                needed.
            objectives: the objectives that replace the compiled loss and optimizer.
            labelled: whether batches have labels; without them the executor only predicts and
                restores.

        Raises:
            UserError: the model cannot be trained or evaluated as it is.
        """
        ...

    def prepare_own_steps(
        self, model: "keras.Model", batch_spec: Nest, reason: UserError, labelled: bool = True
    ) -> Executor:
        """Prepares a model whose own steps train it, each on a whole batch.

        Args:
            model: a model that was built in `scope`, and compiled if batches have labels.
            batch_spec: the spec of a batch, which builds the model if needed.
            reason: the reason why the engine's step, which divides a batch, cannot train it.
            labelled: whether batches have labels; without them the executor only predicts.

        Raises:
            UserError: the model's own steps cannot run on these devices.
        """
        ...
