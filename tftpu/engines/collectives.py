"""Exchange between replicas inside a loss function: `tftpu.all_gather` and `tftpu.positions`."""

import contextlib
import contextvars
from collections.abc import Iterator

from tftpu.engines.data import division
from tftpu.errors import UserError
from tftpu.tensors import Tensor, ops

_GATHERED: contextvars.ContextVar[list[Tensor]] = contextvars.ContextVar("gathered")


@contextlib.contextmanager
def gathering() -> Iterator[list[Tensor]]:
    """Yields a list that collects what this thread passes to `all_gather` in the `with` block."""
    seen: list[Tensor] = []
    token = _GATHERED.set(seen)
    try:
        yield seen
    finally:
        _GATHERED.reset(token)


def all_gather(x: Tensor) -> Tensor:
    """Gathers a per-example tensor from all replicas, in the order of the global batch.

    A loss over pairs of examples then has the same value on any number of devices.
    Gradients flow back to the replica that each example came from. On one device, and outside of
    training and evaluation, it returns its argument.

    Args:
        x: (examples, ...), computed from this replica's shard of the batch.

    Returns:
        (examples of the global batch, ...), of the same dtype.

    Raises:
        UserError: the step has several microbatches, which are computed one after the other.

    Example:

    ```python
    def contrastive(model, batch, training):
        z = keras.ops.normalize(model(batch, training=training))
        others = tftpu.all_gather(z)
        return loss_of_each(z @ keras.ops.transpose(others), tftpu.positions(z))
    ```
    """
    x = ops.convert_to_tensor(x)
    _GATHERED.get([]).append(x)
    announced = division.find_division()
    if announced.microbatches > 1:
        raise UserError(
            "tftpu.all_gather() needs the whole batch at once, but the batch is computed in "
            f"{announced.microbatches} microbatches: set gradient_accumulation_steps=1."
        )
    if announced.shards == 1 or announced.exchange is None:
        return x
    return announced.exchange.gather(x, announced.shards)


def positions(x: Tensor) -> Tensor:
    """Returns the positions of this replica's examples in the result of `all_gather`.

    Args:
        x: (examples, ...), computed from this replica's shard of the batch.

    Returns:
        (examples,), int32.
    """
    examples = ops.convert_to_tensor(x).shape[0]
    own = ops.arange(examples, dtype="int32")
    announced = division.find_division()
    if announced.shards == 1 or announced.exchange is None:
        return own
    return own + announced.exchange.find_index() * examples
