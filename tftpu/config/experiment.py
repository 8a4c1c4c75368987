"""The dataclasses of an experiment: what is trained, on what, how. Validation; JSON in and out.

A config file (`launch/configs/<name>.py`, or a user's own) has a function `get_config()` that
returns an `Experiment`. Nothing here imports TensorFlow or Keras, so a mistake is found at once.
"""

import dataclasses
import importlib
import json
import math
import re
import types
import typing
from typing import Any, NamedTuple

from tftpu.errors import UserError, did_you_mean

PRECISIONS = ("auto", "float32", "mixed_bfloat16", "mixed_float16")
OPTIMIZERS = ("adafactor", "adamw", "lamb", "lars", "lion", "muon", "sgd")
DECAYS = ("constant", "cosine", "linear", "polynomial", "step")
SCALINGS = ("none", "linear", "sqrt")
WRITERS = ("mlflow", "wandb")
ON_NAN = ("stop", "rollback")


@dataclasses.dataclass
class Model:
    """Hyper-parameters of a model; each family of the zoo adds its own fields."""

    name: str = ""
    init_from: str = ""  # weights that training starts from, as `tftpu.models.load_weights` takes
    freeze: str = ""  # globs over the paths of variables that it leaves alone: "stem*,stage1_*"

    def validate(self, per_step: "Share") -> None:
        """Raises `UserError` for a value that the family does not allow."""


@dataclasses.dataclass
class Data:
    """A data set and its global batch; each kind of source adds its own fields."""

    name: str = ""
    global_batch_size: int = 128  # examples a step, over all replicas and microbatches
    data_dir: str | None = None  # where prepared data lies; None: the cache folder

    def validate(self) -> None:
        """Raises `UserError` for a value that the source does not allow."""
        _at_least("data.global_batch_size", self.global_batch_size, 1)


@dataclasses.dataclass
class Optimizer:
    """The optimizer by name, and its learning rate over the run."""

    name: str = "adamw"
    learning_rate: float = 1e-3  # at `base_batch_size` examples a step if `scaling` is not "none"
    scaling: str = "none"  # of the learning rate with the global batch: none, linear, sqrt
    base_batch_size: int = 256
    warmup_steps: int = 0  # linear, from 0
    decay: str = "cosine"  # to `end_factor` of the peak at the last step
    end_factor: float = 0.0
    decay_power: float = 2.0  # polynomial only
    decay_steps: tuple[int, ...] = ()  # step only: where the rate is multiplied by `decay_rate`
    decay_rate: float = 0.1
    weight_decay: float = 0.0  # decoupled; biases and norms are left out
    momentum: float = 0.9  # sgd and lars
    nesterov: bool = False
    beta_2: float = 0.999  # adamw, lamb and lion

    def validate(self) -> None:
        _one_of("optimizer.name", self.name, OPTIMIZERS)
        _one_of("optimizer.scaling", self.scaling, SCALINGS)
        _one_of("optimizer.decay", self.decay, DECAYS)
        _at_least("optimizer.learning_rate", self.learning_rate, 0.0)
        _at_least("optimizer.warmup_steps", self.warmup_steps, 0)
        _at_least("optimizer.weight_decay", self.weight_decay, 0.0)
        _at_least("optimizer.base_batch_size", self.base_batch_size, 1)
        _fraction("optimizer.end_factor", self.end_factor)
        _fraction("optimizer.momentum", self.momentum)
        _fraction("optimizer.beta_2", self.beta_2)
        if self.decay == "step" and not self.decay_steps:
            raise UserError(
                "optimizer.decay is 'step' but optimizer.decay_steps is empty: name the steps at "
                "which the rate is multiplied by optimizer.decay_rate, as (30000, 60000)."
            )


