"""The last stage of a conversion: the manifest that makes a split part of a data set."""

import contextlib
import dataclasses
import fcntl
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from tftpu.errors import UserError
from tftpu.input_pipelines.convert.conversion import Conversion
from tftpu.input_pipelines.convert.readers.reader import Reader, Skipped
from tftpu.input_pipelines.formats import manifest
from tftpu.input_pipelines.formats.manifest import Manifest, Shard
from tftpu.storage import buckets, files


def begun(conversion: Conversion, reader: Reader) -> tuple[Manifest, int] | None:
    """Returns the manifest to add the split to, and its generation; None if the split is done.

    Raises:
        UserError: the folder holds another conversion of the split, or other features.
    """
    text, generation = _read_manifest(conversion.output)
    if not text:
        return Manifest(conversion.output, reader.features, {}), generation
    found = manifest.from_json(text.decode(), conversion.output)
    done = found.about.get("conversions", {}).get(conversion.split)
    if done == conversion.fingerprint(reader):
        return None
    if conversion.split in found.splits:
        raise UserError(
            f"{conversion.output} holds another {conversion.split!r} split already, from other "
            "data or options: choose another output folder, or remove it first."
        )
    if (found.features, found.compression) != (reader.features, conversion.compression):
        raise UserError(
            f"{conversion.output} holds a data set of other features or compression: choose "
            "another output folder."
        )
    return found, generation


def publish(
    conversion: Conversion,
    reader: Reader,
    shards: Sequence[Shard],
    skipped: Sequence[Skipped] = (),
) -> Manifest:
    """Writes the manifest with the new split, which makes the split available.

    The manifest is read again: another process may have added another split meanwhile.
    """
    with _alone(conversion.output):
        found = begun(conversion, reader)
        if found is None:  # another process has made the same
            return manifest.read(conversion.output)
        before, generation = found
        after = _extended(before, conversion, reader, shards, skipped)
        if files.is_remote(conversion.output):
            data = manifest.to_json(after).encode()
            buckets.publish(f"{conversion.output}/{manifest.NAME}", data, generation)
        else:
            manifest.write(after)
        return after


def _extended(
    before: Manifest,
    conversion: Conversion,
    reader: Reader,
    shards: Sequence[Shard],
    skipped: Sequence[Skipped],
) -> Manifest:
    """Returns a manifest with another split."""
    conversions = before.about.get("conversions", {})
    about = {
        **before.about,
        **reader.about,
        "conversions": {**conversions, conversion.split: conversion.fingerprint(reader)},
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
    """Returns the text of a manifest, empty if there is none, and its generation in a bucket."""
    if files.is_remote(folder):
        return buckets.read(f"{folder}/{manifest.NAME}")
    path = files.join(folder, manifest.NAME)
    return (files.read(path), 0) if files.exists(path) else (b"", 0)


@contextlib.contextmanager
def _alone(folder: str) -> Iterator[None]:
    """Runs a block in which no other process of this machine adds to a local data set.

    Data sets in buckets are protected by generations instead.
    """
    if files.is_remote(folder):
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        for path in Path(folder).glob(f".{manifest.NAME}.*.tmp"):  # of one that was killed
            path.unlink()
        yield
    finally:
        os.close(descriptor)
