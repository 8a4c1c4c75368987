"""`tftpu launch vertex-endpoint` with the SDK's real clients against services on loopback."""

import contextlib
from pathlib import Path

import grpc
import pytest
import yaml
from google.api_core.operation import Operation
from google.cloud import aiplatform_v1 as v1
from google.cloud.aiplatform_v1.services.endpoint_service import transports as endpoint_transports
from google.cloud.aiplatform_v1.services.model_service import transports as model_transports
from google.longrunning import operations_pb2
from google.protobuf import any_pb2, json_format
from google.rpc import status_pb2

from tests.support.fakes.fake_google_cloud import Fault, grpc_service
from tftpu.checkpoint import manifest
from tftpu.config import DataConfig, Experiment, ModelConfig, to_json
from tftpu.errors import UserError
from tftpu.input_pipelines import sources
from tftpu.launch import main
from tftpu.launch.cloud.vertex import endpoint_client
from tftpu.launch.cloud.vertex.endpoint import VertexEndpoint
from tftpu.launch.commands.launch import vertex_endpoint
from tftpu.models import sizes

PARENT = "projects/p/locations/europe-west4"
MODEL, ENDPOINT = f"{PARENT}/models/7", f"{PARENT}/endpoints/9"
FLAGS = "--model=gs://b/m/digits.onnx", "--project=p", "--region=europe-west4"


class Vertex:
    """Services whose operations have ended when they answer."""

    def __init__(self):
        self.asked = []
        self.refuses = {}  # by the name of a method: a fault, or a status of the operation

    def method(self, name, result):
        def answer(request):
            self.asked.append(request)
            refusal = self.refuses.get(name)
            if isinstance(refusal, Fault):
                raise refusal
            if refusal == "hangs":
                return operations_pb2.Operation(name="o")
            if refusal is not None:
                return operations_pb2.Operation(name="o", done=True, error=refusal)
            packed = any_pb2.Any()
            packed.Pack(type(result).pb(result))
            return operations_pb2.Operation(name="o", done=True, response=packed)

        return answer


@pytest.fixture
def service(monkeypatch):
    fake, operation = Vertex(), operations_pb2.Operation
    uploaded = fake.method("upload", v1.UploadModelResponse(model=MODEL))
    created = fake.method("create", v1.Endpoint(name=ENDPOINT))
    deployed = fake.method("deploy", v1.DeployModelResponse())
    models = {"UploadModel": (uploaded, v1.UploadModelRequest, operation)}
    endpoints = {
        "CreateEndpoint": (created, v1.CreateEndpointRequest, operation),
        "DeployModel": (deployed, v1.DeployModelRequest, operation),
    }
    package = "google.cloud.aiplatform.v1"
    with contextlib.ExitStack() as stack:
        channel = stack.enter_context(grpc_service(f"{package}.ModelService", models))
        other = stack.enter_context(grpc_service(f"{package}.EndpointService", endpoints))
        clients = endpoint_client.EndpointClients(
            v1.ModelServiceClient(
                transport=model_transports.ModelServiceGrpcTransport(channel=channel)
            ),
            v1.EndpointServiceClient(
                transport=endpoint_transports.EndpointServiceGrpcTransport(channel=other)
            ),
        )
        monkeypatch.setattr(endpoint_client, "create_clients", lambda region: clients)
        monkeypatch.setattr(vertex_endpoint, "_check_source", lambda order, source: None)
        yield fake


def launch(*flags: str) -> int:
    return main.main(["launch", "vertex-endpoint", *FLAGS, *flags])


def sent(request) -> dict:
    return json_format.MessageToDict(type(request).pb(request))


def test_a_dry_run_says_which_flag_is_missing(capsys):
    assert main.main(["launch", "vertex-endpoint", FLAGS[0], "--dry_run"]) == 0
    assert "needed without it: --project. Placeholders" in capsys.readouterr().err
    assert main.main(["launch", "tpu-vm", "digits_resnet", "--project=p", "--dry_run"]) == 0
    assert "needed without it: --zone, --workdir. Placeholders" in capsys.readouterr().err