@dataclasses.dataclass
class Train:
    """The run: its length, what happens how often, and the options of the step."""

    steps: int = 1000
    steps_per_loop: int = 50  # device steps between two visits to the host
    log_every: int = 50
    eval_every: int = 0  # 0: at the end only
    checkpoint_every: int = 0  # steps; 0: at the end only
    checkpoint_minutes: float = 0.0  # besides, so many minutes after the last one; 0: not
    keep: int = 3  # newest checkpoints kept; the best one is kept besides
    keep_every: int = 0  # checkpoints of its multiples are kept, too; 0: none
    grace_seconds: float = 25.0  # seconds from a SIGTERM to the end of the process
    watchdog_seconds: float | None = None  # ends a process that finished no step for this long
    best_metric: str = ""  # of the evaluation, as "accuracy"; empty: the loss
    gradient_accumulation_steps: int = 1  # microbatches a step
    global_clipnorm: float | None = None  # global norm of the reduced gradient
    label_smoothing: float = 0.0
    ema_momentum: float | None = (
        None  # decay of the average of the weights; evaluation uses the average
    )
    precision: str = "auto"
    seed: int = 0
    profile: str = ""  # "100:110": a TensorBoard profile of those steps; "slow": of slow ones
    writers: tuple[str, ...] = ()  # more sinks of the metrics: mlflow, wandb
    on_nan: str = "stop"
    max_rollbacks: int = 3

    def validate(self) -> None:
        for field in (
            "steps",
            "steps_per_loop",
            "log_every",
            "keep",
            "gradient_accumulation_steps",
        ):
            _at_least(f"train.{field}", getattr(self, field), 1)
        for field in ("eval_every", "checkpoint_every", "keep_every", "max_rollbacks"):
            _at_least(f"train.{field}", getattr(self, field), 0)
        _at_least("train.checkpoint_minutes", self.checkpoint_minutes, 0.0)
        _at_least("train.grace_seconds", self.grace_seconds, 1.0)
        if self.watchdog_seconds is not None and not self.watchdog_seconds > 0:
            raise UserError(
                f"train.watchdog_seconds is {self.watchdog_seconds}: it must be above 0, or None."
            )
        if self.global_clipnorm is not None and not self.global_clipnorm > 0:
            raise UserError(
                f"train.global_clipnorm is {self.global_clipnorm}: it must be above 0, or None."
            )
        if self.ema_momentum is not None and not 0 < self.ema_momentum < 1:
            raise UserError(
                f"train.ema_momentum is {self.ema_momentum}: it must lie between 0 and 1, or be None."
            )
        _fraction("train.label_smoothing", self.label_smoothing)
        _one_of("train.precision", self.precision, PRECISIONS)
        _one_of("train.on_nan", self.on_nan, ON_NAN)
        profile_plan(self.profile)
        for name in self.writers:
            _one_of("train.writers", name, WRITERS)


@dataclasses.dataclass
class Cluster:
    """Where the run takes place; `--tpu` and `--virtual_devices` of the command line."""

    tpu: str = "auto"  # auto, local, none, or the name of a TPU
    virtual_devices: int | None = None  # splits the CPU into so many virtual devices

    def validate(self) -> None:
        if self.virtual_devices is not None:
            _at_least("--virtual_devices", self.virtual_devices, 1)
            if self.tpu not in ("auto", "none"):
                raise UserError(
                    f"--virtual_devices={self.virtual_devices} splits the CPU and --tpu={self.tpu} asks for a "
                    "TPU: give one of the two."
                )


@dataclasses.dataclass
class Share:
    """How a global batch is cut: what one microbatch on one replica holds."""

    global_batch_size: int
    replicas: int
    gradient_accumulation_steps: int

    @property
    def examples(self) -> int:
        """Examples of one microbatch on one replica.

        Raises:
            UserError: the replicas and microbatches do not divide the global batch.
        """
        parts = self.replicas * self.gradient_accumulation_steps
        if self.global_batch_size % parts:
            lower = self.global_batch_size // parts * parts
            near = f"{lower} or {lower + parts}" if lower else f"{parts}"
            times = (
                f" x {self.gradient_accumulation_steps} microbatches"
                if self.gradient_accumulation_steps > 1
                else ""
            )
            raise UserError(
                f"A global batch of {self.global_batch_size} cannot be shared by {self.replicas} "
                f"replicas{times}: use a multiple of {parts}, as {near}."
            )
        return self.global_batch_size // parts


@dataclasses.dataclass
class Experiment:
    """All of a run. `config.json` in the workdir holds exactly this."""

    model: Model
    data: Data
    optimizer: Optimizer = dataclasses.field(default_factory=Optimizer)
    train: Train = dataclasses.field(default_factory=Train)
    cluster: Cluster = dataclasses.field(default_factory=Cluster)

    def validate(self, replicas: int | None = None) -> None:
        """Checks every field, and the batch against the replicas where these are known.

        Args:
            replicas: how many will share the global batch; None: taken from `cluster`.

        Raises:
            UserError: the first mistake found.
        """
        for group in dataclasses.fields(self):
            check_types(group.name, getattr(self, group.name))
        self.cluster.validate()
        self.data.validate()
        self.optimizer.validate()
        self.train.validate()
        replicas = replicas or self.cluster.virtual_devices or 1
        share = Share(self.data.global_batch_size, replicas, self.train.gradient_accumulation_steps)
        self.model.validate(share)
        _ = share.examples  # raises if the batch cannot be shared


