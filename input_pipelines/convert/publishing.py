"""The last stage of a conversion: the manifest that makes a split part of a data set."""

import contextlib
import dataclasses
import fcntl
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from tftpu.errors import UserError
from tftpu.input_pipelines.convert.conversion import Conversion
from tftpu.input_pipelines.convert.readers import addresses
from tftpu.input_pipelines.convert.readers.reader import Reader, SkippedFile
from tftpu.input_pipelines.formats import manifest
from tftpu.input_pipelines.formats.manifest import Manifest, Shard
from tftpu.storage import buckets, files


def open_reader(conversion: Conversion) -> Reader:
    """Returns the reader of the source, with the classes of the data set in the output, if any.

    Raises:
        UserError: the source has other classes, or cannot be read.
    """
    options, (text, _) = conversion.options, _read_manifest(conversion.output)
    if text:
        first = manifest.from_json(text.decode(), conversion.output)
        label = first.features.get("label")
        fixed = tuple(first.about.get("classes", ()))
        by_name = conversion.source.partition(":")[0] in ("images", "index")
        options = dataclasses.replace(
            options,
            # Class names get the ids that they have in the first split. If labels are class ids,
            # the given order is kept, and `find_unfinished` compares it with the first split's.
            classes=(fixed or options.classes) if by_name else (options.classes or fixed),
            num_classes=options.num_classes or (label.num_classes if label else 0),
        )
    return addresses.build_reader(conversion.source, options)


def find_unfinished(conversion: Conversion, reader: Reader) -> tuple[Manifest, int] | None:
    """Returns the manifest to extend, and its generation in a bucket; None if the split is done.

    Raises:
        UserError: the folder holds another conversion of the split, or a data set with other
            properties.
    """
    text, generation = _read_manifest(conversion.output)
    if not text:
        return Manifest(conversion.output, reader.features, {}), generation
    found = manifest.from_json(text.decode(), conversion.output)
    done = found.about.get("conversions", {}).get(conversion.split)
    if done == conversion.compute_fingerprint(reader):
        return None
    if conversion.split in found.splits:
        raise UserError(
            f"{conversion.output} already holds a split {conversion.split!r} that was made from "
            "other data or with other options. Choose another output folder, such as "
            f"{files.suggest_path(conversion.output)}."
        )
    if differences := list(_find_differences(found, conversion, reader)):
        raise UserError(
            f"{conversion.output} holds a data set whose first split has other features or "
            f"options: {'; '.join(differences)}. Convert this split with the same ones, or choose "
            "another output folder."
        )
    return found, generation


def _find_differences(first: Manifest, conversion: Conversion, reader: Reader) -> Iterator[str]:
    """Yields the properties in which a split differs from the data set that it is added to."""
    # Values that an older tftpu did not record are not compared.
    keys = ["classes", *(key for key in first.about if key in reader.about and key != "classes")]
    pairs = {key: (first.about.get(key), reader.about.get(key)) for key in keys}
    pairs["compression"] = (first.compression, conversion.compression)
    if first.about.get("tokenizer_crc32c") and len(set(pairs.get("tokenizer_crc32c", ()))) == 1:
        pairs.pop("tokenizer", None)  # the tokenizer is the same file under another name
    for name in {**first.features, **reader.features}:
        pairs[f"feature {name}"] = (first.features.get(name), reader.features.get(name))
    for key, (there, here) in pairs.items():
        if there != here and key not in manifest.OF_SPLITS:
            yield f"{key} is {str(there)[:200]} there, and {str(here)[:200]} here"


def publish(
    conversion: Conversion,
    reader: Reader,
    shards: Sequence[Shard],
    skipped: Sequence[SkippedFile] = (),
) -> Manifest:
    """Writes the manifest with the new split, which makes the split available.

    The manifest is read again, because another process may have added another split meanwhile.
    """
    with _locked(conversion.output):
        found = find_unfinished(conversion, reader)
        if found is None:  # another process has made the same split
            return manifest.read(conversion.output)
        before, generation = found
        after = _extend_manifest(before, conversion, reader, shards, skipped)
        if files.is_remote(conversion.output):
            data = manifest.to_json(after).encode()
            buckets.publish(f"{conversion.output}/{manifest.NAME}", data, generation)
        else:
            manifest.write(after)
        return after


def _extend_manifest(
    before: Manifest,
    conversion: Conversion,
    reader: Reader,
    shards: Sequence[Shard],
    skipped: Sequence[SkippedFile],
) -> Manifest:
    """Returns a copy of a manifest with the new split."""
    conversions = before.about.get("conversions", {})
    about = {
        **before.about,
        **reader.about,
        "conversions": {**conversions, conversion.split: conversion.compute_fingerprint(reader)},
    }
    if skipped:
        names = [left.file for left in skipped]
        about["skipped"] = {**before.about.get("skipped", {}), conversion.split: names}
    return dataclasses.replace(
        before,
        splits={**before.splits, conversion.split: tuple(shards)},
        compression=conversion.compression,
        about=about,
    )


def _read_manifest(folder: str) -> tuple[bytes, int]:
    """Returns the text of a manifest ("" if there is none), and its generation in a bucket."""
    if files.is_remote(folder):
        return buckets.read_version(f"{folder}/{manifest.NAME}")
    path = files.join(folder, manifest.NAME)
    return (files.read(path), 0) if files.exists(path) else (b"", 0)


@contextlib.contextmanager
def _locked(folder: str) -> Iterator[None]:
    """Keeps this machine's other processes from adding to a local data set during the block.

    Data sets in buckets are protected by generations instead.
    """
    if files.is_remote(folder):
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        # Removes the temporary files of a process that was killed.
        for path in Path(folder).glob(f".{manifest.NAME}.*.tmp"):
            path.unlink()
        yield
    finally:
        os.close(descriptor)
