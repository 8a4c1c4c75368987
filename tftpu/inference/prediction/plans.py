"""Plans of predictions, which say what a folder holds; read without TensorFlow."""

from collections.abc import Mapping, Sequence
from typing import Any

from tftpu.errors import UserError
from tftpu.storage import files, side_files

MANIFEST, PLAN = "manifest.json", "plan.json"
SHARD = "predictions-"  # how the names of all shards begin
_DIFFERENCES = {
    "input": "they were computed from the input {old}, not {new}",
    "identity": "the input's files have changed since",
    "step": "they were computed at step {old} of this or another run, not at step {new}",
    "checkpoint": "the run's checkpoint has changed since",
    "outputs": "their outputs are {old}, not {new}",
    "class_names": "the names of the classes have changed since",
    "records": "they have {old} records, not {new}",
    "keep": "the kept fields are {old}, not {new}",
    "format": "their format is {old}, not {new}",
    "records_per_shard": "each of their files has {old} records, not {new}",
    "machines": "they are shared by {old} machines, not {new}",
}


def check_same(output: str, known: Mapping[str, Any]) -> None:
    """Raises `UserError` if the predictions in a folder differ from the known part of a plan.

    Args:
        output: the folder, local or `gs://`.
        known: the fields of the plan that are known before the model and the records are opened.
    """
    path = files.join(output, PLAN)
    found = side_files.read(path) if files.exists(path) else None
    different = [name for name in known if found and known[name] != found.get(name)]
    if found and different and has_predictions(output):
        raise UserError(describe_difference(output, known, found, different))


def has_predictions(output: str) -> bool:
    """Returns whether a folder has a shard of any predictions, or a manifest."""
    return any(name == MANIFEST or name.startswith(SHARD) for name in files.list_names(output))


def describe_difference(
    output: str, plan: Mapping[str, Any], found: Mapping[str, Any], different: Sequence[str]
) -> str:
    """Returns what differs between a folder's plan and the new one, and what to do.

    Args:
        output: the folder.
        plan: the new plan.
        found: the plan of the folder.
        different: the names of the fields in which they differ.
    """
    said = []
    for name in different:
        text = _DIFFERENCES.get(name, f"{name} = {{old!r}}; now it is {{new!r}}")
        old, new = (
            ", ".join(value) or "none" if isinstance(value, list) else value
            for value in (found.get(name), plan.get(name))
        )
        said.append(text.format(old=old, new=new))
    if "step" in different and "checkpoint" in different:
        said.remove(_DIFFERENCES["checkpoint"])
    if "identity" in different and {"input", "records"} & set(different):
        said.remove(_DIFFERENCES["identity"])
    if has_predictions(output):
        begin = f"{output} already holds other predictions. What differs"
    else:
        begin = f"Other predictions were begun in {output}, but none is written yet. What differs"
    other = files.suggest_path(output)
    return f"{begin}: {'; '.join(said)}. Choose another output folder, such as {other}."
