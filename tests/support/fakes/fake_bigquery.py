"""BigQuery on loopback: tables of Arrow behind the real protocols, and streams that break."""

import http.server
import json
import threading
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager

import grpc
import pyarrow
from google.auth.credentials import AnonymousCredentials
from google.cloud import bigquery
from google.cloud.bigquery_storage_v1 import BigQueryReadClient, types
from google.cloud.bigquery_storage_v1.services.big_query_read import transports


class BigQuery:
    """Tables in memory, and a record of the requests.

    Args:
        tables: Arrow tables by "dataset.name", of the project "p".
        breaks: how often a stream breaks off, with the code, before it continues.
    """

    modified = 1_763_000_000_000  # milliseconds

    def __init__(self, tables: dict, breaks: int = 0, code=grpc.StatusCode.UNAVAILABLE):
        self.tables, self.breaks, self.code = tables, breaks, code
        self.sessions: list = []
        self.reads: list[tuple[str, int]] = []
        self.streams = 3
        self.loads: dict[str, dict] = {}
        self.refuses: list[dict] = []  # errors of the next load jobs
        self.shuffle = 0  # another: rows come in another order, in other streams

    def create(self, request):
        _, _, _, dataset, _, name = request.read_session.table.split("/")
        table = self.tables[f"{dataset}.{name}"].select(
            list(request.read_session.read_options.selected_fields)
        )
        rows = sorted(range(len(table)), key=lambda row: hash((row, self.shuffle)))
        session = types.ReadSession(request.read_session)
        session.name = f"{request.parent}/locations/us/sessions/{len(self.sessions)}"
        schema = table.schema.serialize().to_pybytes()
        session.arrow_schema = types.ArrowSchema(serialized_schema=schema)
        count = min(self.streams, request.max_stream_count) if len(table) else 0
        session.streams = [
            types.ReadStream(name=f"{session.name}/streams/{n}") for n in range(count)
        ]
        self.sessions.append((request, table.take(pyarrow.array(rows, pyarrow.int64()))))
        return session

    def rows(self, request, context):
        *_, session, _, stream = request.read_stream.split("/")
        self.reads.append((request.read_stream, request.offset))
        table = self.sessions[int(session)][1]
        table = table.take(list(range(int(stream), len(table), self.streams)))
        table = table.slice(request.offset).combine_chunks()
        for number, batch in enumerate(table.to_batches(max_chunksize=7)):
            if number == 2 and self.breaks:
                self.breaks -= 1
                context.abort(self.code, "the stream broke")
            data = batch.serialize().to_pybytes()
            yield types.ReadRowsResponse(
                arrow_record_batch=types.ArrowRecordBatch(serialized_record_batch=data),
                row_count=batch.num_rows,
            )

    def rest(self, method: str, path: str, body: dict) -> dict | None:
        """Returns the answer of the REST service; None if there is no such resource."""
        *_, last = path.split("/")
        if path.endswith(f"/datasets/{last}"):
            return {
                "datasetReference": {"projectId": "p", "datasetId": last},
                "location": "europe-west4",
            }
        if "/tables/" in path:
            *_, dataset, _, name = path.split("/")
            if f"{dataset}.{name}" not in self.tables:
                return None
            return {
                "tableReference": {"projectId": "p", "datasetId": dataset, "tableId": name},
                "lastModifiedTime": str(self.modified),
                "schema": {
                    "fields": [
                        {"name": column, "type": "STRING"}
                        for column in self.tables[f"{dataset}.{name}"].column_names
                    ]
                },
            }
        if path.endswith("/jobs") and method == "POST":
            if "load" in body["configuration"]:
                return self._load(body)
            self.query = body["configuration"]["query"]["query"]
            return self._job(body["jobReference"])
        if "/queries/" in path:
            return {
                "jobComplete": True,
                "jobReference": {"projectId": "p", "jobId": last},
                "schema": {"fields": []},
                "totalRows": "0",
            }
        return self.loads.get(last) or self._job({"projectId": "p", "jobId": last})

    def _load(self, body: dict) -> dict:
        """Runs a load job, once for each name; the table has to be empty."""
        name = body["jobReference"]["jobId"]
        if name in self.loads:
            return {"error": {"code": 409, "message": f"Already Exists: Job p:us.{name}"}}
        target = body["configuration"]["load"]["destinationTable"]
        key = f"{target['datasetId']}.{target['tableId']}"
        failed = self.refuses.pop() if self.refuses else None
        if failed is None and key in self.tables:
            failed = {"reason": "duplicate", "message": f"Already Exists: Table p:{key}"}
        status = {"state": "DONE", **({"errorResult": failed} if failed else {})}
        if not failed:
            self.tables[key] = pyarrow.table({"uris": body["configuration"]["load"]["sourceUris"]})
        self.loads[name] = {**body, "status": status}
        return self.loads[name]

    def _job(self, reference: dict) -> dict:
        table = {"projectId": "p", "datasetId": "results", "tableId": "query"}
        query = {"query": self.query, "destinationTable": table}
        return {
            "jobReference": reference,
            "status": {"state": "DONE"},
            "configuration": {"jobType": "QUERY", "query": query},
            "statistics": {"query": {"statementType": "SELECT"}},
        }


@contextmanager
def serving(fake: BigQuery) -> Iterator[tuple]:
    """Serves tables; yields the real clients for tables and for rows."""
    server = grpc.server(futures.ThreadPoolExecutor(8))
    methods = {
        "CreateReadSession": grpc.unary_unary_rpc_method_handler(
            lambda request, context: fake.create(request),
            types.CreateReadSessionRequest.deserialize,
            types.ReadSession.serialize,
        ),
        "ReadRows": grpc.unary_stream_rpc_method_handler(
            fake.rows, types.ReadRowsRequest.deserialize, types.ReadRowsResponse.serialize
        ),
    }
    name = "google.cloud.bigquery.storage.v1.BigQueryRead"
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, methods),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    channel = grpc.insecure_channel(f"127.0.0.1:{port}")
    transport = transports.BigQueryReadGrpcTransport(channel=channel)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self, method="GET"):
            size = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(size) or b"{}")
            answer = fake.rest(method, self.path.partition("?")[0], body)
            answer = answer or {"error": {"message": "Not found", "code": 404}}
            data = json.dumps(answer).encode()
            self.send_response(answer["error"]["code"] if "error" in answer else 200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_POST(self):
            self.do_GET("POST")

        def log_message(self, *_):
            pass

    rest = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=rest.serve_forever, args=(0.02,), daemon=True).start()
    address = {"api_endpoint": f"http://127.0.0.1:{rest.server_port}"}
    try:
        yield (
            bigquery.Client("p", AnonymousCredentials(), client_options=address),
            BigQueryReadClient(transport=transport),
        )
    finally:
        rest.shutdown()
        rest.server_close()
        channel.close()
        server.stop(0)
