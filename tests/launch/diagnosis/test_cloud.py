"""`tftpu doctor` on machines of a cloud: credentials, buckets, the metadata server, notebooks."""

import http.server
import json
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from google.cloud import storage

from tests.support.fakes.fake_google_cloud import SECRET
from tests.support.fakes.scratch_machine import Scratch


def credentials(scratch: Scratch, **fields: str) -> None:
    folder = Path(scratch.environ["HOME"]) / ".config" / "gcloud"
    folder.mkdir(parents=True)
    text = json.dumps({"refresh_token": SECRET, "client_secret": SECRET, **fields})
    (folder / "application_default_credentials.json").write_text(text)


def test_credentials_without_a_quota_project(laptop):
    credentials(laptop, type="authorized_user")
    facts, problems = laptop.examine()
    assert [problem.name for problem in problems] == ["no-quota-project"]
    assert "authorized_user" in facts["Credentials"]
    assert SECRET not in repr((facts, problems))


def test_complete_credentials(laptop):
    credentials(laptop, type="authorized_user", quota_project_id="p")
    assert laptop.examine()[1] == []


def test_a_variable_that_names_no_credentials_file(laptop):
    laptop.environ["GOOGLE_APPLICATION_CREDENTIALS"] = "/nowhere/key.json"
    assert laptop.problem("bucket").name == "credentials-file"


def test_a_bucket_without_credentials(laptop):
    assert laptop.problem("bucket").name == "no-credentials"


@pytest.mark.parametrize("kind", ["authorized_user", "of another program"])
def test_credentials_that_no_client_can_read(laptop, monkeypatch, kind):
    credentials(laptop, type=kind, quota_project_id="p")
    path = Path(laptop.environ["HOME"]) / ".config/gcloud/application_default_credentials.json"
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(path))  # the storage client reads it
    problem = laptop.problem("bucket")
    assert problem.name == "bucket-unreachable"
    assert "DefaultCredentialsError" in problem.what and SECRET not in repr(problem)


@pytest.fixture
def serve():
    """Starts an HTTP server on loopback that answers with `answers[path] = (status, text)`."""
    servers = []

    def start(answers: dict[str, tuple[int, str]]) -> str:
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                status, text = answers.get(self.path.partition("?")[0], (404, "not found"))
                self.send_response(status)
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *_):
                pass

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return f"127.0.0.1:{server.server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


ALL_PERMISSIONS = ["storage.objects.create", "storage.objects.get", "storage.objects.list"]


@pytest.mark.parametrize(
    ("status", "granted", "name"),
    [
        (200, ALL_PERMISSIONS, None),
        (200, ALL_PERMISSIONS[1:], "bucket-permissions"),
        (404, [], "no-bucket"),
        (401, [], "bucket-unreachable"),
    ],
)
def test_access_to_the_bucket(laptop, serve, monkeypatch, status, granted, name):
    path = "/storage/v1/b/mine/iam/testPermissions"
    host = serve({path: (status, json.dumps({"permissions": granted}))})
    laptop.environ["STORAGE_EMULATOR_HOST"] = f"http://{host}"
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://{host}")  # the storage client reads it
    _, problems = laptop.examine("mine")
    assert [problem.name for problem in problems] == ([name] if name else [])


def test_a_machine_without_a_tpu_has_the_account_of_its_metadata_server(laptop, serve, monkeypatch):
    account = "/computeMetadata/v1/instance/service-accounts/default/email"
    del laptop.environ["NO_GCE_CHECK"]
    laptop.environ["GCE_METADATA_HOST"] = serve({account: (200, "me@p.iam.gserviceaccount.com")})
    granted = SimpleNamespace(test_iam_permissions=lambda names, timeout: names)
    client = SimpleNamespace(bucket=lambda name: granted)
    monkeypatch.setattr(storage, "Client", lambda project: client)
    facts, problems = laptop.examine("mine")
    assert problems == []
    assert facts["Credentials"] == "the machine's own service account"


def test_the_metadata_server_names_the_slice(tpu_vm, serve):
    attributes = "/computeMetadata/v1/instance/attributes/"
    del tpu_vm.environ["NO_GCE_CHECK"]
    tpu_vm.environ["GCE_METADATA_HOST"] = serve(
        {
            f"{attributes}accelerator-type": (200, "v5litepod-16"),
            f"{attributes}worker-network-endpoints": (200, "a:b:10.0.0.1,a:b:10.0.0.2"),
            "/computeMetadata/v1/instance/service-accounts/default/email": (200, "me@p"),
        }
    )
    facts, problems = tpu_vm.examine()
    assert problems == []
    assert (facts["Place"], facts["Slice"]) == ("TPU VM", "v5litepod-16, 2 workers")
    assert facts["Credentials"] == "the machine's own service account"


@pytest.mark.parametrize(
    ("variable", "place"),
    [("COLAB_RELEASE_TAG", "Colab"), ("KAGGLE_KERNEL_RUN_TYPE", "Kaggle")],
)
def test_notebook_services(laptop, variable, place):
    laptop.environ[variable] = "x"
    assert laptop.examine()[0]["Place"] == place


def test_gke(laptop):
    laptop.environ |= {
        "KUBERNETES_SERVICE_HOST": "10.0.0.1",
        "TPU_WORKER_HOSTNAMES": "a,b,c,d",
        "TPU_ACCELERATOR_TYPE": "v5p-32",
    }
    facts, _ = laptop.examine()
    assert (facts["Place"], facts["Slice"]) == ("GKE", "v5p-32, 4 workers")
