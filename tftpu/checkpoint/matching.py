"""Names of leaves in a checkpoint, and the comparison of saved leaves with a model's.

A group of leaves is saved as `GROUP.safetensors`. If several processes save it, each one but the
chief adds a file `GROUP-INDEX-SAVE.safetensors`. SAVE is a random number that the chief chooses for
each save, so a process of an earlier run that writes late replaces no newer file.
`tftpu.storage.regions` names the arrays.
"""

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from tftpu.checkpoint.host_copy import Copied
from tftpu.checkpoint.manifest import Block, StoredFile
from tftpu.engines.leaf import Leaf
from tftpu.engines.names import remove_counters
from tftpu.errors import UserError
from tftpu.storage import regions, safetensors
from tftpu.storage.regions import Named, Region

# Groups of leaves that exist only in some precisions, so a checkpoint may lack them.
_OPTIONAL = ("loss_scale",)

# A leaf and the values of all its regions that this process's devices hold.
Found = tuple[Leaf, dict[Region, np.ndarray]]


class _Part(NamedTuple):
    """A region of a variable that is saved as a block of a file."""

    region: Region
    dtype: np.dtype
    file: str
    block: int


class _Saved(NamedTuple):
    """A variable of a checkpoint."""

    name: str
    shape: tuple[int, ...]
    parts: list[_Part]


def group_by_name(copies: Iterable[Copied]) -> dict[str, np.ndarray]:
    """Returns the copied arrays of a group, by their names in the group's file."""
    return {
        regions.format_name(Named(number, leaf.name, region, leaf.shape)): array
        for number, leaf, region, array in copies
    }


def read(
    stored: Mapping[str, StoredFile], leaves: Mapping[str, Sequence[Leaf]], step: int
) -> list[Found]:
    """Reads only the regions of a checkpoint's leaves that this process's devices hold.

    Args:
        stored: the files of the checkpoint, by name.
        leaves: the leaves to read, by group.
        step: the step of the checkpoint, for error messages.

    Returns:
        The values of the leaves, in their dtypes; nothing is assigned. The loss scale is left out
        if the checkpoint has none.

    Raises:
        UserError: the checkpoint belongs to another model or optimizer (the message lists the
            differences), or a file of it is not in tftpu's format.
        OSError, ValueError: a file is missing or damaged.
    """
    pairs: list[tuple[Leaf, _Saved]] = []
    for group, members in leaves.items():
        names = [name for name in stored if _group_of(name) == group]
        if not names and group in _OPTIONAL:
            continue
        saved = _read_headers({name: stored[name] for name in names}, step)
        differences = _find_differences(saved, members)
        if differences:
            raise UserError(
                f"The checkpoint of step {step} belongs to another {group}: "
                f"{format_list(differences)}. Use the configuration that it was trained with, or "
                "another workdir."
            )
        pairs += zip(members, saved)
    return _read_values(stored, pairs)


def assign(found: Iterable[Found]) -> None:
    """Sets leaves to the values that `read` returned."""
    for leaf, values in found:
        leaf.assign(values)


def format_list(items: Sequence[object]) -> str:
    """Joins the first eight items of a list for an error message, and counts the others."""
    shown = "; ".join(map(str, items[:8]))
    return f"{shown}; and {len(items) - 8} more" if len(items) > 8 else shown


def _group_of(file: str) -> str | None:
    found = re.fullmatch(r"(.+?)(?:-\d+){0,2}\.safetensors", file)
    return found[1] if found else None


