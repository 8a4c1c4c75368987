"""The options of training, declared and validated only here.

The same object serves the API (`Trainer(model, workdir, TrainConfig(...))`), config files
(`Experiment(train=TrainConfig(...))`) and the command line (`--config.train.FIELD=VALUE`).
"""

import dataclasses

from tftpu.blocks import REMATS
from tftpu.config.fields import OPERATIONAL
from tftpu.config.profile_plan import profile_plan
from tftpu.config.validation import above, at_least, check_types, fraction, one_of
from tftpu.errors import UserError, did_you_mean

ON_NAN = ("stop", "rollback")
PRECISIONS = ("auto", "float32", "mixed_bfloat16", "mixed_float16")
SCANS = ("none", "block")
WRITERS = ("mlflow", "wandb", "hypertune")
LONGEST = 1e7  # maximum of `watchdog_seconds`, about four months


@dataclasses.dataclass(kw_only=True)  # the order of fields matters only for the reference pages
class TrainConfig:
    """The options of training: of a `Trainer`, and of an experiment.

    `steps`, `epochs`, `eval_every`, `label_smoothing` and `precision` are only for experiments.
    With a `Trainer`, pass the length and `eval_every` to `fit`, compile the model with a smoothed
    loss, and set the dtype policy with `tftpu.set_precision`.

    Attributes:
        steps: total length of the run in steps; 1,000 if neither steps nor epochs are given.
        epochs: length of the run in passes over the training data, instead of `steps`.
        eval_every: steps between evaluations, which callbacks see as an epoch; 0 evaluates at the
            end of every epoch if the length is given in `epochs`, otherwise only at the end.
        log_every: steps between logged lines of metrics.
        checkpoint_every: steps between checkpoints; 0 saves at the end, and whenever an evaluation
            is the best so far.
        checkpoint_minutes: also save when this many minutes have passed since the last
            checkpoint; 0 disables it.
        keep: number of newest checkpoints to keep; the best one is kept as well.
        keep_every: also keep checkpoints whose step is a multiple of this; 0 disables it.
        best_metric: evaluation metric by which the best checkpoint is chosen; "" is the loss.
            For losses and errors, lower is better; of equal values, the first is kept.
        precision: the dtype policy; "auto" is mixed_bfloat16 on a TPU, mixed_float16 on a
            GPU and float32 on a CPU.
        seed: seed of the order of shuffled data and of all layers that draw random numbers, such as
            dropout; in an experiment, also of the initial weights.
        gradient_accumulation_steps: number of microbatches into which each replica's shard of a
            global batch is divided.
        global_clipnorm: maximum global norm to which the gradient is clipped, after its sum over
            all replicas and microbatches; None does not clip.
        label_smoothing: fraction of each label that is spread evenly over all classes.
        ema_momentum: momentum of the moving average of the weights, which evaluation then uses;
            None keeps no average.
        steps_per_loop: steps that run on the devices before control returns to the host; None takes
            the model's `steps_per_execution` if it is above 1 or a callback has batch methods, and
            otherwise 50.
        remat: recomputation in the backward pass, to save memory. "none" recomputes nothing.
            "block" keeps only the input of each of the model's equal blocks. Only on the JAX
            engine: "attention" also keeps the outputs of attention kernels, "products" those and
            the products with weights, and "offload" keeps the inputs in the host's memory. A
            functional model without equal blocks is divided into segments, about the square root
            of its number of layers. Models of the zoo have `model.remat` instead.
        scan: "block", on the JAX engine, compiles equal blocks, or repeating groups of blocks, as
            one loop, which shortens the program. Blocks left over after the last whole group run
            after the loop and are not recomputed. "none" compiles no loop. Models of the zoo have
            `model.scan` instead.
        on_nan: "stop" ends the run at a loss that is not finite; "rollback" returns to the last
            checkpoint and skips the batches that followed it.
        max_rollbacks: number of rollbacks before the run ends.
        writers: additional destinations for the metrics, by name: "mlflow", "wandb", and
            "hypertune", which reports best_metric to a hyper-parameter tuning job of Vertex AI.
        profile: steps to profile for TensorBoard: "100:110" profiles those steps, "slow" the steps
            after an unusually slow device loop (in the slowest 1 %, and above 1.5 times the
            median), "100:110,slow" both.
        watchdog_seconds: seconds without a finished step after which the process prints the stacks
            of its threads and exits with code 124. Must exceed the time of one evaluation. None
            disables it.
        grace_seconds: seconds from a SIGTERM to the end of the process.
    """

    steps: int | None = None
    epochs: int | None = None
    eval_every: int = 0
    log_every: int = dataclasses.field(default=50, metadata=OPERATIONAL)
    checkpoint_every: int = dataclasses.field(default=0, metadata=OPERATIONAL)
    checkpoint_minutes: float = dataclasses.field(default=10.0, metadata=OPERATIONAL)
    keep: int = dataclasses.field(default=3, metadata=OPERATIONAL)
    keep_every: int = dataclasses.field(default=0, metadata=OPERATIONAL)
    best_metric: str = ""
    precision: str = "auto"
    seed: int = 0
    gradient_accumulation_steps: int = 1
    global_clipnorm: float | None = None
    label_smoothing: float = 0.0
    ema_momentum: float | None = None
    steps_per_loop: int | None = dataclasses.field(default=None, metadata=OPERATIONAL)
    remat: str = "none"
    scan: str = "none"
    on_nan: str = "stop"
    max_rollbacks: int = 3
    writers: tuple[str, ...] = dataclasses.field(default=(), metadata=OPERATIONAL)
    profile: str = dataclasses.field(default="", metadata=OPERATIONAL)
    watchdog_seconds: float | None = dataclasses.field(default=None, metadata=OPERATIONAL)
    grace_seconds: float = dataclasses.field(default=25.0, metadata=OPERATIONAL)

    def __post_init__(self) -> None:
        if self.steps is None and self.epochs is None:
            self.steps = 1000

    @property
    def length(self) -> int:
        """The number of steps.

        Raises:
            UserError: the length is given in epochs, which only the data can convert to steps.
        """
        if self.steps is None:
            raise UserError(
                f"The length of the run is train.epochs={self.epochs}, which depends on the data: "
                "set train.steps."
            )
        return self.steps

    def validate(self) -> None:
        """Checks every field.

        Raises:
            UserError: a value is not allowed; the message names the field.
        """
        check_types("train", self)
        if self.steps_per_loop is not None:
            at_least("train.steps_per_loop", self.steps_per_loop, 1)
        for field in ("log_every", "keep", "gradient_accumulation_steps"):
            at_least(f"train.{field}", getattr(self, field), 1)
        for field in ("checkpoint_every", "keep_every", "max_rollbacks"):
            at_least(f"train.{field}", getattr(self, field), 0)
        if not 0 <= self.seed < 2**32:
            raise UserError(f"train.seed is {self.seed}: it must be from 0 to {2**32 - 1}.")
        at_least("train.checkpoint_minutes", self.checkpoint_minutes, 0.0)
        at_least("train.grace_seconds", self.grace_seconds, 1.0)
        above("train.watchdog_seconds", self.watchdog_seconds, 0.0)
        if (self.watchdog_seconds or 0.0) > LONGEST:
            raise UserError(
                f"train.watchdog_seconds is {self.watchdog_seconds:g}: it must be at most "
                f"{LONGEST:g}, or None for no watchdog."
            )
        above("train.global_clipnorm", self.global_clipnorm, 0.0)
        if self.ema_momentum is not None and not 0 < self.ema_momentum < 1:
            raise UserError(
                f"train.ema_momentum is {self.ema_momentum}: it must be between 0 and 1, or None."
            )
        one_of("train.remat", self.remat, REMATS)
        one_of("train.scan", self.scan, SCANS)
        one_of("train.on_nan", self.on_nan, ON_NAN)
        profile_plan(self.profile)
        for name in self.writers:
            if name not in WRITERS:
                raise UserError(
                    f"train.writers has {name!r}, which is not known.{did_you_mean(name, WRITERS)}"
                )
        if self.steps is not None and self.epochs is not None:
            raise UserError(
                f"train.steps={self.steps} and train.epochs={self.epochs} both give the length of "
                "the run: set only one of them."
            )
        if self.steps is None and self.epochs is None:
            raise UserError("train.steps and train.epochs are both None: set one of them.")
        for field in ("steps", "epochs"):
            if getattr(self, field) is not None:
                at_least(f"train.{field}", getattr(self, field), 1)
        at_least("train.eval_every", self.eval_every, 0)
        fraction("train.label_smoothing", self.label_smoothing)
        one_of("train.precision", self.precision, PRECISIONS)
