"""The dataclasses of an experiment: model, data, optimizer, training and cluster.

A config file (`launch/configs/<name>.py`, or a user's own) has a function `get_config()` that
returns an `Experiment`. Nothing here imports TensorFlow or Keras, so mistakes are found at once.
"""

import dataclasses

from tftpu.config.options import Train
from tftpu.config.share import Share
from tftpu.config.validation import at_least, check_types, fraction, one_of
from tftpu.errors import UserError

OPTIMIZERS = ("adafactor", "adamw", "lamb", "lars", "lion", "muon", "sgd")
DECAYS = ("constant", "cosine", "linear", "polynomial", "step")
SCALINGS = ("none", "linear", "sqrt")


@dataclasses.dataclass
class Model:
    """Hyper-parameters of a model; each family of the zoo adds its own fields.

    Attributes:
        name: name of the Keras model.
        init_from: initial weights, as `tftpu.models.load_weights` accepts them.
        freeze: globs over the paths of variables that are not trained, such as
            "stem*,stage1_*".
    """

    name: str = ""
    init_from: str = ""
    freeze: str = ""

    def validate(self, share: Share) -> None:
        """Raises `UserError` for a value that the family does not allow.

        Args:
            share: the part of a global batch that one replica computes at a time.
        """


@dataclasses.dataclass
class Data:
    """A data set and its global batch; each kind of source adds its own fields.

    Attributes:
        name: name of the data set.
        global_batch_size: examples per step, over all replicas and microbatches.
        data_dir: folder of the prepared data; None is the cache folder.
    """

    name: str = ""
    global_batch_size: int = 128
    data_dir: str | None = None

    def validate(self) -> None:
        """Raises `UserError` for a value that the source does not allow."""
        at_least("data.global_batch_size", self.global_batch_size, 1)


@dataclasses.dataclass
class Optimizer:
    """An optimizer by name, and its learning rate over the run.

    Attributes:
        name: one of `OPTIMIZERS`.
        learning_rate: the peak; at `base_batch_size` examples per step unless `scaling` is "none".
        scaling: scaling of the learning rate with the global batch: none, linear or sqrt.
        base_batch_size: global batch that `learning_rate` is given for.
        warmup_steps: steps of a linear warmup from 0.
        decay: shape of the decay to `end_factor` of the peak at the last step.
        end_factor: final learning rate as a share of the peak.
        decay_power: exponent of the polynomial decay.
        decay_steps: for the step decay, the steps at which the rate is multiplied by `decay_rate`.
        decay_rate: factor of the step decay.
        weight_decay: biases and norms are left out; it is decoupled, except in lars.
        momentum: momentum of sgd and lars.
        nesterov: whether sgd uses Nesterov momentum.
        beta_2: decay of the second moment of adamw, lamb and lion.
    """

    name: str = "adamw"
    learning_rate: float = 1e-3
    scaling: str = "none"
    base_batch_size: int = 256
    warmup_steps: int = 0
    decay: str = "cosine"
    end_factor: float = 0.0
    decay_power: float = 2.0
    decay_steps: tuple[int, ...] = ()
    decay_rate: float = 0.1
    weight_decay: float = 0.0
    momentum: float = 0.9
    nesterov: bool = False
    beta_2: float = 0.999

    def validate(self) -> None:
        """Raises `UserError` for a value that is not allowed."""
        one_of("optimizer.name", self.name, OPTIMIZERS)
        one_of("optimizer.scaling", self.scaling, SCALINGS)
        one_of("optimizer.decay", self.decay, DECAYS)
        at_least("optimizer.learning_rate", self.learning_rate, 0.0)
        at_least("optimizer.warmup_steps", self.warmup_steps, 0)
        at_least("optimizer.weight_decay", self.weight_decay, 0.0)
        at_least("optimizer.base_batch_size", self.base_batch_size, 1)
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
                f"optimizer.decay_steps is {self.decay_steps}, and optimizer.decay is "
                f"{self.decay!r}: decay_steps=() is for all decays but 'step'."
            )
        if min(self.decay_steps, default=1) < 1 or sorted(self.decay_steps) != [*self.decay_steps]:
            raise UserError(
                f"optimizer.decay_steps is {self.decay_steps}: give steps of 1 or more in rising "
                "order, such as (30000, 60000)."
            )


@dataclasses.dataclass
class Cluster:
    """The devices of a run.

    Attributes:
        tpu: auto, local, none, or the name of a TPU.
        virtual_devices: number of devices that the CPU is split into; None uses the real ones.
    """

    tpu: str = "auto"
    virtual_devices: int | None = None

    def validate(self) -> None:
        """Raises `UserError` for a value that is not allowed, or for conflicting values."""
        if self.virtual_devices is not None:
            at_least("virtual_devices", self.virtual_devices, 1)
            if self.tpu not in ("auto", "none"):
                raise UserError(
                    f"virtual_devices={self.virtual_devices} splits the CPU and tpu={self.tpu!r} "
                    "asks for a TPU: set only one of them."
                )


@dataclasses.dataclass
class Experiment:
    """A complete run, as `config.json` in the workdir stores it.

    Attributes:
        model: hyper-parameters of the model.
        data: the data set and its global batch.
        optimizer: the optimizer and its learning rate.
        train: length and options of training.
        cluster: the devices.
    """

    model: Model
    data: Data
    optimizer: Optimizer = dataclasses.field(default_factory=Optimizer)
    train: Train = dataclasses.field(default_factory=Train)
    cluster: Cluster = dataclasses.field(default_factory=Cluster)

    def validate(self, data_shares: int | None = None) -> None:
        """Checks every field, and that the global batch can be divided among the replicas.

        Args:
            data_shares: number of replicas that share the global batch; None takes it from
                `cluster`.

        Raises:
            UserError: the first mistake found.
        """
        for group in dataclasses.fields(self):
            check_types(group.name, getattr(self, group.name))
        self.cluster.validate()
        self.data.validate()
        self.optimizer.validate()
        self.train.validate()
        shares = data_shares or self.cluster.virtual_devices or 1
        microbatches = self.train.gradient_accumulation_steps
        norm_batch = getattr(self.model, "norm_batch", 1)
        group = norm_batch if isinstance(norm_batch, int) and norm_batch > 0 else 1
        self.model.validate(Share(self.data.global_batch_size, shares, microbatches, group))
