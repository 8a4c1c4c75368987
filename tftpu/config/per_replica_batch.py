"""The part of a global batch that one replica computes at a time."""

import dataclasses

from tftpu.errors import UserError, counted


@dataclasses.dataclass(frozen=True)
class PerReplicaBatch:
    """One microbatch of one data shard of a global batch.

    Attributes:
        global_batch_size: examples per step.
        replicas: data shards that the global batch is cut into; one per core under TPUStrategy.
        gradient_accumulation_steps: microbatches that each shard is cut into.
        group: number that the examples of a microbatch should be a multiple of, for the advice in
            the error; see `norm_batch` of the models.
        examples: examples of one microbatch.

    Raises:
        UserError: the global batch cannot be cut into equal parts.
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
