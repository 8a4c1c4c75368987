"""TFDS data sets by name: those that come with tftpu, and any that TFDS knows."""

import contextlib
import fcntl
import io
import logging
import os
import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_datasets as tfds

from tftpu.errors import UserError, did_you_mean
from tftpu.input_pipelines.datasets.embedded import EMBEDDED
from tftpu.input_pipelines.reading.shards import SHUFFLE, Piece, Shards, check_pieces
from tftpu.input_pipelines.tensors import Batch
from tftpu.installation import find_cache_folder
from tftpu.storage import files

Builder = Any  # a `tfds.core.DatasetBuilder`, whose published types leave out most of its methods

# One thread at a time may replace how TFDS looks up the classes of features.
_LOOKUP = threading.Lock()

# TFDS warns of a data set that is not prepared; our own error explains it.
logging.getLogger("absl").addFilter(lambda r: not r.getMessage().startswith("Variant folder"))


def open_builder(name: str, data_dir: str | None, download: bool = False) -> Builder:
    """Returns the builder of a data set that is ready to be read.

    An embedded data set is prepared on first use, without network access. TFDS must have prepared
    any other data set, unless `download` is set.

    Args:
        name: "digits", "python_source", or a name that TFDS knows, such as "imagenet2012".
        data_dir: folder of prepared data, local or `gs://`; None: the cache folder.
        download: whether TFDS may download and prepare missing data.

    Raises:
        UserError: the data set is unknown or not prepared, or the folder holds other files.
    """
    data_dir = data_dir or find_cache_folder("data")
    if name in EMBEDDED:
        builder = _find_embedded(name, data_dir)
        _prepare(builder, download_config=tfds.download.DownloadConfig(try_download_gcs=False))
        return builder
    try:
        _check_name(name)
        with _known_features():
            builder: Builder = tfds.builder(name, data_dir=data_dir, try_gcs=False)
    except UserError:
        raise
    except tfds.core.DatasetNotFoundError as error:
        known = [*EMBEDDED, *tfds.list_builders()]
        near = did_you_mean(name, known)
        near = near if "Did you mean" in near else " tfds.list_builders() lists what TFDS has."
        raise UserError(f"There is no data set {name!r}.{near}") from error
    except Exception as error:  # TFDS raises many kinds: AssertionError, and errors of the network
        why = next(iter(str(error).splitlines()), type(error).__name__)
        raise UserError(
            f"TFDS has no data set {name!r} ({why}): data.name is NAME, NAME/CONFIG or "
            "NAME:1.0.0. To name the folder of a data set, set data.data_dir."
        ) from error
    if download:
        _prepare(builder)
    if not builder.is_prepared():
        raise UserError(
            f"The data set {name!r} is not prepared in {data_dir}: run "
            f"`{_format_command(name, data_dir)}` on a machine that can download it. The command "
            "names the files that you have to fetch yourself. Or name the folder that holds the "
            "data set: --config.data.data_dir=FOLDER of a config."
        )
    return builder


def _format_command(name: str, data_dir: str, file_format: str = "") -> str:
    """Returns a Python command that prepares a data set; the command `tfds` needs more packages."""
    options = f", file_format={file_format!r}" if file_format else ""
    made = f"tfds.builder({name!r}, data_dir={data_dir!r}{options}).download_and_prepare()"
    return f'python -c "import tensorflow_datasets as tfds; {made}"'


def _check_name(name: str) -> None:
    """Raises `UserError` for a data set in a namespace, which is another author's program."""
    core: Any = tfds.core
    if core.naming.parse_builder_name_kwargs(name)[0].namespace:
        raise UserError(
            f"TFDS would download and run another author's program for {name!r}. tftpu reads only "
            "the data sets of TFDS itself: data.name is NAME, NAME/CONFIG or NAME:1.0.0."
        )


@contextlib.contextmanager
def _known_features() -> Iterator[None]:
    """Keeps TFDS from importing modules whose classes are named in the files of a data set.

    It uses a private interface of TFDS. Tested with TFDS 4.9.10.

    Raises:
        UserError: a file names a class that is neither part of TFDS nor loaded.
    """
    connector: Any = tfds.features.FeatureConnector
    usual = vars(connector)["cls_from_name"]

    def find_class(name: str) -> Any:
        loaded = name in connector._registered_features or name.rpartition(".")[0] in sys.modules
        if not loaded and "." in name and not name.startswith("tensorflow_datasets."):
            raise UserError(
                f"The files of the data set name the class {name}, whose module TFDS would "
                "import. If the class is yours, import its module in your config file."
            )
        return usual.__get__(None, connector)(name)

    with _LOOKUP:
        connector.cls_from_name = staticmethod(find_class)
        try:
            yield
        finally:
            connector.cls_from_name = usual


