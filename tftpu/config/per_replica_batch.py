"""The part of a global batch that one replica computes at a time."""

import dataclasses

from tftpu.errors import UserError, counted


@dataclasses.dataclass(frozen=True)
class PerReplicaBatch:
    """One microbatch of one data shard of a global batch.

    Attributes:
        global_batch_size: examples per step.
        replicas: number of data shards of the global batch; one per core under TPUStrategy.
        gradient_accumulation_steps: number of microbatches in each shard.
        group: group size that should divide the examples of a microbatch, such as a model's
            `norm_batch`; the error message suggests a global batch that fits it.
        examples: number of examples in one microbatch.

    Raises:
        UserError: the global batch cannot be divided into equal microbatches.
    """

    global_batch_size: int
    replicas: int
    gradient_accumulation_steps: int = 1
    group: int = 1

    def __post_init__(self) -> None:
        parts = self.replicas * self.gradient_accumulation_steps
        if self.global_batch_size % parts:
            unit = parts * self.group
            lower = self.global_batch_size // unit * unit
            near = f"{lower} or {lower + unit}" if lower else f"{unit}"
            microbatches = self.gradient_accumulation_steps
            times = f" x {microbatches} microbatches" if microbatches > 1 else ""
            raise UserError(
                f"A global batch of {self.global_batch_size} cannot be divided among "
                f"{counted(self.replicas, 'replica')}{times}: use a multiple of {unit}, such as "
                f"{near}."
            )

    @property
    def examples(self) -> int:
        return self.global_batch_size // (self.replicas * self.gradient_accumulation_steps)