class ProfilePlan(NamedTuple):
    """Windows of steps, each from its first up to the one it ends before; and slow loops."""

    windows: tuple[tuple[int, int], ...]
    slow: bool


def profile_plan(text: str) -> ProfilePlan:
    """What to profile: "100:110" is one window, "100:110,slow" that and slow device loops."""
    windows, slow = [], False
    for item in filter(None, text.split(",")):
        match = re.fullmatch(r"(\d+):(\d+)", item)
        if item == "slow":
            slow = True
        elif match and int(match[1]) < int(match[2]):
            windows.append((int(match[1]), int(match[2])))
        else:
            raise UserError(
                f"train.profile is {text!r}: it must be FIRST:LAST with FIRST below LAST, as "
                "100:110, or slow, or several of them with commas between."
            )
    return ProfilePlan(tuple(windows), slow)


def to_json(experiment: Experiment) -> str:
    """The experiment as JSON; `from_json` reads it back to an equal one."""

    def encode(value: Any) -> Any:
        if dataclasses.is_dataclass(value):
            fields = {f.name: encode(getattr(value, f.name)) for f in dataclasses.fields(value)}
            return {"class": f"{type(value).__module__}.{type(value).__qualname__}", **fields}
        return list(value) if isinstance(value, tuple) else value

    return json.dumps(encode(experiment), indent=2) + "\n"


def from_json(text: str) -> Experiment:
    """The experiment that `to_json` wrote.

    Raises:
        UserError: not JSON, not an experiment, or a class that is no longer there.
    """

    def decode(value: Any) -> Any:
        if isinstance(value, dict):
            module, _, name = value["class"].rpartition(".")
            cls = getattr(importlib.import_module(module), name)
            if not dataclasses.is_dataclass(cls):
                raise TypeError(f"{value['class']} is not a dataclass")
            return cls(**{k: decode(v) for k, v in value.items() if k != "class"})
        return tuple(value) if isinstance(value, list) else value

    try:
        experiment = decode(json.loads(text))
    except (ValueError, TypeError, KeyError, ImportError, AttributeError) as error:
        raise UserError(f"config.json cannot be read as an experiment: {error}.") from error
    if not isinstance(experiment, Experiment):
        raise UserError("config.json holds no experiment.")
    return experiment


def check_types(group: str, value: Any) -> None:
    """Raises `UserError` for a field of a config that holds another type than it is declared with.

    Args:
        group: what to call the config, as "train".
        value: a dataclass; fields of fields are looked at, too.
    """
    kinds = typing.get_type_hints(type(value))
    for field in dataclasses.fields(value):
        name, found = f"{group}.{field.name}", getattr(value, field.name)
        if dataclasses.is_dataclass(found):
            check_types(name, found)
        elif not _is_of(found, kinds[field.name]):
            kind = kinds[field.name]
            expected = kind.__name__ if isinstance(kind, type) else str(kind)
            raise UserError(f"{name} is {found!r}: its type must be {expected}.")


def _is_of(value: Any, kind: Any) -> bool:
    """Whether a value is of a declared type; an int is a float, too, and a bool is no number."""
    parts = typing.get_args(kind)
    if isinstance(kind, types.UnionType):
        return any(_is_of(value, part) for part in parts)
    if typing.get_origin(kind) is tuple:
        return isinstance(value, tuple) and all(_is_of(item, parts[0]) for item in value)
    if kind in (int, float):
        return isinstance(value, (int, kind)) and not isinstance(value, bool)
    return not isinstance(kind, type) or isinstance(value, kind)


def _at_least(field: str, value: float, low: float) -> None:
    if not (value >= low and math.isfinite(value)):
        raise UserError(f"{field} is {value}: it must be {low} or more.")


def _fraction(field: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise UserError(f"{field} is {value}: it must lie between 0 and 1.")


def _one_of(field: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise UserError(f"{field} is {value!r}, which is not known.{did_you_mean(value, allowed)}")