def count_examples(builder: Builder, split: str) -> int:
    """Returns the number of examples in a split.

    Raises:
        UserError: there is no such split, or it is empty.
    """
    try:
        examples = builder.info.splits[split].num_examples
    except (KeyError, ValueError) as error:
        raise UserError(
            f"The data set {builder.name!r} has no split {split!r}."
            f"{did_you_mean(split, list(builder.info.splits))}"
        ) from error
    if not examples:
        raise UserError(f"The split {split!r} of the data set {builder.name!r} is empty.")
    return examples


def check_format(builder: Builder) -> None:
    """Raises `UserError` if the files of a data set are not TFRecord."""
    kind = builder.info.file_format.value
    if kind != "tfrecord":
        raise UserError(
            f"The data set {builder.name!r} is prepared as {kind}, but tftpu reads only tfrecord. "
            "Prepare it in another folder, for example with "
            f"`{_format_command(builder.info.full_name, 'FOLDER', 'tfrecord')}`."
        )


def open_shards(builder: Builder, split: str, shuffle: int = SHUFFLE) -> Shards:
    """Returns the records of a split, such as "train", "train[:90%]" or "train+test".

    Args:
        builder: the builder of the data set.
        split: the split, as TFDS names it.
        shuffle: see `Shards`.

    Raises:
        UserError: there is no such split, it is empty, or its files are missing or not TFRecord.
    """
    count_examples(builder, split)
    check_format(builder)
    pieces = [
        Piece(str(part.filename), part.examples_in_shard, part.skip)
        if part.take == -1
        else Piece(str(part.filename), part.take, part.skip)
        for part in builder.info.splits[split].file_instructions
    ]
    return Shards(check_pieces(pieces), shuffle=shuffle)


def find_image_and_label(builder: Builder, image: str, label: str) -> tuple[str, str]:
    """Returns the names of the image feature and of the class label feature of a data set.

    Args:
        builder: the builder of the data set.
        image, label: the features to use if there are several images or class labels.

    Raises:
        UserError: there is no image or class label, or several and none with the given name.
    """
    images, labels = (
        [name for name, feature in builder.info.features.items() if isinstance(feature, kind)]
        for kind in (tfds.features.Image, tfds.features.ClassLabel)
    )
    found = [
        given if given in names else names[0]
        for given, names in ((image, images), (label, labels))
        if given in names or len(names) == 1
    ]
    if len(found) != 2:
        raise UserError(
            f"The data set {builder.name!r} has the image features {images} and the label "
            f"features {labels}: set data.image_feature and data.label_feature to one of each."
        )
    return found[0], found[1]


def load_split(builder: Builder, split: str) -> Batch:
    """Returns all examples of a split in order, as nested NumPy arrays; for small data sets."""
    count_examples(builder, split)
    dataset = builder.as_dataset(split=split, shuffle_files=False)
    examples = list(dataset.as_numpy_iterator())
    return tf.nest.map_structure(lambda *parts: np.stack(parts), *examples)


def _prepare(builder: Builder, **options: Any) -> None:
    """Prepares a data set, with one line instead of the messages and progress bars of TFDS."""
    if builder.is_prepared():
        return
    _check_folder(builder)
    with _locked(builder):
        if builder.is_prepared():  # another process has prepared it meanwhile
            builder.info.read_from_directory(builder.data_dir)
            return
        print(f"Preparing the data set {builder.name!r} in {builder.data_dir}", flush=True)
        tfds.disable_progress_bar()
        with contextlib.redirect_stdout(io.StringIO()):
            builder.download_and_prepare(**options)


def _check_folder(builder: Builder) -> None:
    """Raises `UserError` if the folder for a TFDS data set contains files of another origin.

    Users who name a folder of texts or pictures want to train on these, not on a TFDS data set.
    """
    folder = str(builder.data_dir_root)
    if files.is_remote(folder) or not os.path.isdir(folder):
        return
    found = sorted(e.name for e in os.scandir(folder) if e.is_file() and e.name[0] != ".")
    if found:
        raise UserError(
            f"{folder} holds files, such as {found[0]}, and not the data set {builder.name!r}, "
            "which this config reads. For texts of your own, give the config data=Tokens("
            f"train_text='{folder}/*'); for pictures, data=StreamedImages("
            f"format='folder', data_dir='{folder}'). To prepare {builder.name!r} itself, name an "
            "empty folder."
        )


@contextlib.contextmanager
def _locked(builder: Builder) -> Iterator[None]:
    """Lets only one process at a time prepare a data set on a disk, which TFDS does not ensure."""
    folder = str(builder.data_dir_root)
    if files.is_remote(folder):
        yield
        return
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, f".{builder.name}.lock"), "w") as file:
        with contextlib.suppress(OSError):  # a disk may not support locks
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _find_embedded(name: str, data_dir: str) -> Builder:
    if name == "digits":
        from tftpu.input_pipelines.datasets.builders.digits import Digits

        return Digits(data_dir=data_dir)
    from tftpu.input_pipelines.datasets.builders.python_source import PythonSource

    return PythonSource(data_dir=data_dir)