def _read_headers(stored: Mapping[str, StoredFile], step: int) -> list[_Saved]:
    """Returns the variables of a group, read from the headers of its files."""
    found: dict[int, _Saved] = {}
    for file in stored:
        _, header = next(stored[file].read([0]))
        try:
            for block, entry in enumerate(_parse_entries(header, stored[file].blocks), start=1):
                index, name, region, shape = regions.parse_name(entry.name, entry.shape)
                variable = found.setdefault(index, _Saved(name, shape, []))
                if (variable.name, variable.shape) != (name, shape):
                    raise ValueError(f"{entry.name!r} has other names or shapes in other files")
                variable.parts.append(_Part(region, entry.dtype, file, block))
        except ValueError as error:  # not damage: the file's checksum matches
            raise UserError(
                f"The checkpoint of step {step} was not written by tftpu, or was changed: "
                f"{file} cannot be read ({error})."
            ) from error
    for name, shape, parts in found.values():
        if not regions.fill([part.region for part in parts], shape):
            raise UserError(
                f"The checkpoint of step {step} was changed: {', '.join(stored)} must hold each "
                f"part of {name} exactly once."
            )
    return [found[index] for index in sorted(found)]


def _parse_entries(header: bytes, blocks: Sequence[Block]) -> list[safetensors.Entry]:
    """Returns the arrays of a file; raises ValueError unless each is a block of the file."""
    found = safetensors.parse_header(header)
    if [entry.last - entry.first for entry in found] != [block.size for block in blocks[1:]]:
        raise ValueError("its header and the manifest differ")
    return found


def _read_values(
    stored: Mapping[str, StoredFile], pairs: Sequence[tuple[Leaf, _Saved]]
) -> list[Found]:
    """Reads each needed block once; returns the values of the leaves."""
    needed: dict[str, dict[int, list[tuple[int, _Part, Region]]]] = {}
    for number, (leaf, saved) in enumerate(pairs):
        for part in saved.parts:
            for region in leaf.held:
                if region == part.region or regions.intersect(region, part.region) is not None:
                    blocks = needed.setdefault(part.file, {})
                    blocks.setdefault(part.block, []).append((number, part, region))
    found: list[Found] = [(leaf, {}) for leaf, _ in pairs]
    for file, blocks in needed.items():
        for block, data in stored[file].read(blocks):
            for number, part, region in blocks[block]:
                _put(found[number], part, region, data)
    return found


def _put(found: Found, part: _Part, region: Region, data: bytes) -> None:
    """Puts the bytes of a saved part into the value of a region, rounded to the leaf's dtype."""
    leaf, values = found
    dtype = np.dtype(leaf.dtype)
    shape = regions.compute_shape(part.region)
    array = np.frombuffer(data, np.uint8).view(part.dtype).reshape(shape)
    if region == part.region:
        values[region] = array.astype(dtype, copy=False)
        return
    if region not in values:
        values[region] = np.empty(regions.compute_shape(region), dtype)
    common = regions.intersect(region, part.region)
    assert common is not None  # the caller reads only parts that overlap
    values[region][regions.to_slices(common, region)] = array[
        regions.to_slices(common, part.region)
    ]


def _find_differences(saved: Sequence[_Saved], leaves: Sequence[Leaf]) -> list[str]:
    """Returns the differences between leaves and a checkpoint's variables, one clause each."""
    there = [(remove_counters(variable.name), variable.shape) for variable in saved]
    here = [(remove_counters(leaf.name), leaf.shape) for leaf in leaves]
    differences = []
    for kind, a, b, c, d in difflib.SequenceMatcher(None, there, here, False).get_opcodes():
        if kind == "equal":
            continue
        left = [*range(a, b)]  # conv2d and conv2d_1 have equal names here: match them in order
        for leaf, (plain, shape) in zip(leaves[c:d], here[c:d]):
            place = next((place for place in left if there[place][0] == plain), None)
            if place is None:
                differences.append(f"{leaf.name} is not in the checkpoint")
                continue
            left.remove(place)
            other = there[place][1]
            what = f"is {shape}, saved as {other}" if other != shape else "has another position"
            differences.append(f"{leaf.name} {what}")
        differences += [f"{saved[place].name} is only in the checkpoint" for place in left]
    return differences
