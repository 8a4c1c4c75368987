"""Sets of files in a bucket, moved in parallel and checked, by Google's own client.

What is retried: 429, 5xx, broken connections and bodies that do not match their checksum, with
growing pauses, for `PATIENCE` seconds a request. An upload above 8 MiB is resumable: what broke in
the middle goes on from there. An upload of a set that was killed goes on with the files that are
not there yet. TensorFlow's own `gs://` is for what TensorFlow reads and writes itself.
"""

import base64
import contextlib
import functools
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent import futures
from pathlib import Path
from typing import Any, NamedTuple

import google_crc32c

from tftpu.errors import UserError
from tftpu.storage import checksums

WORKERS = 8  # files at a time: what fills the network of a TPU VM without filling its memory
PATIENCE = 300.0  # seconds that one request is tried for
_CHUNK = 16 << 20  # of a resumable upload: what is sent again when a connection breaks
_TRIES = 3  # of a download whose body does not match its checksum


class Stored(NamedTuple):
    """What a bucket, or a disk, knows of a file: size, CRC32C (8 hexadecimal digits), version."""

    bytes: int
    crc32c: str
    generation: int = 0


def split(uri: str) -> tuple[str, str]:
    """The bucket and the name in it of a `gs://` address.

    Raises:
        UserError: it is none.
    """
    match = re.fullmatch(r"gs://([^/]+)/?(.*)", uri)
    if not match:
        raise UserError(f"{uri!r} is no address in a bucket: write gs://BUCKET/FOLDER.")
    return match[1], match[2].rstrip("/")


def checksum(path: str | os.PathLike) -> Stored:
    """The size and the CRC32C of a local file."""
    with open(path, "rb") as file:
        return Stored(os.path.getsize(path), checksums.crc32c(file))


def listing(folder: str) -> dict[str, Stored]:
    """The files below a folder of a bucket, by their name from the folder on."""
    bucket, prefix = split(folder)
    prefix = f"{prefix}/" if prefix else ""
    with _refusals("listing", folder):
        blobs = _client().list_blobs(bucket, prefix=prefix, retry=_retry())
        return {blob.name.removeprefix(prefix): _stored(blob) for blob in blobs}


def upload(paths: Mapping[str, str | os.PathLike], folder: str) -> dict[str, Stored]:
    """Uploads a set of files, several at a time; those that are there already are not sent again.

    Args:
        paths: local files by the name that they get in the folder.
        folder: `gs://BUCKET/FOLDER`.

    Returns:
        What the bucket holds now, by name.

    Raises:
        UserError: refused, or the bucket could not be reached for `PATIENCE` seconds; or somebody
            else wrote one of the files meanwhile.
    """
    there = listing(folder)

    def send(name: str) -> Stored:
        local, known = checksum(paths[name]), there.get(name, Stored(-1, ""))
        if local[:2] == known[:2]:
            return known
        blob = _blob(f"{folder}/{name}", chunk_size=_CHUNK)
        blob.crc32c = _encoded(local.crc32c)  # the service refuses anything else
        with _refusals("uploading", f"{folder}/{name}"):
            _written(
                blob,
                local,
                lambda: blob.upload_from_filename(
                    os.fspath(paths[name]),
                    if_generation_match=known.generation,
                    retry=_retry(),
                ),
            )
        return _stored(blob)

    return _in_parallel(send, paths)


def download(
    expected: Mapping[str, Stored | None], folder: str, target: str | os.PathLike
) -> dict[str, Path]:
    """Downloads a set of files, several at a time; each appears whole and checked, or not at all.

    Files that are in the target already and match are not fetched again.

    Args:
        expected: by name in the folder, the size and CRC32C that a manifest promises; None: what
            the bucket itself says.
        folder: `gs://BUCKET/FOLDER`.
        target: a local folder.

    Returns:
        The local paths, by name.

    Raises:
        UserError: a file is missing, or is not what was expected; refused, or not reached.
    """
    return _in_parallel(
        lambda name: fetch(f"{folder}/{name}", Path(target) / name, expected[name]), expected
    )


def fetch(uri: str, path: Path, expected: Stored | None = None) -> Path:
    """Downloads one file; see `download`."""
    if expected is None:
        expected = stat(uri)
    if path.exists() and checksum(path)[:2] == expected[:2]:
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
    try:
        fetch_into(uri, temporary, expected)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def fetch_into(uri: str, path: Path, expected: Stored) -> None:
    """Downloads one file, synced and checked, to a path that nobody else reads yet."""
    with _refusals("downloading", uri):
        _fetch_whole(_blob(uri), path)
    found = checksum(path)
    if found[:2] != expected[:2]:
        raise UserError(
            f"{uri} changed since its manifest was written: it has {found.bytes:,} bytes with "
            f"CRC32C {found.crc32c}, and {expected.bytes:,} bytes with {expected.crc32c} were "
            "expected. Convert the data again."
        )


def stat(uri: str) -> Stored:
    """What the bucket knows of a file.

    Raises:
        UserError: there is none; refused, or not reached.
    """
    blob = _blob(uri)
    with _refusals("looking at", uri):
        blob.reload(retry=_retry())
    return _stored(blob)


