"""Loading of a checkpoint that all hosts agree on."""

from tftpu.checkpoint.store import Checkpoints, Restored
from tftpu.engines.engine import Executor, Hosts
from tftpu.errors import UserError
from tftpu.storage import files


def restore(
    checkpoints: Checkpoints,
    executor: Executor,
    hosts: Hosts,
    step: int | None = None,
    *,
    optimizer: bool = True,
) -> Restored | None:
    """Loads a checkpoint; returns None if there is none.

    Several hosts load the checkpoint that the chief found to be complete.

    Args:
        checkpoints: of the run.
        executor: whose state is loaded.
        hosts: that train together.
        step: of the checkpoint; None is the newest.
        optimizer: whether to load what only training needs.

    Raises:
        UserError: the checkpoint belongs to another model or is damaged, or this host does not see
            it.
    """
    leaves, found = executor.state(), None
    if not optimizer:
        training_only = ("optimizer", "loss_scale")
        leaves = {group: v for group, v in leaves.items() if not group.startswith(training_only)}
    if hosts.chief:
        found = checkpoints.restore(leaves, step)
    step = hosts.from_chief(found.step if found else None)
    if step is None or found is not None:
        return found
    if not files.exists(checkpoints.folder):
        raise UserError(
            f"The chief resumes from step {step}, and this host has no {checkpoints.folder!r}: all "
            "hosts have to see the same workdir, such as gs://BUCKET/RUN."
        )
    return checkpoints.restore(leaves, step)
