"""A service in place of Cloud TPU, which the real client talks to over loopback."""

from collections.abc import Iterator
from contextlib import contextmanager

import grpc
import pytest
from google.cloud import tpu_v2
from google.cloud.tpu_v2.services.tpu import transports
from google.longrunning import operations_pb2
from google.protobuf import any_pb2, empty_pb2

from tests.support.fakes.fake_google_cloud import Fault, grpc_service, storage
from tftpu.launch.cloud import waiting
from tftpu.launch.cloud.tpu_vm import client as tpu_vm_client

QUEUED = ("ACCEPTED", "WAITING_FOR_RESOURCES", "PROVISIONING")  # states before capacity is found


class CloudTpu:
    """A service that takes slices through given states, and fails where a test asks for it.

    A slice that is ACTIVE runs its startup script to the end, and reports to the bucket, unless it
    is to be preempted.
    """

    def __init__(self, objects: dict[str, bytes]):
        self.objects = objects
        self.requests = []
        self.slices = {}  # those that cost money: name to the states still to come
        self.deleted = []
        self.states = [[*QUEUED, "ACTIVE"]]  # of each slice in order; the last one repeats
        self.failure = ""
        self.exit_codes = [0]  # of each run in order; the last one repeats
        self.ends = {}  # by name of the slice
        self.others = {}  # exit codes of the workers but the first; None: it never starts
        self.faults = {"create": [], "get": [], "delete": []}  # raised in order, once each
        self.loses_answer = False  # to the creation, which succeeds nevertheless
        self.hangs = False  # a run that does not end

    def create(self, request):
        self._fail("create")
        self.requests.append(request)
        name = f"{request.parent}/queuedResources/{request.queued_resource_id}"
        states = self.states.pop(0) if len(self.states) > 1 else list(self.states[0])
        self.slices[name] = states
        codes = self.exit_codes
        self.ends[request.queued_resource_id] = codes.pop(0) if len(codes) > 1 else codes[0]
        if self.loses_answer:
            raise Fault(grpc.StatusCode.UNAVAILABLE, "Socket closed")
        return self._done(tpu_v2.QueuedResource.pb(tpu_v2.QueuedResource(name=name)))

    def get(self, request):
        self._fail("get")
        if request.name not in self.slices:
            raise Fault(grpc.StatusCode.NOT_FOUND, f"Resource '{request.name}' was not found")
        states = self.slices[request.name]
        state = states.pop(0) if len(states) > 1 else states[0]
        if states == ["ACTIVE"] and not self.hangs:
            self._run(request.name.rpartition("/")[2])
        found = {"state": state, "failed_data": {"error": {"message": self.failure}}}
        requested = {f"{r.parent}/queuedResources/{r.queued_resource_id}": r for r in self.requests}
        return tpu_v2.QueuedResource(
            name=request.name,
            tpu=requested[request.name].queued_resource.tpu,
            state=found if self.failure else {"state": state},
        )

    def delete(self, request):
        self._fail("delete")
        if request.name not in self.slices:
            raise Fault(grpc.StatusCode.NOT_FOUND, "not found")
        assert request.force  # a slice that is ACTIVE cannot be deleted without
        del self.slices[request.name]
        self.deleted.append(request.name)
        return self._done(empty_pb2.Empty())

    def _run(self, name: str) -> None:
        self.objects[f"b/run/launch/{name}/log.txt"] = f"trained on {name}\n".encode()
        self.objects[f"b/run/launch/{name}/exit_code"] = f"{self.ends[name]}\n".encode()
        for worker, code in self.others.items():
            if code is not None:
                folder = f"b/run/launch/{name}/worker-{worker}"
                self.objects[f"{folder}/log.txt"] = f"worker {worker} of {name}\n".encode()
                self.objects[f"{folder}/exit_code"] = f"{code}\n".encode()

    def _fail(self, method: str) -> None:
        if self.faults[method]:
            raise self.faults[method].pop(0)

    @staticmethod
    def _done(message) -> operations_pb2.Operation:
        answer = any_pb2.Any()
        answer.Pack(message)
        return operations_pb2.Operation(name="operations/1", done=True, response=answer)


@contextmanager
def serving(monkeypatch: pytest.MonkeyPatch) -> Iterator[CloudTpu]:
    """Serves Cloud TPU and a bucket, which the launcher's clients reach."""
    fake = CloudTpu({})
    operation = operations_pb2.Operation
    # Looked up at each request, so that a test may change one.
    methods = {
        "CreateQueuedResource": (
            lambda r: fake.create(r),
            tpu_v2.CreateQueuedResourceRequest,
            operation,
        ),
        "GetQueuedResource": (
            lambda r: fake.get(r),
            tpu_v2.GetQueuedResourceRequest,
            tpu_v2.QueuedResource,
        ),
        "DeleteQueuedResource": (
            lambda r: fake.delete(r),
            tpu_v2.DeleteQueuedResourceRequest,
            operation,
        ),
    }
    monkeypatch.setattr(waiting, "POLL_S", 0.01)
    monkeypatch.setattr(waiting, "PATIENCE_S", 0.3)
    with grpc_service("google.cloud.tpu.v2.Tpu", methods) as channel, storage(fake.objects) as host:
        client = tpu_v2.TpuClient(transport=transports.TpuGrpcTransport(channel=channel))
        monkeypatch.setattr(tpu_vm_client, "create_client", lambda: client)
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", host)
        monkeypatch.setenv("NO_GCE_CHECK", "true")
        yield fake
