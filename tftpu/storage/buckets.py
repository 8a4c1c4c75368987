"""Reads and writes files in Cloud Storage buckets with Google's client.

Requests are retried on status 429 and 5xx, broken connections, and bodies that do not match their
checksum; see `retry`. An upload above 8 MiB continues after the last part that arrived. When an
interrupted upload of several files is repeated, it sends only the missing files.

`files` has the operations that also work on local paths. TensorFlow uses its own client for the
files that it reads and writes itself: data sets, events, profiles.
"""

import base64
import contextlib
import functools
import io
import os
import re
import tempfile
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent import futures
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol, TypeVar

import google_crc32c

from tftpu.errors import UserError
from tftpu.storage import retry

_T = TypeVar("_T")

Blob = Any  # google.cloud.storage.Blob, which is typed incompletely

WORKERS = 8  # files at a time: enough to fill the network of a TPU VM, but not its memory
_CHUNK = 16 << 20  # bytes of a resumable upload that are sent again if a connection breaks
_PIECE = 4 << 20  # bytes that an open file reads at a time
_TRIES = 3  # downloads of a file before a wrong checksum is an error


class Stored(NamedTuple):
    """A file in a bucket, or on a disk.

    Attributes:
        bytes: its size in bytes.
        crc32c: its CRC32C checksum, as 8 hexadecimal digits.
        generation: its version number in the bucket; 0 for a local or missing file.
    """

    bytes: int
    crc32c: str
    generation: int = 0


class BucketError(UserError, OSError):
    """The service refuses a request, or cannot be reached."""


class MissingError(BucketError, FileNotFoundError):
    """There is no such object, or no such bucket."""


class UnavailableError(BucketError):
    """The service does not answer, or not now: the same command may succeed later."""


class ChangedError(UserError):
    """Another process wrote the object meanwhile."""


class Readable(Protocol):
    """A file open for reading bytes."""

    def read(self, size: int, /) -> bytes: ...


def split(uri: str) -> tuple[str, str]:
    """Splits a `gs://` address into the bucket and the name in it.

    Raises:
        UserError: the address has another form.
    """
    match = re.fullmatch(r"gs://([^/]+)/?(.*)", uri)
    if not match:
        raise UserError(
            f"{uri!r} is not an address in a bucket: give a local path, or gs://BUCKET/FOLDER."
        )
    return match[1], match[2].rstrip("/")


def compute_crc32c(file: Readable) -> str:
    """Returns the CRC32C of an open file from its position on, as eight hexadecimal digits."""
    crc = google_crc32c.Checksum()
    while chunk := file.read(1 << 20):
        crc.update(chunk)
    return crc.digest().hex()


def describe_file(path: str | os.PathLike[str]) -> Stored:
    """Returns the size and the CRC32C of a local file."""
    with open(path, "rb") as file:
        return Stored(os.path.getsize(path), compute_crc32c(file))


def list_files(folder: str) -> dict[str, Stored]:
    """Returns the files below a folder of a bucket, by their names relative to it."""
    bucket, prefix = _split_folder(folder)

    def list_all() -> dict[str, Stored]:
        found = _create_client().list_blobs(
            bucket, prefix=prefix, retry=retry.for_google_client(folder)
        )
        return {blob.name.removeprefix(prefix): _describe_stored(blob) for blob in found}

    return _request("listing", folder, list_all)


def list_names(folder: str) -> tuple[list[str], list[str]]:
    """Returns the names of the files in a folder of a bucket, and of the folders in it."""
    bucket, prefix = _split_folder(folder)

    def list_level() -> tuple[list[str], list[str]]:
        found = _create_client().list_blobs(
            bucket, prefix=prefix, delimiter="/", retry=retry.for_google_client(folder)
        )
        names = [blob.name.removeprefix(prefix) for blob in found]
        inner = [name.removeprefix(prefix).rstrip("/") for name in found.prefixes]
        return sorted(filter(None, names)), sorted(inner)  # "" marks an empty folder

    return _request("listing", folder, list_level)


def exists(uri: str) -> bool:
    """Returns whether an object of this name exists, or a folder of this name with objects."""
    bucket, prefix = _split_folder(uri)

    def look() -> bool:
        terms = {"retry": retry.for_google_client(uri)}
        if prefix and _build_blob(uri).exists(**terms):
            return True
        found = _create_client().list_blobs(bucket, prefix=prefix, max_results=1, **terms)
        return any(True for _ in found)

    try:
        return _request("looking at", uri, look)
    except MissingError:  # the bucket does not exist
        return False


