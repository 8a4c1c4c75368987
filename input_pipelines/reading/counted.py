"""TFRecord files without a manifest: counted once, and described by the features they hold."""

import dataclasses
import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor

from tftpu.errors import UserError
from tftpu.input_pipelines.formats import tfrecord
from tftpu.input_pipelines.formats.manifest import Feature, Manifest, Shard
from tftpu.input_pipelines.reading.cache_folder import cache_folder
from tftpu.storage import files


def described(folder: str, split: str, features: dict[str, Feature], compression: str) -> Manifest:
    """Returns the manifest of a folder that has none, made by reading its files once.

    Args:
        folder: of the files.
        split: what their names begin with.
        features: of a record.
        compression: "" or "GZIP".

    Raises:
        UserError: there are no files of the split.
    """
    names = [name for name in files.names_in(folder) if name.startswith(split)]
    if not names:
        raise UserError(f"There is no file {files.join(folder, split)}*.")
    with ThreadPoolExecutor(8) as pool:
        paths = [files.join(folder, name) for name in names]
        found = tuple(pool.map(lambda path: _counted(path, compression), paths))
    return Manifest(folder, features, {split: found}, compression)


def _counted(path: str, compression: str) -> Shard:
    """Scans a file once; later calls read the result from the cache folder."""
    size = files.size(path)
    changed = os.path.getmtime(path) if not files.is_remote(path) else 0
    key = json.dumps([os.path.abspath(path) if changed else path, size, changed, compression])
    note = files.join(cache_folder(), "counted", hashlib.sha256(key.encode()).hexdigest() + ".json")
    if files.exists(note):
        kept = json.loads(files.read(note))
        return Shard(**{**kept, "offsets": tuple(kept["offsets"])})
    found = dataclasses.replace(tfrecord.scan(path, compression), name=os.path.basename(path))
    files.write_whole(note, json.dumps(dataclasses.asdict(found)).encode())
    return found
