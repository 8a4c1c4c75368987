"""An experiment: model, data, optimizer, losses and metrics, training and cluster.

A config file (`launch/configs/<name>.py`, or a user's own) has a function `get_config()` that
returns an `Experiment`. Nothing here imports TensorFlow or Keras, so mistakes are found at once.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from tftpu.config import keras_names
from tftpu.config.data import DataConfig
from tftpu.config.fields import OPERATIONAL
from tftpu.config.mesh import AUTO as AUTO_MESH
from tftpu.config.mesh import count_batch_shards, parse_mesh
from tftpu.config.model import ModelConfig
from tftpu.config.options import TrainConfig
from tftpu.config.own_classes import check_data_class, check_model_class
from tftpu.config.per_replica_batch import PerReplicaBatch
from tftpu.config.validation import at_least, check_types, fraction, one_of
from tftpu.errors import UserError
from tftpu.tpu.compiler_options import AUTO, parse_options

OPTIMIZERS = (
    *("adadelta", "adafactor", "adagrad", "adam", "adamax", "adamw", "lamb", "lars", "lion"),
    *("muon", "rmsprop", "sgd"),
)
DECAYS = ("constant", "cosine", "linear", "polynomial", "step")
SCALINGS = ("none", "linear", "sqrt")
ENGINES = ("auto", "tensorflow", "jax")


def check_optimizer(field: str, name: str) -> None:
    """Raises `UserError` unless `name`, given in lower case, is one of `OPTIMIZERS`."""
    if name == "nadam":
        raise UserError(
            f"{field} is 'nadam'. Its step also updates a value that all variables share, so it "
            f"cannot run on several replicas: use adamw, or another of {', '.join(OPTIMIZERS)}."
        )
    one_of(field, name, OPTIMIZERS)


@dataclasses.dataclass
class OptimizerConfig:
    """An optimizer by name, and its learning rate over the run.

    A plain name, `Experiment(optimizer="adam")`, selects Keras's optimizer with Keras's defaults
    and a constant learning rate.

    Attributes:
        name: one of `OPTIMIZERS`.
        learning_rate: peak learning rate; it is scaled by `scaling` before use.
        weight_decay: weight decay, decoupled except in lars; biases and norms are not decayed.
        warmup_steps: steps of a linear warmup from 0.
        decay: decay after the warmup: constant, cosine, linear, polynomial or step.
        end_factor: final rate of cosine, linear and polynomial, as a fraction of the peak.
        momentum: momentum of sgd and lars.
        nesterov: whether sgd uses Nesterov momentum.
        beta_2: decay of the second moment of adam, adamax, adamw, lamb and lion.
        scaling: scaling of the learning rate with the global batch: none, linear or sqrt.
        base_batch_size: global batch size at which `scaling` leaves the learning rate unchanged.
        decay_power: exponent of the polynomial decay.
        decay_steps: for the step decay, the steps at which the rate is multiplied by `decay_rate`.
        decay_rate: factor of the step decay.
    """

    name: str = "adamw"
    learning_rate: float = 1e-3
    weight_decay: float = 0.0
    warmup_steps: int = 0
    decay: str = "cosine"
    end_factor: float = 0.0
    momentum: float = 0.9
    nesterov: bool = False
    beta_2: float = 0.999
    scaling: str = "none"
    base_batch_size: int = 256
    decay_power: float = 2.0
    decay_steps: tuple[int, ...] = ()
    decay_rate: float = 0.1

    def validate(self) -> None:
        """Raises `UserError` for a value that is not allowed."""
        check_optimizer("optimizer.name", self.name)
        one_of("optimizer.scaling", self.scaling, SCALINGS)
        one_of("optimizer.decay", self.decay, DECAYS)
        at_least("optimizer.learning_rate", self.learning_rate, 0.0)
        at_least("optimizer.warmup_steps", self.warmup_steps, 0)
        at_least("optimizer.weight_decay", self.weight_decay, 0.0)
        at_least("optimizer.base_batch_size", self.base_batch_size, 1)
        at_least("optimizer.decay_power", self.decay_power, 0.0)
        at_least("optimizer.decay_rate", self.decay_rate, 0.0)
        fraction("optimizer.end_factor", self.end_factor)
        fraction("optimizer.momentum", self.momentum)
        fraction("optimizer.beta_2", self.beta_2)
        if self.decay == "step" and not self.decay_steps:
            raise UserError(
                "optimizer.decay is 'step' but optimizer.decay_steps is empty: name the steps at "
                "which the rate is multiplied by optimizer.decay_rate, such as (30000, 60000)."
            )
        if self.decay_steps and self.decay != "step":
            raise UserError(
                f"optimizer.decay_steps is {self.decay_steps}, but optimizer.decay is "
                f"{self.decay!r}: decay_steps works only with the decay 'step', and must "
                "otherwise be ()."
            )
        if min(self.decay_steps, default=1) < 1 or sorted(self.decay_steps) != [*self.decay_steps]:
            raise UserError(
                f"optimizer.decay_steps is {self.decay_steps}: give steps of 1 or more in rising "
                "order, such as (30000, 60000)."
            )


@dataclasses.dataclass
class ClusterConfig:
    """The devices of a run.

    Attributes:
        tpu: auto, local, none, or the name of a TPU.
        virtual_devices: number of devices to split the CPU into (on the JAX engine, the CPU of
            each host); None uses the real devices.
        engine: tensorflow, jax, or auto: jax if a mesh is set, if Keras's backend is JAX, or if
            only JAX can use the TPU; otherwise tensorflow.
        mesh: axes and sizes of the JAX engine's mesh, such as "fsdp:8" or "data:2,fsdp:-1"; None
            replicates the model on every device; auto shards it only as far as the memory of the
            TPU requires.
        compiler_options: XLA options for the JAX engine's train step on TPUs, such as
            "xla_tpu_scoped_vmem_limit_kib=65536"; auto uses tftpu's options for the TPU generation.
        host_timeout: for the JAX engine on several hosts, seconds without a sign of life after
            which a host counts as lost and the other hosts stop.
    """

    tpu: str = "auto"
    virtual_devices: int | None = None
    engine: str = "auto"
    mesh: str | None = None
    compiler_options: str = AUTO
    host_timeout: float = 30.0

    def validate(self) -> None:
        """Raises `UserError` for a value that is not allowed, or for conflicting values."""
        if self.virtual_devices is not None:
            at_least("virtual_devices", self.virtual_devices, 1)
            if self.tpu not in ("auto", "none"):
                raise UserError(
                    f"virtual_devices={self.virtual_devices} splits the CPU, but tpu={self.tpu!r} "
                    "asks for a TPU: set only one of the two."
                )
        one_of("engine", self.engine, ENGINES)
        at_least("host_timeout", self.host_timeout, 1.0)
        if self.mesh is not None:
            if self.mesh != AUTO_MESH:
                parse_mesh(self.mesh)
            if self.engine == "tensorflow":
                raise UserError(
                    f"mesh={self.mesh!r} works only with the JAX engine, but engine='tensorflow' "
                    "is set: leave one of the two out."
                )
        if self.compiler_options != AUTO:
            parse_options(self.compiler_options)

    @property
    def known_data_shards(self) -> int:
        """The number of shards of a global batch, counting mesh axes of unknown size as 1."""
        if self.mesh in (None, AUTO_MESH):
            return self.virtual_devices or 1
        sizes = {axis: max(1, size) for axis, size in parse_mesh(self.mesh).items()}
        return count_batch_shards(sizes)


@dataclasses.dataclass
class Experiment:
    """A complete run, as `config.json` in the workdir stores it.

    Attributes:
        model: hyper-parameters of the model, and how to build it.
        data: the data set and its global batch.
        optimizer: `tftpu.OptimizerConfig`, one of the names in `OPTIMIZERS`, or a Keras optimizer.
        loss: as for `keras.Model.compile`: a name ("mse"), a `keras.losses.Loss`, a module-level
            function, or a dict or list of them, one for each output. None is the cross-entropy of
            class labels and logits, with `train.label_smoothing`, and accuracy as the metric.
        metrics: names ("AUC"), `keras.Metric` objects, functions, or a dict of them by output.
        weighted_metrics: metrics to which sample weights apply.
        callbacks: Keras callbacks. They see each evaluation as the end of an epoch.
        train: length and options of training.
        cluster: the devices.
        config_file: path of the file given as `--config`; set by the command line.
    """

    model: ModelConfig
    data: DataConfig
    optimizer: Any = dataclasses.field(default_factory=OptimizerConfig)
    loss: Any = None
    metrics: Sequence[Any] | Mapping[str, Any] = ()
    weighted_metrics: Sequence[Any] | Mapping[str, Any] = ()
    callbacks: Sequence[Any] = ()
    train: TrainConfig = dataclasses.field(default_factory=TrainConfig)
    cluster: ClusterConfig = dataclasses.field(default_factory=ClusterConfig, metadata=OPERATIONAL)
    config_file: str = dataclasses.field(default="", metadata=OPERATIONAL)

    def __post_init__(self) -> None:
        check_model_class(self.model)
        check_data_class(self.data)

    def validate(self, data_shards: int | None = None) -> None:
        """Checks every field, and that the global batch can be divided among the replicas.

        Args:
            data_shards: number of replicas that share the global batch; None takes it from
                `cluster`.

        Raises:
            UserError: the first mistake found.
        """
        self.validate_fields()
        self.data.validate()
        self.model.validate(self.divide_batch(data_shards))

    def validate_fields(self) -> None:
        """Checks every field, without calling `validate` of the model and the data.

        Raises:
            UserError: the first mistake found.
        """
        check_model_class(self.model)
        check_data_class(self.data)
        for group in ("model", "data", "train", "cluster"):
            check_types(group, getattr(self, group))
        self._check_optimizer()
        self._check_adapters()
        self._check_context()
        self.cluster.validate()
        self.train.validate()
        keras_names.check_losses("loss", self.loss)
        keras_names.check_metrics("metrics", self.metrics)
        keras_names.check_metrics("weighted_metrics", self.weighted_metrics)
        if self.loss is not None and self.train.label_smoothing:
            raise UserError(
                f"train.label_smoothing={self.train.label_smoothing} changes only the default "
                "loss, but the experiment has its own loss. Set it there, for example "
                "keras.losses.CategoricalCrossentropy(label_smoothing=0.1)."
            )

    def divide_batch(self, data_shards: int | None = None) -> PerReplicaBatch:
        """Returns the microbatch of a global batch that one replica computes at a time.

        Args:
            data_shards: see `validate`.
        """
        shards = data_shards or self.cluster.known_data_shards
        microbatches = self.train.gradient_accumulation_steps
        norm_batch = getattr(self.model, "norm_batch", 1)
        group = norm_batch if isinstance(norm_batch, int) and norm_batch > 0 else 1
        return PerReplicaBatch(self.data.global_batch_size, shards, microbatches, group)

    @property
    def prepared_data(self) -> DataConfig:
        """The data set that the model trains on: `data` after the model's `prepare_data`."""
        return self.model.prepare_data(self.data)

    @property
    def best_metric(self) -> str:
        """`train.best_metric`; "acc" and "accuracy" are spelled as in the experiment's metrics."""
        name = self.train.best_metric
        named = keras_names.texts_in([self.metrics, self.weighted_metrics])
        other = {"accuracy": "acc", "acc": "accuracy"}.get(name, "")
        return other if other in named and name not in named else name

    def _check_context(self) -> None:
        """Raises `UserError` if rows of text are longer than the model's context."""
        takes, rows = (getattr(part, "context", None) for part in (self.model, self.data))
        if isinstance(takes, int) and isinstance(rows, int) and rows > takes:
            raise UserError(
                f"data.context is {rows}, but model.context is {takes}: rows of text must not be "
                f"longer than the model's context. Give --config.data.context={takes}, or "
                f"--config.model.context={rows}."
            )

    def _check_adapters(self) -> None:
        model = self.model
        at_least("model.lora", model.lora, 0)
        one_of("model.lora_base", model.lora_base, ("", "int8", "int4"))
        for name in ("lora_targets", "lora_base"):
            if getattr(model, name) and not model.lora:
                raise UserError(
                    f"model.{name} works only with low-rank adapters: set their rank, such as "
                    "model.lora=8."
                )

    def _check_optimizer(self) -> None:
        if isinstance(self.optimizer, OptimizerConfig):
            check_types("optimizer", self.optimizer)
            self.optimizer.validate()
        elif isinstance(self.optimizer, str):
            check_optimizer("optimizer", self.optimizer.lower())