def upload(paths: Mapping[str, str | os.PathLike[str]], folder: str) -> dict[str, Stored]:
    """Uploads files, several at a time; skips those that the folder has with the same content.

    Args:
        paths: local files, by the names they get in the folder.
        folder: `gs://BUCKET/FOLDER`.

    Returns:
        The files in the bucket, by name.

    Raises:
        UserError: the service refuses or stays out of reach, or another process wrote one of the
            files meanwhile.
    """
    there = list_files(folder)

    def send(name: str) -> Stored:
        local, known = describe_file(paths[name]), there.get(name, Stored(-1, ""))
        if local[:2] == known[:2]:
            return known
        blob = _build_blob(f"{folder}/{name}", chunk_size=_CHUNK)
        blob.crc32c = _encode_crc(local.crc32c)  # the service rejects other content
        _write_object(
            "uploading",
            blob,
            local,
            lambda: blob.upload_from_filename(
                os.fspath(paths[name]),
                if_generation_match=known.generation,
                retry=retry.for_google_client(f"{folder}/{name}"),
            ),
        )
        return _describe_stored(blob)

    return _call_in_parallel(send, paths)


def download(
    expected: Mapping[str, Stored | None], folder: str, target: str | os.PathLike[str]
) -> dict[str, Path]:
    """Downloads files, several at a time; each appears complete and verified.

    Files in the target that match already are skipped.

    Args:
        expected: the size and CRC32C that each file should have, by its name in the folder; None
            expects those that the bucket reports.
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
    """Downloads one file to `path`, as `download` does, and returns the path."""
    if expected is None:
        expected = look_up(uri)
    if path.exists() and describe_file(path)[:2] == expected[:2]:
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
    """Downloads one file, syncs it, and raises `UserError` if it is not as expected."""
    blob = _build_blob(uri)

    def fetch_whole() -> None:
        with open(path, "wb") as file:
            blob.download_to_file(file, checksum="crc32c", retry=retry.for_google_client(uri))
            file.flush()
            os.fsync(file.fileno())

    _request("downloading", uri, lambda: _download(uri, fetch_whole))
    found = describe_file(path)
    if found[:2] != expected[:2]:
        raise UserError(
            f"{uri} changed since its manifest was written: it has {found.bytes:,} bytes with "
            f"CRC32C {found.crc32c}, but {expected.bytes:,} bytes with {expected.crc32c} were "
            "expected. Convert the data again."
        )


def look_up(uri: str) -> Stored:
    """Returns the size, the checksum and the generation of a file in a bucket.

    Raises:
        MissingError: the file does not exist.
        BucketError: the service refuses or stays out of reach.
    """
    blob = _build_blob(uri)
    _request("looking at", uri, lambda: blob.reload(retry=retry.for_google_client(uri)))
    return _describe_stored(blob)


def read(uri: str) -> bytes:
    """Returns the content of a file.

    Raises:
        MissingError: the file does not exist.
        BucketError: the service refuses or stays out of reach.
    """
    blob, terms = _build_blob(uri), {"checksum": "crc32c", "retry": retry.for_google_client(uri)}
    fetch = functools.partial(blob.download_as_bytes, **terms)
    return _request("reading", uri, lambda: _download(uri, fetch))


def read_range(uri: str, first: int, count: int | None = None) -> bytes:
    """Returns `count` bytes of a file from an offset, or all up to its end. Raises as `read`."""
    from google.api_core import exceptions

    if count == 0:
        return b""
    blob, terms = _build_blob(uri), {"checksum": None, "retry": retry.for_google_client(uri)}
    last = None if count is None else first + count - 1

    def fetch() -> bytes:
        try:
            return blob.download_as_bytes(start=first, end=last, **terms)
        except exceptions.RequestRangeNotSatisfiable:  # the object ends before `first`
            return b""

    return _request("reading", uri, lambda: _download(uri, fetch))


def open_file(uri: str) -> BinaryIO:
    """Opens a file for buffered reading. Opening and reading it raise the errors of `read`."""
    return io.BufferedReader(_ObjectReader(uri), _PIECE)


def read_version(uri: str) -> tuple[bytes, int]:
    """Returns the content of a small file and its generation; `(b"", 0)` if there is none.

    Raises:
        ChangedError: another process wrote it meanwhile.
        BucketError: the service refuses or stays out of reach.
    """
    blob = _build_blob(uri)

    def fetch() -> tuple[bytes, int]:
        blob.reload(retry=retry.for_google_client(uri))
        generation = _describe_stored(blob).generation
        same = {"if_generation_match": generation, "retry": retry.for_google_client(uri)}
        fetch_same = functools.partial(blob.download_as_bytes, checksum="crc32c", **same)
        return _download(uri, fetch_same), generation

    try:
        return _request("reading", uri, fetch)
    except MissingError:
        return b"", 0


def read_newest(uri: str) -> tuple[bytes, int]:
    """Returns the result of `read_version`; reads again if another process writes meanwhile."""
    while True:
        with contextlib.suppress(ChangedError):
            return read_version(uri)


def write(uri: str, parts: Iterable[bytes]) -> None:
    """Writes a file, or replaces it; it appears completely or not at all.

    Args:
        uri: `gs://BUCKET/NAME`.
        parts: the content, in pieces. Content of more than `_CHUNK` bytes is buffered on the local
            disk, because the upload may have to send it again.

    Raises:
        BucketError: the service refuses or stays out of reach.
    """
    crc = google_crc32c.Checksum()
    with tempfile.SpooledTemporaryFile(_CHUNK) as file:
        for part in parts:
            crc.update(part)
            file.write(part)
        blob, size = _build_blob(uri, chunk_size=_CHUNK), file.tell()
        blob.crc32c = _encode_crc(crc.digest().hex())
        terms = {"size": size, "rewind": True, "retry": retry.for_google_client(uri)}
        _request("writing", uri, lambda: blob.upload_from_file(file, **terms))


def publish(uri: str, data: bytes, generation: int = 0) -> int:
    """Writes a small file, such as a manifest, unless another process wrote it since it was read.

    Args:
        uri: `gs://BUCKET/NAME`.
        data: its content, which appears completely or not at all.
        generation: the generation that `read_version` returned; 0 if the file must not exist yet.

    Returns:
        The new generation.

    Raises:
        ChangedError: another process wrote it meanwhile.
        BucketError: the service refuses or stays out of reach.
    """
    blob = _build_blob(uri)
    wanted = Stored(len(data), f"{google_crc32c.value(data):08x}")
    blob.crc32c = _encode_crc(wanted.crc32c)
    terms = {"if_generation_match": generation, "retry": retry.for_google_client(uri)}
    send = functools.partial(blob.upload_from_string, data, "application/json", **terms)
    _write_object("writing", blob, wanted, send)
    return _describe_stored(blob).generation


def append(uri: str, data: bytes, before: Stored) -> Stored:
    """Appends to an object by composing it with a second one, unless another process wrote it.

    Args:
        uri: `gs://BUCKET/NAME`.
        data: the bytes to append, which appear completely or not at all.
        before: the object as this process last saw it; its generation is 0 if it does not exist.

    Returns:
        The size, the checksum and the generation of the object after that.

    Raises:
        ChangedError: another process wrote it meanwhile.
        BucketError: the service refuses or stays out of reach. The same call may be repeated.
    """
    crc32c = f"{google_crc32c.extend(int(before.crc32c, 16), data):08x}"
    wanted = Stored(before.bytes + len(data), crc32c)
    if not before.generation:
        return wanted._replace(generation=publish(uri, data))
    part, whole = _build_blob(f"{uri}.part"), _build_blob(uri)
    terms = {"checksum": "crc32c", "retry": retry.for_google_client(uri)}
    _request("writing", uri, lambda: part.upload_from_string(data, **terms))
    _write_object(
        "writing",
        whole,
        wanted,
        lambda: whole.compose(
            [_build_blob(uri), part],
            if_generation_match=before.generation,
            if_source_generation_match=[None, part.generation],
            retry=retry.for_google_client(uri),
        ),
    )
    if _describe_stored(whole)[:2] != wanted[:2]:
        raise ChangedError(f"Failed writing {uri}: its content is not what was written.")
    discard(f"{uri}.part", part.generation)
    return _describe_stored(whole)


def rename(uri: str, target: str) -> None:
    """Renames a file; replaces an existing file of the new name."""
    blob, terms = _build_blob(uri), {"retry": retry.for_google_client(uri)}
    bucket, name = split(target)
    new = _create_client().bucket(bucket)
    _request("renaming", uri, lambda: blob.bucket.copy_blob(blob, new, name, **terms))
    remove(uri)


def remove(uri: str) -> None:
    """Removes a file, if it exists."""
    blob = _build_blob(uri)
    with contextlib.suppress(MissingError):
        _request("removing", uri, lambda: blob.delete(retry=retry.for_google_client(uri)))


def remove_tree(folder: str) -> None:
    """Removes all files below a folder, several at a time."""
    _call_in_parallel(lambda name: remove(f"{folder.rstrip('/')}/{name}"), list_files(folder))


def discard(uri: str, generation: int) -> None:
    """Removes an object if it still has this generation; ignores failures."""
    blob, terms = _build_blob(uri), {"if_generation_match": generation, "timeout": 10.0}
    with contextlib.suppress(UserError, OSError):
        _request("removing", uri, lambda: blob.delete(**terms, retry=None))


def find_location(bucket: str) -> str:
    """Returns the location of a bucket, such as US-WEST4 or EU.

    Raises:
        BucketError: there is no such bucket, or access to it is denied.
    """
    get = functools.partial(
        _create_client().get_bucket, retry=retry.for_google_client(f"gs://{bucket}")
    )
    return _request("looking at", f"gs://{bucket}", lambda: get(bucket).location)


class _ObjectReader(io.RawIOBase):
    """An unbuffered file that reads an object in a bucket; the size is that at opening."""

    def __init__(self, uri: str):
        self._uri = uri
        self._size = look_up(uri).bytes
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count = min(len(buffer), max(0, self._size - self._position))
        data = read_range(self._uri, self._position, count)
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = offset + (0, self._position, self._size)[whence]
        return self._position

    def tell(self) -> int:
        return self._position


@functools.cache
def _create_client() -> Any:
    from google.auth import exceptions
    from google.cloud import storage

    try:
        return storage.Client()
    except exceptions.DefaultCredentialsError:  # public data need no credentials
        return storage.Client.create_anonymous_client()
    except OSError:  # no project is set, but reading and writing objects need none
        return storage.Client(project="unused")


def _split_folder(folder: str) -> tuple[str, str]:
    """Splits the address of a folder into the bucket and the prefix of all names in the folder."""
    bucket, name = split(folder)
    return bucket, f"{name}/" if name else ""


def _build_blob(uri: str, chunk_size: int | None = None) -> Blob:
    bucket, name = split(uri)
    return _create_client().bucket(bucket).blob(name, chunk_size=chunk_size)


def _describe_stored(blob: Blob) -> Stored:
    crc = base64.b64decode(blob.crc32c).hex()
    return Stored(int(blob.size), crc, int(blob.generation))


def _encode_crc(crc32c: str) -> str:
    return base64.b64encode(bytes.fromhex(crc32c)).decode()


def _write_object(doing: str, blob: Blob, wanted: Stored, write: Callable[[], None]) -> None:
    """Writes an object, and accepts a failed precondition if the bucket holds the same content.

    It has the same content if the answer to an earlier request was lost, or if another process
    wrote it first.
    """
    from google.api_core import exceptions

    uri = f"gs://{blob.bucket.name}/{blob.name}"

    def write_once() -> None:
        try:
            write()
        except exceptions.PreconditionFailed as error:
            try:
                blob.reload(retry=retry.for_google_client(uri))
            except exceptions.NotFound:
                raise error from None  # another process has removed the object
            if _describe_stored(blob)[:2] != wanted[:2]:
                raise

    _request(doing, uri, write_once)


def _download(uri: str, fetch: Callable[[], _T]) -> _T:
    """Downloads a file; retries after two failures that Google's client does not retry.

    These are content that does not match its checksum, and a connection that breaks in the middle
    of an error response.
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


