"""Transfers of sets of files to and from buckets, in parallel and verified, by Google's client.

Requests are retried by the policy of `retry`: on 429, 5xx, broken connections and bodies that do
not match their checksum. An upload above 8 MiB continues after the last part that arrived. An
interrupted upload of a set sends the missing files only. TensorFlow's own `gs://` (`files`) serves
what TensorFlow reads and writes itself.
"""

import base64
import contextlib
import functools
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent import futures
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import google_crc32c

from tftpu.errors import UserError
from tftpu.storage import checksums, retry

_T = TypeVar("_T")

Blob = Any  # google.cloud.storage.Blob, which is typed incompletely

WORKERS = 8  # files at a time: enough to fill the network of a TPU VM, but not its memory
_CHUNK = 16 << 20  # bytes of a resumable upload that are sent again when a connection breaks
_TRIES = 3  # downloads of a file whose body does not match its checksum


class Stored(NamedTuple):
    """A file in a bucket, or on a disk.

    Attributes:
        bytes: its size.
        crc32c: its checksum, 8 hexadecimal digits.
        generation: its version in the bucket; 0: none.
    """

    bytes: int
    crc32c: str
    generation: int = 0


class ChangedError(UserError):
    """Another process wrote the object meanwhile."""


def is_address(path: str | os.PathLike[str]) -> bool:
    """Returns whether a path is in a bucket of Cloud Storage."""
    return str(path).startswith("gs://")


def split(uri: str) -> tuple[str, str]:
    """Splits a `gs://` address into the bucket and the name in it.

    Raises:
        UserError: it is not such an address.
    """
    match = re.fullmatch(r"gs://([^/]+)/?(.*)", uri)
    if not match:
        raise UserError(f"{uri!r} is not an address in a bucket: write gs://BUCKET/FOLDER.")
    return match[1], match[2].rstrip("/")


def checksum(path: str | os.PathLike[str]) -> Stored:
    """Returns the size and the CRC32C of a local file."""
    with open(path, "rb") as file:
        return Stored(os.path.getsize(path), checksums.crc32c(file))


def listing(folder: str) -> dict[str, Stored]:
    """Returns the files below a folder of a bucket, by their names relative to it."""
    bucket, prefix = split(folder)
    prefix = f"{prefix}/" if prefix else ""
    with _refusals("listing", folder):
        blobs = _create_client().list_blobs(bucket, prefix=prefix, retry=retry.of_google_client())
        return {blob.name.removeprefix(prefix): _describe_stored(blob) for blob in blobs}


def upload(paths: Mapping[str, str | os.PathLike[str]], folder: str) -> dict[str, Stored]:
    """Uploads a set of files, several at a time; files that are there already are skipped.

    Args:
        paths: local files, by the names they get in the folder.
        folder: `gs://BUCKET/FOLDER`.

    Returns:
        The files in the bucket, by name.

    Raises:
        UserError: the service refuses or stays out of reach, or another process wrote one of the
            files meanwhile.
    """
    there = listing(folder)

    def send(name: str) -> Stored:
        local, known = checksum(paths[name]), there.get(name, Stored(-1, ""))
        if local[:2] == known[:2]:
            return known
        blob = _build_blob(f"{folder}/{name}", chunk_size=_CHUNK)
        blob.crc32c = _encode_crc(local.crc32c)  # the service rejects any other content
        with _refusals("uploading", f"{folder}/{name}"):
            _write_file(
                blob,
                local,
                lambda: blob.upload_from_filename(
                    os.fspath(paths[name]),
                    if_generation_match=known.generation,
                    retry=retry.of_google_client(),
                ),
            )
        return _describe_stored(blob)

    return _call_in_parallel(send, paths)


