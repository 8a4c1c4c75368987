"""Compares the values of the first batches with the limits of the model."""

import dataclasses
from typing import Any

import numpy as np

from tftpu.config import Experiment
from tftpu.engines import selection
from tftpu.errors import UserError, counted
from tftpu.launch.data_checks import Pipeline
from tftpu.launch.data_checks.finding import Finding
from tftpu.launch.settings import own_code

_BATCHES = 3  # batches whose values are compared with the model's limits


def read_first_batches(pipeline: Pipeline, hosts: int) -> list[Any]:
    """Returns the first batches of a host, as NumPy arrays."""
    from tftpu import input_pipelines

    batches = input_pipelines.starting_at(pipeline, 0, 0, hosts)
    return list(batches.take(_BATCHES).as_numpy_iterator())


def inspect_values(model: Any, batches: list[Any], ignored: int | None = None) -> list[Finding]:
    """Compares class ids and tokens with the model's classes and vocabulary, if it has them.

    Args:
        model: the config of a zoo model, whose `vocabulary` and `num_classes` are the limits.
        batches: some batches of the data, `(x, y)` or `(x, y, sample_weight)` of arrays.
        ignored: the class id that the loss ignores (its `ignore_class`), or None.
    """
    vocabulary, classes = (getattr(model, name, None) for name in ("vocabulary", "num_classes"))
    if getattr(model, "head", "classes") != "classes":  # the head predicts tokens
        classes = None
    found = []
    for name, part, owner, count in (
        ("tokens", 0, "vocabulary", vocabulary),
        ("labels", 1, "num_classes" if classes else "vocabulary", classes or vocabulary),
    ):
        seen = [_select_weighted_ids(batch, part) for batch in batches if _has(batch, part)]
        numbers = np.concatenate([ids for ids in seen if ids is not None] or [[]])
        if part == 1 and ignored is not None:
            numbers = numbers[numbers != ignored]
        if not isinstance(count, int) or not numbers.size:
            continue
        least, most = int(numbers.min()), int(numbers.max())
        text = f"the {name} of the first batches go from {least} to {most}"
        if least < 0 or most >= count:
            text += f", and model.{owner}={count} takes 0 to {count - 1}: change the data"
            text += f", or set it to {most + 1}." if least >= 0 else "."
            found.append(Finding("error", text))
        else:
            found.append(Finding("ok", f"{text}, within model.{owner}={count}"))
    return found


def inspect_lengths(experiment: Experiment, batches: list[Any], hosts: int) -> list[Finding]:
    """Counts the texts that the preprocessor of a KerasHub model truncates.

    Args:
        experiment: the experiment.
        batches: the first batches.
        hosts: the number of hosts that share a batch.
    """
    masks = [b[0].get("padding_mask") for b in batches if _has(b, 0) and isinstance(b[0], dict)]
    known = [mask.astype(bool) for mask in masks if mask is not None]
    if not known:
        return []
    full = np.concatenate([mask.all(-1) for mask in known])
    most = known[0].shape[-1]
    lengths = count_tokens(experiment, hosts) if full.any() else np.zeros(0, int)
    y = batches[0][1] if _has(batches[0], 1) else None
    # If the labels are the next tokens, a text's last token is only a label, and takes no position.
    lengths = lengths - (getattr(y, "shape", ())[1:] == (most,))
    cut = int((lengths > most).sum())
    of = f"of {counted(full.size, 'text')} of the first batches"
    if not cut:
        padded = 1 - sum(mask.sum() for mask in known) / sum(mask.size for mask in known)
        text = f"none {of} is cut at {most} tokens; {padded:.0%} of the positions are padding"
        return [Finding("ok", text)]
    from tftpu.models.keras_hub import prepared

    model: Any = experiment.model
    text = f"{cut} {of} {'is' if cut == 1 else 'are'} cut at {most} tokens. "
    text += prepared.describe_longest(model, lengths.max(), most)
    return [Finding("warning", text)]


def count_tokens(experiment: Experiment, hosts: int) -> np.ndarray:
    """Returns the number of tokens of each text in the first batches, before truncation."""
    from tftpu import input_pipelines
    from tftpu.models.keras_hub import prepared

    model: Any = experiment.model
    pipeline = input_pipelines.training(experiment.data, experiment.train.seed)
    batches = read_first_batches(pipeline, hosts)
    return np.concatenate([prepared.count_tokens(model, batch) for batch in batches])


def inspect_own_values(experiment: Experiment, batches: list[Any]) -> list[Finding]:
    """Builds a user's model, and compares labels and ids with its outputs and embeddings.

    Args:
        experiment: the experiment with the user's model.
        batches: some batches of the data, as arrays.
    """
    import keras

    from tftpu.engines import keras_internals
    from tftpu.launch.run import experiment as build
    from tftpu.training import batch_values

    experiment = dataclasses.replace(
        experiment, train=dataclasses.replace(experiment.train, steps=1, epochs=None)
    )
    try:
        if build.has_objectives(experiment):  # the model's own losses may take any labels
            return []
        devices = selection.connect("none", 1, keras.backend.backend()).scope()
        with devices, own_code.failures_of_class(experiment.model, "build"):
            model = build.build_model(experiment)
            keras_internals.build(model, _describe_batch(batches[0]))
    except UserError as error:
        return [Finding("error", f"the model cannot be built for these data: {error}")]
    seen: dict[str, list[Any]] = {}
    for batch in batches:
        for limit, outside in batch_values.compare_with_limits(model, batch):
            if outside:
                return [Finding("error", f"in the first batches, {outside}.")]
            values = np.ravel(limit.values)
            # Values outside these limits have weight 0, or the loss ignores them.
            allowed = values[(values >= 0) & (values < limit.size)]
            seen.setdefault(f"and {limit.owner}", []).append((limit.name, allowed))
    found = []
    for owner, parts in seen.items():
        numbers = np.concatenate([values for _, values in parts])
        if numbers.size:
            text = f"{parts[0][0]} has values from {numbers.min()} to {numbers.max()}"
            found.append(Finding("ok", f"{text} in the first batches, {owner}"))
    return found


def _describe_batch(batch: Any) -> Any:
    """Returns symbolic tensors with the shapes and dtypes of a batch of arrays."""
    import keras

    return keras.tree.map_structure(
        lambda array: keras.KerasTensor(array.shape, array.dtype.name), batch
    )


def _has(batch: Any, part: int) -> bool:
    return isinstance(batch, tuple) and part < len(batch) <= 3


def _select_weighted_ids(batch: Any, part: int) -> np.ndarray | None:
    """Returns tokens (part 0), or labels of nonzero weight (part 1); None if not integers."""
    ids = batch[part]
    ids = ids.get("tokens") if isinstance(ids, dict) else ids
    if not isinstance(ids, np.ndarray) or not np.issubdtype(ids.dtype, np.integer):
        return None
    weights = batch[2] if len(batch) > 2 and part == 1 else None
    counts = isinstance(weights, np.ndarray) and weights.shape == ids.shape
    return ids[weights != 0] if counts else ids.reshape(-1)