def read(uri: str) -> tuple[bytes, int]:
    """The content of a small file and its generation; `(b"", 0)` if there is none."""
    from google.api_core import exceptions

    blob = _blob(uri)
    with _refusals("reading", uri):
        try:
            blob.reload(retry=_retry())
            generation = int(blob.generation)
            data = blob.download_as_bytes(
                checksum="crc32c", if_generation_match=generation, retry=_retry()
            )
        except exceptions.NotFound:
            return b"", 0
    return data, generation


def publish(uri: str, data: bytes, generation: int = 0) -> int:
    """Writes a small file, as a manifest, if nobody else has since it was read.

    Args:
        uri: `gs://BUCKET/NAME`.
        data: its content; it appears whole or not at all.
        generation: as `read` gave it; 0: there must be none yet.

    Returns:
        The new generation.

    Raises:
        UserError: somebody else wrote it meanwhile; refused, or not reached.
    """
    blob = _blob(uri)
    wanted = Stored(len(data), f"{google_crc32c.value(data):08x}")
    blob.crc32c = _encoded(wanted.crc32c)
    with _refusals("writing", uri):
        _written(
            blob,
            wanted,
            lambda: blob.upload_from_string(
                data,
                content_type="application/json",
                if_generation_match=generation,
                retry=_retry(),
            ),
        )
    return int(blob.generation)


def location(bucket: str) -> str:
    """Where a bucket lies, as US-WEST4 or EU.

    Raises:
        UserError: there is no such bucket, or it may not be looked at.
    """
    with _refusals("looking at", f"gs://{bucket}"):
        return _client().get_bucket(bucket, retry=_retry()).location


@functools.cache
def _client():
    from google.auth import exceptions
    from google.cloud import storage

    try:
        return storage.Client()
    except exceptions.DefaultCredentialsError as error:
        raise UserError(
            "Google Cloud does not know who you are: run `gcloud auth application-default login`."
        ) from error
    except OSError:  # no project set, and none is needed to read and write objects
        return storage.Client(project="unused")


def _retry():
    from google.cloud.storage import retry

    # Also for writes: each carries a generation, so that done twice is done once.
    return retry.DEFAULT_RETRY.with_delay(initial=0.3, multiplier=2, maximum=30).with_timeout(
        PATIENCE
    )


def _blob(uri: str, chunk_size: int | None = None):
    bucket, name = split(uri)
    return _client().bucket(bucket).blob(name, chunk_size=chunk_size)


def _stored(blob) -> Stored:
    crc = base64.b64decode(blob.crc32c).hex()
    return Stored(int(blob.size), crc, int(blob.generation))


def _encoded(crc32c: str) -> str:
    return base64.b64encode(bytes.fromhex(crc32c)).decode()


def _written(blob, wanted: Stored, write: Callable[[], None]) -> None:
    """Writes; a refusal because what is to be written is there already is none.

    It comes of a request that succeeded and whose answer was lost, or of another process that
    writes the same.
    """
    from google.api_core import exceptions

    try:
        write()
    except exceptions.PreconditionFailed:
        blob.reload(retry=_retry())
        if _stored(blob)[:2] != wanted[:2]:
            raise


def _fetch_whole(blob, path: Path) -> None:
    from google.cloud.storage.exceptions import DataCorruption

    for attempt in range(_TRIES):
        try:
            with open(path, "wb") as file:
                blob.download_to_file(file, checksum="crc32c", retry=_retry())
                file.flush()
                os.fsync(file.fileno())
            return
        except DataCorruption:
            if attempt == _TRIES - 1:
                raise
            time.sleep(0.3 * 2**attempt)


def _in_parallel(function: Callable[[str], Any], names: Iterable[str]) -> dict[str, Any]:
    """function(name) by name; after the first failure nothing new is begun."""
    with futures.ThreadPoolExecutor(WORKERS) as pool:
        begun = {pool.submit(function, name): name for name in names}
        try:
            done = {begun[f]: f.result() for f in futures.as_completed(begun)}
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise
    return {name: done[name] for name in names}


@contextlib.contextmanager
def _refusals(doing: str, uri: str) -> Iterator[None]:
    """Makes a sentence of what the service refuses.

    Nothing of the request is repeated in it: the address of a resumable upload is itself a key.
    """
    import requests
    from google.api_core import exceptions
    from google.auth import exceptions as auth_exceptions
    from google.cloud.storage.exceptions import DataCorruption

    bucket = split(uri)[0]
    try:
        yield
        return
    except exceptions.NotFound:
        reason = "there is no such file, or no such bucket."
    except (exceptions.Forbidden, exceptions.Unauthorized):
        reason = (
            "you may not. Ask the owner of the bucket for roles/storage.objectAdmin on "
            f"gs://{bucket}, or run `gcloud auth application-default login`."
        )
    except exceptions.PreconditionFailed:
        reason = "another process wrote it meanwhile. Give every run a folder of its own."
    except auth_exceptions.GoogleAuthError:
        reason = (
            "Google Cloud does not know who you are: run `gcloud auth application-default login`."
        )
    except DataCorruption:
        reason = f"what arrived did not match its checksum, {_TRIES} times over."
    except exceptions.GoogleAPICallError as error:
        reason = f"the service answers {error.code}, tried for {PATIENCE:g} s."
    except (exceptions.RetryError, requests.RequestException, ConnectionError):
        reason = f"no answer, tried for {PATIENCE:g} s. Is the network up?"
    raise UserError(f"Failed {doing} {uri}: {reason}") from None
