"""Cloud Storage on loopback: an emulator of the real API, its missing parts, and injected faults.

`serving()` serves Google's own client (STORAGE_EMULATOR_HOST); `gs_proxy.py` puts the same buckets
behind TLS for TensorFlow's `gs://`.
"""

import contextlib
import dataclasses
import functools
import http.server
import io
import json
import logging
import re
import threading
from collections.abc import Iterator
from urllib.parse import parse_qs, unquote, urlparse

import pytest
from gcp_storage_emulator import server
from gcp_storage_emulator.handlers import buckets, objects
from gcp_storage_emulator.storage import Storage

from tftpu.storage import buckets as transfers

BUCKET = "bucket"
logging.getLogger("gcp_storage_emulator").setLevel(logging.CRITICAL)


@dataclasses.dataclass
class Fault:
    """A fault injected into the next matching requests.

    Args:
        method, path: a name and a regular expression.
        what: a status to answer with; "drop": executes the request and breaks the connection
            before the answer; "truncate": breaks it in the middle of the answer; "corrupt": changes
            a byte of the answer.
        times: how often; None: always.
        after: number of matching requests that are answered first.
    """

    method: str
    path: str
    what: int | str
    times: int | None = 1
    after: int = 0


class FakeStorage:
    """Buckets in memory, and a record of the requests."""

    def __init__(self):
        self.storage = Storage(use_memory_fs=True)
        buckets.create_bucket(BUCKET, self.storage)
        self.lock = threading.Lock()
        self.faults: list[Fault] = []
        self.requests: list[tuple[str, str]] = []
        self.uploaded = 0  # bytes of the bodies of requests that were not refused
        self.refused = 0  # bytes of those that were, by a fault
        self.url = ""

    def requested(self, method: str, pattern: str) -> int:
        """Returns the number of matching requests."""
        return sum(m == method and bool(re.search(pattern, p)) for m, p in list(self.requests))

    def names(self) -> set[str]:
        with self.lock:
            return {f["name"] for f in self.storage.get_file_list(BUCKET, None, None, None)[0]}

    def content(self, name: str) -> bytes:
        with self.lock:
            return bytes(self.storage.get_file(BUCKET, name))

    def empty(self) -> None:
        """Removes all objects, faults and records of requests."""
        self.storage.wipe(keep_buckets=True)
        self.faults.clear()
        self.requests.clear()

    def overwrite(self, name: str, data: bytes) -> None:
        """Replaces an object, as another process would."""
        with self.lock:
            resource = objects._make_object_resource(
                self.url, BUCKET, name, "application/octet-stream", str(len(data))
            )
            resource = objects._checksums(data, resource)
            self.storage.create_file(BUCKET, name, data, resource)

    def take_fault(self, method: str, path: str) -> int | str | None:
        with self.lock:
            for fault in self.faults:
                if fault.times == 0 or fault.method != method or not re.search(fault.path, path):
                    continue
                if fault.after > 0:
                    fault.after -= 1
                    continue
                if fault.times is not None:
                    fault.times -= 1
                return fault.what
        return None

    def generation(self, bucket: str, name: str) -> int:
        try:
            return int(self.storage.get_file_obj(bucket, name)["generation"])
        except server.objects.NotFound:
            return 0


