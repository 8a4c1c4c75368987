"""Makes manifests for TFRecord files without one: counts records and infers features."""

import dataclasses
import hashlib
import json
import logging
import os
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from tftpu.errors import UserError
from tftpu.input_pipelines.formats import manifest, tfrecord
from tftpu.input_pipelines.formats.manifest import Feature, Manifest, Shard
from tftpu.installation import find_cache_folder
from tftpu.storage import files
from tftpu.storage.side_files import read_sealed, seal

_log = logging.getLogger(__name__)

_LONG = 5.0  # seconds of counting records before progress is logged


def read_manifest(
    folder: str, split: str, features: Mapping[str, Feature] | None = None, compression: str = ""
) -> Manifest:
    """Reads the manifest of a folder; if there is none, makes one by reading the files once.

    Args:
        folder: the folder of the files.
        split: the split: the beginning of its files' names, or the subfolder in which they are.
        features: the features of a record, for a folder without a manifest; None: inferred from
            the first record.
        compression: "GZIP", for a folder without a manifest; "": detected from the files.

    Raises:
        UserError: there is neither a manifest nor a file of the split, one is damaged, or only some
            files are compressed.
    """
    if files.exists(files.join(folder, manifest.NAME)):
        return manifest.read(folder)
    names = _list_names(folder, split)
    if not names:
        raise UserError(_explain_missing_files(folder, split))
    counted = _count_files(folder, names, compression)
    kinds = {kind: shard.name for shard, kind in counted}
    if len(kinds) > 1:
        raise UserError(
            f"{kinds['GZIP']} in {folder} is compressed, and {kinds['']} is not: compress all "
            "files of a split, or none."
        )
    [kind] = kinds
    shards = tuple(shard for shard, _ in counted)
    if features is None:
        features = find_features(folder, split, kind)
    return Manifest(folder, dict(features), {split: shards}, kind)


def find_features(folder: str, split: str, compression: str = "") -> dict[str, Feature]:
    """Returns the features that a split's first record has; {} if the split has no records.

    Raises:
        UserError: a file is damaged, or its records are not `tf.train.Example`.
    """
    from tftpu.input_pipelines.formats import example_proto

    for name in _list_names(folder, split):
        path = files.join(folder, name)
        for _, record in tfrecord.read_records(
            path, compression or tfrecord.find_compression(path)
        ):
            return example_proto.find_features(record, f"record 0 of {path}")
    return {}


def _explain_missing_files(folder: str, split: str) -> str:
    """Returns the error message for a folder without files of a split."""
    where = files.join(folder, split) if split else folder
    _, inner = _list_visible(where)
    if not inner:
        return (
            f"There is no data set in {folder}: there is neither {manifest.NAME} nor a TFRecord "
            f"file {files.join(folder, split)}* or in {files.join(folder, split)}/. "
            f"{manifest.OTHER_FOLDER}"
        )
    holds = f"{where} holds no TFRecord files, but the folders {', '.join(inner[:20])}"
    if split:
        return f"{holds}: name {where} as the folder, and one of these as the split, as {inner[0]}."
    return f"{holds}, and no {manifest.NAME}: name the split to read, as {folder}:{inner[0]}."


def _list_names(folder: str, split: str) -> list[str]:
    """Returns the files of a split: those in its folder, or those whose names begin with it."""
    names, inner = _list_visible(folder)
    inside, _ = _list_visible(files.join(folder, split)) if split in inner else ([], [])
    return [f"{split}/{name}" for name in inside] or [n for n in names if n.startswith(split)]


def _list_visible(folder: str) -> tuple[list[str], list[str]]:
    """Returns the names of the files in a folder, and of the folders in it, without hidden ones."""
    found = files.list_folder(folder)
    names, inner = ([n for n in names if not n.startswith((".", "_"))] for names in found)
    return names, inner


def _count_files(folder: str, names: list[str], compression: str) -> list[tuple[Shard, str]]:
    """Returns the result of `_count_file` for each file; logs the progress if that takes long."""
    counted: list[tuple[Shard, str]] = []
    started, due = time.monotonic(), _LONG
    with ThreadPoolExecutor(8) as pool:
        for found in pool.map(lambda name: _count_file(folder, name, compression), names):
            counted.append(found)
            seconds = time.monotonic() - started
            if seconds >= due and len(counted) < len(names):
                due *= 2
                _log.warning(
                    "Counting the records in %s, once: %s of %s files after %.0f s.",
                    *(folder, f"{len(counted):,}", f"{len(names):,}", seconds),
                )
    return counted


def _count_file(folder: str, name: str, compression: str) -> tuple[Shard, str]:
    """Scans a file once; later calls read the result from the cache folder.

    Returns:
        The shard, and its compression.
    """
    path = files.join(folder, name)
    compression = compression or tfrecord.find_compression(path)
    size = files.find_size(path)
    changed = os.path.getmtime(path) if not files.is_remote(path) else 0
    key = json.dumps([os.path.abspath(path) if changed else path, size, changed, compression])
    note = files.join(
        find_cache_folder("data"), "counted", hashlib.sha256(key.encode()).hexdigest() + ".json"
    )
    kept = read_sealed(note)
    if kept is not None:
        shard = {**kept["shard"], "offsets": tuple(kept["shard"]["offsets"]), "name": name}
        return Shard(**shard), compression
    found = dataclasses.replace(tfrecord.scan_shard(path, compression), name=name)
    files.write_whole(note, seal(json.dumps({"shard": dataclasses.asdict(found)})))
    return found, compression
