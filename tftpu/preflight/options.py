"""Options of a preflight check."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from tftpu.config import TrainConfig
from tftpu.preflight.compiling.compiler import TIME_LIMIT
from tftpu.tpu.compiler_options import AUTO

if TYPE_CHECKING:
    import keras

    from tftpu.engines.objectives.objective import Objective


def _accept_any(replicas: int) -> None:
    """Accepts any number of replicas."""


@dataclasses.dataclass
class PreflightOptions:
    """Options of `tftpu.preflight.check`.

    Attributes:
        train: options of the trainer. The step depends on `gradient_accumulation_steps`,
            `global_clipnorm`, `ema_momentum`, `remat` and `scan`.
        precision: dtype policy under which a function builds the model, as for
            `tftpu.set_precision`; "auto" is mixed_bfloat16; None: Keras's current policy. For a
            model that is already built, None or the model's policy.
        engine: name of the engine whose step is compiled, as for `tftpu.connect`; "auto" chooses
            the engine that a run with this mesh would use.
        mesh: axes and sizes for the JAX engine, as for `tftpu.connect`; with a size of -1, slices
            of different sizes can be compared.
        compiler_options: XLA's options for the JAX engine's step, as for `tftpu.connect`.
        objectives: function that returns the objectives of a newly built model, for a step with
            custom loss functions; None: the model is compiled with a loss.
        steps: steps of the run; None leaves out the time and cost of the run.
        examples_per_epoch: examples in an epoch; None leaves out the cost of an epoch.
        prices: US dollars per chip-hour by generation; they replace the list prices.
        validate: function of the number of replicas of a slice, which raises `UserError` if the
            run cannot use that many.
        batch_unit: number of examples of which a replica's microbatch must be a multiple, such as
            the number that share batch statistics. None: any; the search for a batch that fits then
            tries multiples of 8, which fill the tiles of a TPU's memory; smaller ones if necessary.
        recomputing: function that builds the same model with another `model.remat` in its config;
            None if the config has no such field, or already recomputes.
        time_limit: seconds that one compilation may take, in elapsed and in processor time: it is
            stopped once both reach the limit.
        verbose: whether to show what the compiler writes to standard error.
    """

    train: TrainConfig = dataclasses.field(default_factory=TrainConfig)
    precision: str | None = None
    engine: str = "auto"
    mesh: str | None = None
    compiler_options: str = AUTO
    objectives: "Callable[[keras.Model], Sequence[Objective]] | None" = None
    steps: int | None = None
    examples_per_epoch: int | None = None
    prices: dict[str, float] = dataclasses.field(default_factory=dict)
    validate: Callable[[int], None] = _accept_any
    batch_unit: int | None = None
    recomputing: "Callable[[str], keras.Model] | None" = None
    time_limit: float = TIME_LIMIT
    verbose: bool = False
