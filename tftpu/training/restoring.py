"""Loads a checkpoint on which all hosts agree."""

import itertools
from collections.abc import Mapping, Sequence

from tftpu.checkpoint.frozen_base import Base
from tftpu.checkpoint.store import Checkpoints, Restored
from tftpu.engines.engine import Hosts
from tftpu.engines.leaf import Leaf
from tftpu.errors import UserError
from tftpu.storage import files


def restore(
    checkpoints: Checkpoints | None,
    base: Base,
    hosts: Hosts,
    step: int | None = None,
    *,
    optimizer: bool = True,
) -> Restored | None:
    """Loads a checkpoint; returns None if there is none.

    Several hosts load the newest checkpoint that all of them can read.

    Args:
        checkpoints: the checkpoints of the run; None: it has no workdir.
        base: the weights that the checkpoints leave out.
        hosts: the hosts that train together.
        step: the step of the checkpoint; None: the newest.
        optimizer: whether to load the state that only training needs.

    Raises:
        UserError: the checkpoint belongs to another model or other frozen weights, is missing or
            damaged, or this host cannot see the workdir.
    """
    if checkpoints is None:
        return None
    leaves = base.list_saved()
    if not optimizer:
        training_only = ("optimizer", "loss_scale", "metrics", "seeds", "outside")
        leaves = {group: v for group, v in leaves.items() if not group.startswith(training_only)}
    if hosts.count == 1:
        found = checkpoints.restore(leaves, step, base.check_given)
    else:
        with hosts.together():
            found = _restore_agreed(checkpoints, base, leaves, hosts, step)
    if found is not None:
        base.check(found.state, checkpoints.workdir)
    return found


def _restore_agreed(
    checkpoints: Checkpoints,
    base: Base,
    leaves: Mapping[str, Sequence[Leaf]],
    hosts: Hosts,
    step: int | None,
) -> Restored | None:
    """Loads the first checkpoint of the chief's list that every host can read."""
    candidates = checkpoints.list_candidates(step) if hosts.chief else []
    tried: list[int] = []
    for number in itertools.count():
        chosen = hosts.from_chief(candidates[number] if number < len(candidates) else None)
        if chosen is None:
            break
        loaded = _check_visible(checkpoints, chosen).load(leaves, chosen, base.check_given)
        if not hosts.any(loaded is None)[0] and loaded is not None:
            return checkpoints.restore_loaded(loaded)
        tried.append(chosen)
    if tried:
        raise checkpoints.describe_failure(tried, step)
    return None


def _check_visible(checkpoints: Checkpoints, step: int) -> Checkpoints:
    """Returns the checkpoints; raises `UserError` if this host does not see their folder."""
    if not files.exists(checkpoints.folder):
        raise UserError(
            f"The chief resumes from step {step}, but this host has no {checkpoints.folder!r}: "
            "all hosts must see the same workdir, such as gs://BUCKET/RUN."
        )
    return checkpoints
