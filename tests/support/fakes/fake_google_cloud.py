"""In-process services on loopback that the real clients of Google Cloud talk to."""

import base64
import http.server
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from contextlib import contextmanager
from urllib.parse import parse_qs, urlparse

import google_crc32c
import grpc

from tftpu.storage import buckets

# Planted in place of secrets, and searched for in everything printed, sent and written.
SECRET = "ya29.planted-secret"
SECRETS = (
    "GOOGLE_OAUTH_ACCESS_TOKEN",
    "GOOGLE_AUTH_TOKEN_FOR_TESTING",
    "WANDB_API_KEY",
    "HF_TOKEN",
)
ALL_GRANTED = ("storage.objects.create", "storage.objects.get", "storage.objects.list")


class Fault(Exception):  # noqa: N818 (an answer, not a mistake)
    """Raised by a handler to answer with an error of the service.

    Args:
        code: of gRPC.
        message: as the service words it.
    """

    def __init__(self, code: grpc.StatusCode, message: str):
        super().__init__(message)
        self.code = code


@contextmanager
def grpc_service(name: str, methods: dict[str, tuple[Callable, type, type]]) -> Iterator:
    """Serves methods of a service and yields a channel to it.

    Args:
        name: of the service, as "google.cloud.tpu.v2.Tpu".
        methods: by name: a function from request to answer, and the classes of the two.
    """

    def handler(function: Callable, request: type, answer: type):
        def serve(message, context):
            try:
                return function(message)
            except Fault as fault:
                context.abort(fault.code, str(fault))

        # Messages of google.longrunning are plain protobuf, all others are proto-plus.
        serialize = getattr(answer, "serialize", None) or answer.SerializeToString
        deserialize = getattr(request, "deserialize", None) or request.FromString
        return grpc.unary_unary_rpc_method_handler(
            serve, request_deserializer=deserialize, response_serializer=serialize
        )

    server = grpc.server(futures.ThreadPoolExecutor(2))
    handlers = {method: handler(*spec) for method, spec in methods.items()}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    channel = grpc.insecure_channel(f"127.0.0.1:{port}")
    try:
        yield channel
    finally:
        channel.close()
        server.stop(0)


@contextmanager
def storage(objects: dict[str, bytes], granted: Sequence[str] = ALL_GRANTED) -> Iterator[str]:
    """Serves buckets, and yields the STORAGE_EMULATOR_HOST to set.

    Args:
        objects: by "bucket/name".
        granted: the permissions that the caller has.
    """

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            path = self.path.partition("?")[0].replace("%2F", "/")
            if path.endswith("/iam/testPermissions"):
                self._send(200, json.dumps({"permissions": granted}).encode())
                return
            bucket, _, name = path.partition("/b/")[2].partition("/o/")
            if path.endswith("/o"):
                self._list(path.partition("/b/")[2].removesuffix("/o"))
                return
            data = objects.get(f"{bucket}/{name}")
            start = int(self.headers.get("Range", "bytes=0-")[6:].partition("-")[0])
            if data is None or start >= len(data):
                self._send(404 if data is None else 416, b"")
            else:
                self._send(206 if start else 200, data[start:])

        def do_POST(self):
            query = parse_qs(urlparse(self.path).query)
            body = self.rfile.read(int(self.headers["Content-Length"]))
            bucket = urlparse(self.path).path.partition("/b/")[2].removesuffix("/o")
            if query["uploadType"] == ["media"]:
                name, data = query["name"][0], body
            else:  # the metadata, then the data
                edge = self.headers["Content-Type"].partition("boundary=")[2].strip('"')
                about, data = (
                    part.partition(b"\r\n\r\n")[2].removesuffix(b"\r\n")
                    for part in body.split(f"--{edge}".encode())[1:3]
                )
                name = json.loads(about)["name"]
            objects[f"{bucket}/{name}"] = data
            self._send(200, json.dumps(_resource(name, data)).encode())

        def _list(self, bucket: str) -> None:
            prefix = parse_qs(urlparse(self.path).query).get("prefix", [""])[0]
            found = {key.removeprefix(f"{bucket}/"): data for key, data in objects.items()}
            items = [_resource(n, d) for n, d in found.items() if n.startswith(prefix)]
            self._send(200, json.dumps({"items": items}).encode())

        def _send(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    # The client of uploads is kept, with the address that it had.
    buckets._create_client.cache_clear()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        buckets._create_client.cache_clear()


def _resource(name: str, data: bytes) -> dict[str, str]:
    crc32c = base64.b64encode(google_crc32c.value(data).to_bytes(4, "big")).decode()
    return {"name": name, "size": str(len(data)), "crc32c": crc32c, "generation": "1"}


@contextmanager
def metadata_server() -> Iterator[str]:
    """Serves the token of a machine's service account; yields the GCE_METADATA_HOST to set."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            known = self.path == "/computeMetadata/v1/instance/service-accounts/default/token"
            allowed = known and self.headers["Metadata-Flavor"] == "Google"
            body = json.dumps({"access_token": "t", "expires_in": 3600}).encode()
            self.send_response(200 if allowed else 403)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