def _request(doing: str, uri: str, function: Callable[[], _T]) -> _T:
    """Makes the requests of one operation. Tests replace it to make the nth operation fail.

    Raises:
        UserError: the operation failed; the message gives advice. It quotes nothing of the request,
            because the URL of a resumable upload is itself a credential.
    """
    import requests
    from google.api_core import exceptions
    from google.auth import exceptions as auth_exceptions
    from google.cloud.storage.exceptions import DataCorruption

    kind: type[UserError] = BucketError
    try:
        return function()
    except exceptions.NotFound:
        reason, kind = "there is no such file or bucket.", MissingError
    except (exceptions.Forbidden, exceptions.Unauthorized) as error:
        reason = (
            f"access is denied ({error.code}). Ask the owner of the bucket for "
            f"roles/storage.objectAdmin on gs://{split(uri)[0]}, or run "
            "`gcloud auth application-default login`."
        )
    except exceptions.PreconditionFailed:
        reason, kind = "another process wrote it meanwhile.", ChangedError
        reason += " Use a separate folder for each run."
    except auth_exceptions.GoogleAuthError:
        reason = "no valid Google Cloud credentials: run `gcloud auth application-default login`."
    except DataCorruption:
        reason = f"the content did not match its checksum in {_TRIES} tries."
    except exceptions.GoogleAPIError as error:
        last = error.cause if isinstance(error, exceptions.RetryError) else error
        answered = isinstance(last, exceptions.GoogleAPICallError)
        reason = f"the service answers {last.code}" if answered else "no answer"
        reason += f"; retried for {retry.POLICY.seconds:g} s."
        reason += "" if answered else " Is the network up?"
        server = answered and (last.code is None or last.code >= 500 or last.code == 429)
        kind = UnavailableError if server or not answered else BucketError
    except (requests.RequestException, ConnectionError):
        kind = UnavailableError
        reason = f"no answer; retried for {retry.POLICY.seconds:g} s. Is the network up?"
    raise kind(f"Failed {doing} {uri}: {reason}") from None