class Handler(server.RequestHandler):
    """One connection of a client."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    service: FakeStorage
    scheme = "http"

    def __init__(self, *arguments):
        super().__init__(self.service.storage, *arguments)

    def _serve(self, method: str) -> None:
        body = self._body()
        self.service.requests.append((method, self.path))
        fault = self.service.take_fault(method, self.path)
        if isinstance(fault, int):
            self.service.refused += len(body)
            self._answer(_error(fault, "injected"))
            return
        self.service.uploaded += len(body)
        with self.service.lock:
            if not self._as_expected(body):
                answer = _error(412, "conditionNotMet")
            else:
                answer = self._emulated(method, body)
        self._answer(answer, fault)

    def _body(self) -> bytes:
        if (self.headers.get("Transfer-Encoding") or "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        # TensorFlow sends chunks *and* a Content-Length.
        body = b""
        while size := int(self.rfile.readline().split(b";")[0], 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        del self.headers["Transfer-Encoding"]
        del self.headers["Content-Length"]
        self.headers["Content-Length"] = str(len(body))
        return body

    def _as_expected(self, body: bytes) -> bool:
        """Checks `ifGenerationMatch`, of the sources of a compose too: the emulator ignores it."""
        url = urlparse(self.path)
        if url.path.endswith("/compose"):
            bucket = re.search(r"/b/([^/]+)/o/", url.path)[1]
            for source in json.loads(body)["sourceObjects"]:
                wanted = source.get("objectPreconditions", {}).get("ifGenerationMatch")
                if wanted and self.service.generation(bucket, source["name"]) != int(wanted):
                    return False
        query = parse_qs(url.query)
        if "ifGenerationMatch" not in query or "upload_id" in query:
            return True  # an upload in parts was checked when it began
        bucket, name = re.search(r"/b/([^/]+)/o/?(.*?)(?:/compose)?$", url.path).groups()
        name = unquote(name) or query.get("name", [""])[0]
        if not name:
            name = json.loads(re.search(rb'"name":\s*("(?:[^"\\]|\\.)*")', body)[1])
        return self.service.generation(bucket, name) == int(query["ifGenerationMatch"][0])

    def _emulated(self, method: str, body: bytes) -> bytes:
        rfile, wfile = self.rfile, self.wfile
        self.rfile, self.wfile = io.BytesIO(body), io.BytesIO()
        try:
            server.Router(self).handle(method)
            answer = self.wfile.getvalue()
        finally:
            self.rfile, self.wfile = rfile, wfile
        if self.scheme == "https":
            head, _, rest = answer.partition(b"\r\n\r\n")
            answer = head.replace(b"Location: http://", b"Location: https://") + b"\r\n\r\n" + rest
        return answer

    def _answer(self, answer: bytes, fault: str | None = None) -> None:
        head = answer.index(b"\r\n\r\n") + 4
        if fault == "drop":
            answer = b""
        elif fault == "truncate":
            answer = answer[: head + (len(answer) - head) // 2]
        elif fault == "corrupt":
            middle = head + (len(answer) - head) // 2
            answer = answer[:middle] + bytes([answer[middle] ^ 1]) + answer[middle + 1 :]
        with contextlib.suppress(OSError):
            self.wfile.write(answer)
            self.wfile.flush()
        if fault in ("drop", "truncate"):
            self.close_connection = True
            with contextlib.suppress(OSError):
                self.connection.shutdown(2)


for _method in ("GET", "POST", "PUT", "DELETE", "PATCH"):
    setattr(Handler, f"do_{_method}", functools.partialmethod(Handler._serve, _method))


def _error(status: int, message: str) -> bytes:
    body = json.dumps({"error": {"code": status, "message": message}}).encode()
    return (
        f"HTTP/1.1 {status} {message}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    ).encode() + body


@contextlib.contextmanager
def serving() -> Iterator[FakeStorage]:
    """Serves one bucket, `BUCKET`; the `url` of the yielded server is the STORAGE_EMULATOR_HOST."""
    service = FakeStorage()
    handler = type("OfService", (Handler,), {"service": service})
    with running(handler) as port:
        service.url = f"http://127.0.0.1:{port}"
        yield service


@contextlib.contextmanager
def in_this_process(environment: dict[str, str]) -> Iterator[None]:
    """Sets environment variables, and makes Google's client anew, at both ends of the block."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        transfers._create_client.cache_clear()
        yield
    transfers._create_client.cache_clear()


@contextlib.contextmanager
def running(handler: type) -> Iterator[int]:
    """Runs a server on loopback; yields its port."""
    httpd = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    httpd.daemon_threads = True
    threading.Thread(target=httpd.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield httpd.server_port
    finally:
        httpd.shutdown()
        httpd.server_close()


# Other differences between the emulator and the service.


def _incomplete(response, storage, upload_id, fallback_end=0):
    """Answers without a Range while a resumable upload has no stored byte."""
    response.status = objects.GoogleHTTPStatus.RESUME_INCOMPLETE
    received = storage.get_resumable_byte_count(upload_id)
    if received:
        response["Range"] = f"bytes=0-{received - 1}"


def _add(
    self,
    file_id,
    content,
    total_size=None,
    expected_start=None,
    emulators=Storage.add_to_resumable_upload,
):
    """Accepts data once that was sent twice because an answer was lost."""
    received = self.get_resumable_byte_count(file_id)
    if expected_start is not None and expected_start < received:
        content, expected_start = content[received - expected_start :], received
    return emulators(self, file_id, content, total_size, expected_start)


def _read_data(handler, query, emulators=server._read_data):
    """Reads data, which may be empty."""
    data = emulators(handler, query)
    return b"" if data is None and query.get("uploadType") == ["media"] else data


objects._resumable_incomplete = _incomplete
Storage.add_to_resumable_upload = _add
server._read_data = _read_data
