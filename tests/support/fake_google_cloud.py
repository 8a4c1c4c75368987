"""In-process services on loopback that the real clients of Google Cloud talk to."""

import http.server
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from contextlib import contextmanager

import grpc

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
            data = objects.get(f"{bucket}/{name}")
            start = int(self.headers.get("Range", "bytes=0-")[6:].partition("-")[0])
            if data is None or start >= len(data):
                self._send(404 if data is None else 416, b"")
            else:
                self._send(206 if start else 200, data[start:])

        def _send(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
