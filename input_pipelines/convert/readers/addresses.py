"""The addresses of sources that `tftpu data convert` takes.

tfds:NAME            a TFDS data set that is prepared
images:FOLDER        a folder with a subfolder of images for each class
index:FILE           a table (CSV, TSV, JSON) with the columns image and label; images beside it
text:PATTERN,...     text files, one document each, or tables with a column of texts
tfrecord:FOLDER      a data set of shards, to shuffle or shard again; or other programs' images
bigquery:TABLE       project.dataset.table; or bigquery:SELECT ...
"""

import dataclasses
import os
from collections.abc import Callable

from tftpu.errors import UserError, did_you_mean
from tftpu.input_pipelines.convert.readers import bigquery, images, text, tfds, tfrecord_shards
from tftpu.input_pipelines.convert.readers.reader import Reader, ReadOptions

_KINDS: dict[str, Callable[[str, ReadOptions], Reader]] = {
    "tfds": tfds.TfdsReader,
    "images": images.from_folders,
    "index": images.from_index,
    "text": text.TextReader,
    "tfrecord": tfrecord_shards.choose_reader,
    "bigquery": bigquery.BigQueryReader,
}
# The kinds of sources to which an option applies. Other options apply to all kinds, or are checked
# in `splits`.
_ONLY = {
    "data_dir": ("tfds",),
    "features": ("tfds", "tfrecord", "bigquery"),
    **dict.fromkeys(("tokenizer", "end_of_text", "context", "field"), ("text",)),
    **dict.fromkeys(("image_feature", "label_feature", "first_class"), ("tfrecord",)),
    "snapshot": ("bigquery",),
    "skip_bad": ("images", "index"),
}


def build_reader(address: str, options: ReadOptions) -> Reader:
    """Returns the reader of an address `KIND:WHAT`.

    Raises:
        UserError: the kind is unknown, the source is empty, or an option belongs to another kind.
    """
    kind, _, what = address.partition(":")
    if kind not in _KINDS or not what:
        near = did_you_mean(kind, _KINDS)
        if os.path.isdir(address):
            near = f" Did you mean 'images:{address}'?"
        raise UserError(
            f"The source {address!r} must have the form KIND:WHAT, such as images:FOLDER. There "
            f"is no kind {kind!r}.{near}"
        )
    for field in dataclasses.fields(options):
        kinds = _ONLY.get(field.name, (kind,))
        if kind not in kinds and getattr(options, field.name) != field.default:
            raise UserError(
                f"{field.name} works only with sources of the kinds {', '.join(kinds)}, not with "
                f"{address}: leave it out."
            )
    found = _KINDS[kind](what, options)
    if not found.parts:
        raise UserError(f"There is nothing in {address}.")
    return found
