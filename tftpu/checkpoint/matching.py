"""Names of leaves in a checkpoint, and the comparison of saved leaves with a model's."""

import difflib
from collections.abc import Mapping, Sequence

import numpy as np

from tftpu.engines.engine import Leaf
from tftpu.engines.names import without_counters
from tftpu.errors import UserError
from tftpu.storage import safetensors

# Groups of leaves that depend on the precision: a checkpoint may lack them.
_OPTIONAL = ("loss_scale",)


def keyed(leaves: Sequence[Leaf], arrays: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
    """Returns arrays under the keys of their leaves in a checkpoint file."""
    # The index comes first: Keras numbers automatic names ("dense_7") within a process.
    return {f"{i:05d} {leaf.name}": array for i, (leaf, array) in enumerate(zip(leaves, arrays))}


def load(contents: Mapping[str, bytes], leaves: Mapping[str, Sequence[Leaf]], step: int) -> None:
    """Assigns the values of a checkpoint to leaves: to all of them, or to none.

    Args:
        contents: the files of the checkpoint, by name.
        leaves: by group.
        step: the checkpoint's, for the error message.

    Raises:
        UserError: the checkpoint belongs to another model or optimizer (the message lists the
            differences), or a file of it is not in tftpu's format.
    """
    assignments: list[tuple[Leaf, np.ndarray]] = []
    for group, members in leaves.items():
        data = contents.get(f"{group}.safetensors")
        if data is None and group in _OPTIONAL:
            continue
        try:
            decoded = safetensors.decode(data) if data is not None else {}
            saved = [(key.split(" ", 1)[1], decoded[key]) for key in sorted(decoded)]
        except (ValueError, IndexError) as error:  # its checksum matches: tftpu wrote no such file
            raise UserError(
                f"The checkpoint of step {step} was not written by tftpu, or was changed: "
                f"{group}.safetensors cannot be read ({error})."
            ) from error
        differences = _differences(saved, members)
        if differences:
            raise UserError(
                f"The checkpoint of step {step} belongs to another {group}: "
                f"{listed(differences)}. Use the configuration it was trained with, or another "
                "workdir."
            )
        assignments += [(leaf, value) for leaf, (_, value) in zip(members, saved)]
    for leaf, value in assignments:
        leaf.assign(value.astype(np.dtype(leaf.dtype), copy=False))


def listed(items: Sequence[object]) -> str:
    """Joins the first items of a list for an error message."""
    shown = "; ".join(map(str, items[:8]))
    return f"{shown}; and {len(items) - 8} more" if len(items) > 8 else shown


def _differences(saved: list[tuple[str, np.ndarray]], leaves: Sequence[Leaf]) -> list[str]:
    """Returns the differences between leaves and a checkpoint's arrays, one clause each."""
    there = [(without_counters(name), value.shape) for name, value in saved]
    here = [(without_counters(leaf.name), leaf.shape) for leaf in leaves]
    differences = []
    for kind, a, b, c, d in difflib.SequenceMatcher(None, there, here, False).get_opcodes():
        if kind == "equal":
            continue
        shapes = dict(there[a:b])
        for leaf, (plain, shape) in zip(leaves[c:d], here[c:d]):
            other = shapes.pop(plain, None)
            what = f"is {shape} here and {other} there" if other else "is not in the checkpoint"
            differences.append(f"{leaf.name} {what}")
        left = [name for name, _ in saved[a:b] if without_counters(name) in shapes]
        differences += [f"{name} is only in the checkpoint" for name in left]
    return differences