def download(
    expected: Mapping[str, Stored | None], folder: str, target: str | os.PathLike[str]
) -> dict[str, Path]:
    """Downloads a set of files, several at a time; each appears complete and verified.

    Files in the target that match already are skipped.

    Args:
        expected: the size and CRC32C of each file by its manifest, by name in the folder; None:
            those that the bucket reports.
        folder: `gs://BUCKET/FOLDER`.
        target: a local folder.

    Returns:
        The local paths, by name.

    Raises:
        UserError: a file is missing or differs from what was expected, or the service refuses or
            stays out of reach.
    """
    return _call_in_parallel(
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
    """Downloads one file to a temporary path, syncs it and verifies it."""
    with _refusals("downloading", uri):
        _fetch_whole(_build_blob(uri), path)
    found = checksum(path)
    if found[:2] != expected[:2]:
        raise UserError(
            f"{uri} changed since its manifest was written: it has {found.bytes:,} bytes with "
            f"CRC32C {found.crc32c}, and {expected.bytes:,} bytes with {expected.crc32c} were "
            "expected. Convert the data again."
        )


def stat(uri: str) -> Stored:
    """Returns the size, the checksum and the generation of a file in a bucket.

    Raises:
        UserError: there is none, or the service refuses or stays out of reach.
    """
    blob = _build_blob(uri)
    with _refusals("looking at", uri):
        blob.reload(retry=retry.of_google_client())
    return _describe_stored(blob)


def read(uri: str) -> tuple[bytes, int]:
    """Returns the content of a small file and its generation; `(b"", 0)` if there is none."""
    from google.api_core import exceptions

    blob = _build_blob(uri)
    with _refusals("reading", uri):
        try:
            blob.reload(retry=retry.of_google_client())
            generation = _describe_stored(blob).generation
            same = {"if_generation_match": generation, "retry": retry.of_google_client()}
            data = _download_file(uri, lambda: blob.download_as_bytes(checksum="crc32c", **same))
        except exceptions.NotFound:
            return b"", 0
    return data, generation


def publish(uri: str, data: bytes, generation: int = 0) -> int:
    """Writes a small file, such as a manifest, unless another process wrote it since it was read.

    Args:
        uri: `gs://BUCKET/NAME`.
        data: its content, which appears completely or not at all.
        generation: the one that `read` returned; 0: there must be no such file yet.

    Returns:
        The new generation.

    Raises:
        UserError: another process wrote it meanwhile, or the service refuses or stays out of reach.
    """
    blob = _build_blob(uri)
    wanted = Stored(len(data), f"{google_crc32c.value(data):08x}")
    blob.crc32c = _encode_crc(wanted.crc32c)
    terms = {"if_generation_match": generation, "retry": retry.of_google_client()}
    with _refusals("writing", uri):
        _write_file(
            blob, wanted, lambda: blob.upload_from_string(data, "application/json", **terms)
        )
    return _describe_stored(blob).generation


def append(uri: str, data: bytes, before: Stored) -> Stored:
    """Appends to an object, unless another process wrote it: uploads a part, and joins the two.

    Args:
        uri: `gs://BUCKET/NAME`.
        data: appears completely or not at all.
        before: the object, as far as this process knows it; its generation is 0 if there is none.

    Returns:
        The object as it is now.

    Raises:
        ChangedError: another process wrote it meanwhile.
        UserError: the service refuses or stays out of reach. The same call may be repeated.
    """
    crc32c = f"{google_crc32c.extend(int(before.crc32c, 16), data):08x}"
    wanted = Stored(before.bytes + len(data), crc32c)
    if not before.generation:
        return wanted._replace(generation=publish(uri, data))
    part, whole = _build_blob(f"{uri}.part"), _build_blob(uri)
    with _refusals("writing", uri):
        part.upload_from_string(data, checksum="crc32c", retry=retry.of_google_client())
        _write_file(
            whole,
            wanted,
            lambda: whole.compose(
                [_build_blob(uri), part],
                if_generation_match=before.generation,
                if_source_generation_match=[None, part.generation],
                retry=retry.of_google_client(),
            ),
        )
    if _describe_stored(whole)[:2] != wanted[:2]:
        raise ChangedError(f"Failed writing {uri}: its content is not what was written.")
    remove(f"{uri}.part", part.generation)
    return _describe_stored(whole)


def remove(uri: str, generation: int) -> None:
    """Removes an object if it still is this generation; one that stays does no harm."""
    from google.api_core import exceptions

    with contextlib.suppress(exceptions.GoogleAPICallError, exceptions.RetryError, OSError):
        _build_blob(uri).delete(if_generation_match=generation, timeout=10.0, retry=None)


def location(bucket: str) -> str:
    """Returns the location of a bucket, such as US-WEST4 or EU.

    Raises:
        UserError: there is no such bucket, or access to it is denied.
    """
    with _refusals("looking at", f"gs://{bucket}"):
        return _create_client().get_bucket(bucket, retry=retry.of_google_client()).location


@functools.cache
def _create_client() -> Any:
    from google.auth import exceptions
    from google.cloud import storage

    try:
        return storage.Client()
    except exceptions.DefaultCredentialsError as error:
        raise UserError(
            "no valid Google Cloud credentials: run `gcloud auth application-default login`."
        ) from error
    except OSError:  # no project is set; reading and writing objects needs none
        return storage.Client(project="unused")


def _build_blob(uri: str, chunk_size: int | None = None) -> Blob:
    bucket, name = split(uri)
    return _create_client().bucket(bucket).blob(name, chunk_size=chunk_size)


def _describe_stored(blob: Blob) -> Stored:
    crc = base64.b64decode(blob.crc32c).hex()
    return Stored(int(blob.size), crc, int(blob.generation))


def _encode_crc(crc32c: str) -> str:
    return base64.b64encode(bytes.fromhex(crc32c)).decode()


def _write_file(blob: Blob, wanted: Stored, write: Callable[[], None]) -> None:
    """Writes a file, and accepts a failed precondition if the bucket holds the same content.

    This happens if the answer to an earlier request was lost, or if another process won.
    """
    from google.api_core import exceptions

    try:
        write()
    except exceptions.PreconditionFailed as error:
        try:
            blob.reload(retry=retry.of_google_client())
        except exceptions.NotFound:
            raise error from None  # another process removed it
        if _describe_stored(blob)[:2] != wanted[:2]:
            raise


def _fetch_whole(blob: Blob, path: Path) -> None:
    def fetch() -> None:
        with open(path, "wb") as file:
            blob.download_to_file(file, checksum="crc32c", retry=retry.of_google_client())
            file.flush()
            os.fsync(file.fileno())

    _download_file(f"gs://{blob.bucket.name}/{blob.name}", fetch)


def _download_file(uri: str, fetch: Callable[[], _T]) -> _T:
    """Downloads a file, and again in the two cases that Google's client does not repeat.

    The content does not match its checksum; the connection breaks while the text of a refusal,
    which says what is wrong, arrives.
    """
    import requests
    from google.cloud.storage.exceptions import DataCorruption

    return retry.call(fetch, (DataCorruption, requests.RequestException), uri, tries=_TRIES)


def _call_in_parallel(function: Callable[[str], _T], names: Iterable[str]) -> dict[str, _T]:
    """Calls a function for each name in parallel; starts no more calls after the first failure."""
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
    """Turns the errors of a request into a `UserError` with advice.

    It quotes nothing of the request: the address of a resumable upload is itself a key.
    """
    import requests
    from google.api_core import exceptions
    from google.auth import exceptions as auth_exceptions
    from google.cloud.storage.exceptions import DataCorruption

    bucket, kind = split(uri)[0], UserError
    try:
        yield
        return
    except exceptions.NotFound:
        reason = "there is no such file or bucket."
    except (exceptions.Forbidden, exceptions.Unauthorized):
        reason = (
            "access is denied. Ask the owner of the bucket for roles/storage.objectAdmin on "
            f"gs://{bucket}, or run `gcloud auth application-default login`."
        )
    except exceptions.PreconditionFailed:
        reason, kind = "another process wrote it meanwhile.", ChangedError
        reason += " Use a separate folder for each run."
    except auth_exceptions.GoogleAuthError:
        reason = "no valid Google Cloud credentials: run `gcloud auth application-default login`."
    except DataCorruption:
        reason = f"the content did not match its checksum in {_TRIES} tries."
    except exceptions.GoogleAPICallError as error:
        reason = f"the service answers {error.code}; retried for {retry.POLICY.seconds:g} s."
    except (exceptions.RetryError, requests.RequestException, ConnectionError):
        reason = f"no answer; retried for {retry.POLICY.seconds:g} s. Is the network up?"
    raise kind(f"Failed {doing} {uri}: {reason}") from None