def test_the_dry_run_prints_the_requests_that_are_sent(service, capsys):
    flags = "--accelerator=NVIDIA_TESLA_T4", "--image=i", "--most_replicas=3"
    flags = *flags, "--service_account=s@p.com"
    assert launch(*flags, "--dry_run") == 0
    out, err = capsys.readouterr()
    printed = yaml.safe_load(out)
    assert "not checked in a dry run: whether gs://b/m can be served" in err
    assert not service.asked
    assert launch(*flags) == 0
    upload, create, deploy = service.asked
    for request, name in (upload, "uploadModel"), (create, "createEndpoint"):
        kind = type(request)
        assert kind.pb(request) == json_format.ParseDict(printed[name], kind.pb(kind()))
    container = upload.model.container_spec
    assert (container.health_route, container.predict_route) == ("/health", "/predict")
    assert list(container.command) == ["tftpu", "serve"]
    assert upload.model.artifact_uri == "gs://b/m" and upload.model.display_name == "digits"
    assert deploy.endpoint == ENDPOINT and dict(deploy.traffic_split) == {"0": 100}
    assert deploy.deployed_model.model == MODEL
    resources = deploy.deployed_model.dedicated_resources
    assert (resources.min_replica_count, resources.max_replica_count) == (1, 3)
    assert resources.machine_spec.accelerator_type == v1.AcceleratorType.NVIDIA_TESLA_T4
    said = capsys.readouterr().out
    where = "--region=europe-west4 --project=p"
    assert f"gcloud ai endpoints undeploy-model 9 --deployed-model-id=ID {where}" in said
    assert f"gcloud ai endpoints delete 9 {where}" in said
    assert f"gcloud ai models delete 7 {where}" in said


def test_an_endpoint_that_exists_takes_the_model(service, capsys):
    assert launch(f"--endpoint={ENDPOINT}") == 0
    assert "endpoints delete" not in capsys.readouterr().out  # it is somebody's
    _, deploy = service.asked
    assert deploy.endpoint == ENDPOINT


def test_a_run_is_served_from_its_bucket(service):
    flags = "gs://b/run", "--project=p", "--region=europe-west4"
    assert main.main(["launch", "vertex-endpoint", *flags]) == 0
    model = service.asked[0].model
    assert list(model.container_spec.command) == ["tftpu", "serve", "--workdir=gs://b/run"]
    assert not model.artifact_uri


@pytest.mark.parametrize(
    ("method", "refusal", "says"),
    [
        (
            "upload",
            Fault(grpc.StatusCode.PERMISSION_DENIED, "aiplatform.models.upload denied"),
            "gcloud ai models list",
        ),
        (
            "create",
            Fault(grpc.StatusCode.RESOURCE_EXHAUSTED, "Quota of endpoints."),
            "gcloud ai models delete 7 --region=europe-west4",
        ),
        (
            "deploy",
            status_pb2.Status(code=9, message="The image cannot be pulled."),
            "gcloud ai endpoints delete 9 --region=europe-west4",
        ),
    ],
)
def test_a_failure_names_what_exists_and_what_removes_it(service, capsys, method, refusal, says):
    service.refuses[method] = refusal
    assert launch() == 2
    said = capsys.readouterr().err
    assert says in said and said.count("\n") == 1
    assert (getattr(refusal, "message", None) or str(refusal)).rstrip(".") in said


def test_a_deployment_that_takes_too_long_names_what_may_cost(service, capsys, monkeypatch):
    monkeypatch.setattr(endpoint_client, "DEPLOY_TIMEOUT_S", 0.1)
    service.refuses["deploy"] = "hangs"
    # The service on loopback has no method that looks at an operation again.
    monkeypatch.setattr(Operation, "done", lambda self, retry=None: self.operation.done)
    assert launch() == 2
    said = capsys.readouterr().err
    assert "gcloud ai endpoints delete 9 --region=europe-west4" in said and said.count("\n") == 1
    assert "Deploying the model had not ended after" in said and "may still succeed" in said


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--workdir=gs://b/run"], "Give a run, `tftpu launch vertex-endpoint gs://"),
        (["--machine=4 CPUs"], "is not a machine type of Google Cloud"),
        (["--region=us-central1-a"], "is not a region of Google Cloud"),
        (["--endpoint=9"], "is not the name of an endpoint"),
        (["--accelerator=T4", "--image=i"], "NVIDIA_TESLA_T4"),
        (["--accelerator=NVIDIA_L4"], "build the target serve-gpu"),
        (["--service_account=me"], "is not an e-mail address"),
        (["--replicas=3", "--most_replicas=2"], "less than --replicas=3"),
    ],
)
def test_a_mistake_is_explained_before_anything_is_sent(service, capsys, flags, says):
    assert launch(*flags) == 2
    assert says in capsys.readouterr().err
    assert not service.asked


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("--model=digits.onnx", "--model=digits.onnx is not a folder in a bucket"),
        ("--workdir=runs/a", "--workdir=runs/a is not a folder in a bucket"),
        ("runs/a", "--workdir=runs/a is not a folder in a bucket"),
        ("gs://b/m/digits.onnx", "Did you mean '--model=gs://b/m/digits.onnx'?"),
        ("--model=gs://b", "is not a folder in a bucket"),
        ("--model=runs/digits.onnx", "and give --model=gs://BUCKET/digits/digits.onnx."),
        ("--model=gs://b/digits.onnx", "and give --model=gs://b/digits/digits.onnx."),
        ("--model=gs://b/m/a.tflite", "only ONNX files"),
    ],
)
def test_a_place_that_vertex_ai_cannot_read_is_refused(capsys, source, says):
    assert main.main(["launch", "vertex-endpoint", source, "--dry_run"]) == 2
    assert says in capsys.readouterr().err


