"""The records to predict, and the fields of the records that are copied to the predictions."""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tftpu.config import DataConfig
from tftpu.errors import UserError
from tftpu.input_pipelines.sources import Images, StreamedImages
from tftpu.launch.settings import own_code

if TYPE_CHECKING:
    from tftpu.input_pipelines.unlabelled import UnlabelledRecords


def check_has_fields(address: str, data: DataConfig, keep: Sequence[str]) -> None:
    """Raises `UserError` if `keep` names fields, but the records are image files without fields."""
    if type(data) not in (Images, StreamedImages):  # a user's class may read fields from anywhere
        return
    if keep and address.partition(":")[0] == "images":
        raise UserError(
            f"--keep={','.join(keep)}: pictures in a folder have no fields, and each row names its "
            "file: leave out --keep."
        )


def open_records(
    data: DataConfig, address: str, skip_bad: bool, keep: tuple[str, ...]
) -> tuple["UnlabelledRecords", Any]:
    """Returns the records at an address, and a data set with the features of the first one.

    Args:
        data: the data of the run.
        address: where the records are, as `--input` names it.
        skip_bad: whether records that cannot be read are skipped; otherwise they are errors.
        keep: the fields of the input that are copied to the predictions.

    Raises:
        UserError: there are no records at the address.
    """
    from tftpu import input_pipelines

    with own_code.failures_of_class(data, "prediction"):
        try:
            records = input_pipelines.prediction(data, address, skip_bad, keep)
        except FileNotFoundError as error:
            # Not every library sets the error's `filename`.
            path = str(error.filename or error)
            what = address.rpartition(":")[2]
            if what not in path:  # another file is missing, which the class needs
                raise
            missing = own_code.explain_missing(str(error.filename or what))
            hint = ""
            if address in path and set(": ") & set(address):
                reader = f"{type(data).__name__}.prediction"
                hint = f" {reader} reads all of {address!r} as a path."
            raise UserError(f"--input={address}: {missing}{hint}") from error
    return records, records.features([range(1)])


def name_labels(
    records: "UnlabelledRecords", data: DataConfig, names: list[str] | None
) -> "UnlabelledRecords":
    """Returns the records with the class name beside a kept label, if the label is a class id.

    The names are those of the records' own classes if their data set has such names, as it may
    number them otherwise than the run. A kept field of the input that has the same name, such as
    "label_name", stays as it is.
    """
    label, first = getattr(data, "label_feature", "label"), getattr(data, "first_class", 0)
    read = records.fields
    if names is None or read is None or label not in records.names:
        return records

    def read_with_names(numbers: range, kept: Sequence[str]) -> dict[str, Any]:
        found = dict(read(numbers, kept))
        ids = np.asarray(found.get(label, ""))
        if ids.ndim == 1 and ids.dtype.kind in "iu":
            known = records.classes or dict(enumerate(names, first))
            names_of_ids = [known.get(number, "") for number in ids.tolist()]
            found.setdefault(f"{label}_name", names_of_ids)  # the input may have one of this name
        return found

    return dataclasses.replace(records, fields=read_with_names)
