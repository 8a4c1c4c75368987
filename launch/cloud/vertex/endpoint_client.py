"""Uploads a model to Vertex AI and deploys it, with the SDK's own clients.

After any failure, a message gives the commands that remove what was created.
"""

from typing import TYPE_CHECKING, Any, NamedTuple

from tftpu.errors import UserError
from tftpu.launch.cloud import google_cloud
from tftpu.launch.cloud.google_cloud import ConnectionLost, to_message
from tftpu.launch.cloud.vertex.endpoint import VertexEndpoint

if TYPE_CHECKING:
    from google.cloud.aiplatform_v1 import EndpointServiceClient, ModelServiceClient

DEPLOY_TIMEOUT_S = 3600.0
_TIMEOUT_S = 900.0


class EndpointClients(NamedTuple):
    """The SDK's clients for a region."""

    models: "ModelServiceClient"
    endpoints: "EndpointServiceClient"


class ServingResources(NamedTuple):
    """The resource names of a model and its endpoint.

    Attributes:
        model: the model that was uploaded.
        endpoint: the endpoint that serves it.
    """

    model: str
    endpoint: str


def create_clients(region: str) -> EndpointClients:
    """Returns the SDK's clients for a region."""
    from google.cloud import aiplatform_v1 as v1

    return EndpointClients(
        google_cloud.connect(v1.ModelServiceClient, region),
        google_cloud.connect(v1.EndpointServiceClient, region),
    )


def launch(given: EndpointClients, order: VertexEndpoint) -> ServingResources:
    """Uploads a model and deploys it.

    Args:
        given: the SDK's clients.
        order: the model and its deployment.

    Raises:
        UserError: a request was rejected, or no answer came; the message says what was created and
            may incur costs.
    """
    from google.cloud import aiplatform_v1 as v1

    made: list[str] = []
    try:
        model = _run_operation(
            "uploading the model",
            given.models.upload_model,
            _TIMEOUT_S,
            parent=order.parent,
            model=to_message(v1.Model, order.build_model_spec()),
        ).model
        made.append(_format_command(f"models delete {_extract_id(model)}", order))
        print(f"Uploaded {model}", flush=True)
        endpoint = order.endpoint
        if not endpoint:
            endpoint = _run_operation(
                "creating the endpoint",
                given.endpoints.create_endpoint,
                _TIMEOUT_S,
                parent=order.parent,
                endpoint=to_message(v1.Endpoint, order.build_endpoint_spec()),
            ).name
            made.append(_format_command(f"endpoints delete {_extract_id(endpoint)}", order))
            print(f"Created  {endpoint}", flush=True)
        print("Deploying takes some minutes.", flush=True)
        _run_operation(
            "deploying the model",
            given.endpoints.deploy_model,
            DEPLOY_TIMEOUT_S,
            endpoint=endpoint,
            deployed_model=to_message(v1.DeployedModel, order.build_deployment_spec(model)),
            traffic_split={"0": 100},
        )
    except (UserError, ConnectionLost) as error:
        raise UserError(f"{error} {_explain_cleanup(made, order)}".strip()) from error
    except KeyboardInterrupt as interrupt:
        raise UserError(
            f"Interrupted: the last request may still succeed, and incur costs. "
            f"{_explain_cleanup(made, order)}".strip()
        ) from interrupt
    return ServingResources(model, endpoint)


def _run_operation(what: str, method: Any, timeout_s: float, **fields: Any) -> Any:
    """Calls a method and waits for the end of the operation that it starts."""
    operation = google_cloud.call(what, method, **fields)
    try:
        return google_cloud.call(what, operation.result, timeout=timeout_s)
    except TimeoutError as error:
        raise ConnectionLost(
            f"{what.capitalize()} had not ended after {timeout_s / 60:.0f} minutes, and may still "
            "succeed."
        ) from error


def _extract_id(name: str) -> str:
    return name.rpartition("/")[2]


def _format_command(arguments: str, order: VertexEndpoint) -> str:
    return f"gcloud ai {arguments} --region={order.region} --project={order.project}"


def _explain_cleanup(made: list[str], order: VertexEndpoint) -> str:
    """Returns the commands that show and remove what was created, the last one first."""
    if not made:
        return f"`{_format_command('models list', order)}` shows whether the model was uploaded."
    commands = " and ".join(f"`{command}`" for command in reversed(made))
    shown = _format_command("endpoints list", order)
    return (
        f"An endpoint incurs costs while a model is deployed to it, which `{shown}` shows. To "
        f"remove what was created, run {commands}."
    )


def explain_how_to_end(serving: ServingResources, order: VertexEndpoint) -> str:
    """Returns lines with the commands that undeploy and delete the model and the endpoint."""
    number = _extract_id(serving.endpoint)
    undeployed = f"endpoints undeploy-model {number} --deployed-model-id=ID"
    lines = [
        "It incurs costs while a model is deployed. To end it (the first command shows the ID):",
        f"  {_format_command(f'endpoints describe {number}', order)}",
        f"  {_format_command(undeployed, order)}",
    ]
    if not order.endpoint:
        lines.append(f"  {_format_command(f'endpoints delete {number}', order)}")
    lines.append(f"  {_format_command(f'models delete {_extract_id(serving.model)}', order)}")
    return "\n".join(lines)