def order(**source: str | None) -> VertexEndpoint:
    numbers = {"replicas": 1, "most_replicas": 1, "machine": "m", "accelerator": None}
    others = {"service_account": None, "endpoint": None, "image": "i", "name": "n"}
    given = {"model": None, "workdir": None, **numbers, **others, **source}
    return VertexEndpoint(project="p", region="r", **given)


def refusal(**source: str | None) -> str:
    with pytest.raises(UserError) as error:
        vertex_endpoint._check_source(order(**source), source.get("model") or "")
    return str(error.value)


def test_exactly_the_file_that_is_named_is_there(tmp_path, capsys):
    folder, other = str(tmp_path), str(tmp_path / "typo.onnx")
    assert "holds 0 models" in refusal(model=folder)
    (tmp_path / "m.onnx").touch()
    for source in folder, f"{folder}/m.onnx":
        vertex_endpoint._check_source(order(model=folder), source)
    with pytest.raises(UserError, match=r"There is no .*typo.onnx\. The model .* is .*m.onnx"):
        vertex_endpoint._check_source(order(model=folder), other)
    assert not capsys.readouterr().err
    vertex_endpoint._check_source(order(model=folder, accelerator="NVIDIA_L4"), folder)
    assert "on the CPU" in capsys.readouterr().err
    (tmp_path / "saved_model.pb").touch()
    assert "holds 2 models" in refusal(model=folder)


def run_of(folder: Path, model: ModelConfig, data: DataConfig) -> str:
    """Writes what is looked at of a run with a checkpoint."""
    step = folder / "checkpoints" / "1"
    step.mkdir(parents=True)
    (step / manifest.FILE).touch()
    (folder / "config.json").write_text(to_json(Experiment(model, data)))
    return str(folder)


def test_a_run_without_a_checkpoint_is_found_before_it_costs(tmp_path):
    assert "no config.json" in refusal(workdir=str(tmp_path))
    workdir = run_of(tmp_path, sizes.ResNet("r"), sources.Images("digits", 8))
    vertex_endpoint._check_source(order(workdir=workdir), "")
    (tmp_path / "checkpoints" / "1" / manifest.FILE).unlink()
    assert "no complete checkpoint" in refusal(workdir=workdir)


def test_code_that_does_not_travel_is_found_before_it_costs(tmp_path):
    workdir = run_of(tmp_path, sizes.ResNet("r"), sources.Images("digits", 8))
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace("tftpu.models.sizes.ResNet", "mine.Net"))
    said = refusal(workdir=workdir)
    assert "which does not have your code" in said and f"tftpu export {workdir}" in said


@pytest.mark.parametrize("where", ["tokenizer", "data_dir", None])
def test_a_tokenizer_that_does_not_travel_is_found_before_it_costs(tmp_path, where):
    fields = {"train_text": "a.txt", "eval_text": "a.txt"}
    fields = {"data_dir": "shards"} if where == "data_dir" else fields
    fields |= {"tokenizer": "t.json"} if where == "tokenizer" else {}
    workdir = run_of(tmp_path, sizes.GPT("g"), sources.Tokens("texts", 8, **fields))
    if where is None:  # bytes
        vertex_endpoint._check_source(order(workdir=workdir), "")
    else:
        assert "the container does not have" in refusal(workdir=workdir)
