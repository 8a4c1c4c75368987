"""Addresses of records to predict, such as images:FOLDER; parsed without TensorFlow."""

import os
from collections.abc import Sequence

from tftpu.config import DataConfig
from tftpu.errors import UserError, did_you_mean, find_nearest
from tftpu.input_pipelines.formats import manifest
from tftpu.storage import files

EVALUATION, TRAINING = "evaluation", "training"


def parse_address(text: str, data: str, kinds: Sequence[str]) -> tuple[str, str]:
    """Returns the kind of an address of records, and the path or name in it.

    Args:
        text: KIND:WHAT, or "evaluation" or "training" for a split of the run's data.
        data: the class name of the run's data, for error messages.
        kinds: the kinds that the data can read besides their splits, such as "images".

    Raises:
        UserError: the address has none of these kinds.
    """
    kind, _, what = text.partition(":")
    if (kind in kinds and what) or text in (EVALUATION, TRAINING):
        return kind, what
    allowed = [*(f"{name}:..." for name in kinds), EVALUATION, TRAINING]
    hint = did_you_mean(kind, [*kinds, EVALUATION, TRAINING])
    near = find_nearest(kind, kinds)
    if near and what:
        hint = f" Did you mean '{near}:{what}'?"
    if os.path.isdir(text):
        hint = f" Did you mean '{address_of(text)}'?" if guess_kind(text) in kinds else hint
    raise UserError(
        f"Data of the class {data} cannot be read from the input {text!r}: use "
        f"{', '.join(allowed)}.{hint}"
    )


def check_address(text: str, data: DataConfig) -> None:
    """Raises `UserError` for an address that the run's data certainly cannot read.

    Args:
        text: the address.
        data: the run's data; a user's class that defines `prediction` may read any address.
    """
    if not data.address_kinds or not type(data).prediction.__module__.startswith("tftpu."):
        return
    kind, what = parse_address(text, type(data).__name__, data.address_kinds)
    if kind == "images":
        from tftpu.input_pipelines.reading import image_files  # imported late: it imports NumPy

        image_files.check_folder(what.rstrip("/"))
        if not files.is_remote(what):  # listing a bucket may take minutes
            image_files.sort_images(what.rstrip("/"))


def address_of(folder: str) -> str:
    """Returns the address of the records in a local folder, such as "images:photos"."""
    return f"{guess_kind(folder)}:{folder}"


def guess_kind(folder: str) -> str:
    """Returns the kind of a local folder: "tfrecord" if it has a manifest, otherwise "images"."""
    return "tfrecord" if os.path.exists(os.path.join(folder, manifest.NAME)) else "images"
