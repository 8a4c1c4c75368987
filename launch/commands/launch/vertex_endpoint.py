"""Serves an export or a run on Vertex AI: uploads the model, and deploys it to an endpoint.

The container runs `tftpu serve`. Its image is the target `serve` of launch/Dockerfile, or
`serve-gpu` with --accelerator. Vertex AI copies an export. A run is read in its bucket, which
--service_account must be allowed to read.

    tftpu launch vertex-endpoint --model=gs://BUCKET/digits_saved
    tftpu launch vertex-endpoint gs://BUCKET/run
"""

import dataclasses
import re
import sys

from tftpu.checkpoint import manifest
from tftpu.config import DataConfig, from_json
from tftpu.errors import UserError
from tftpu.input_pipelines import sources
from tftpu.launch.cloud import job
from tftpu.launch.cloud.options import ProjectOptions, print_dry_run
from tftpu.launch.cloud.vertex import endpoint as vertex_endpoint
from tftpu.launch.cloud.vertex.options import CLIENT, format_image
from tftpu.launch.run import finished, texts
from tftpu.launch.settings.options import flag
from tftpu.models import sizes
from tftpu.storage import files


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(ProjectOptions):
    """The model, and the machines that serve it."""

    model: str | None = flag(
        None, "gs://BUCKET/FOLDER of a SavedModel, or path of an ONNX file", metavar="PATH"
    )
    workdir: str | None = flag(
        None, "gs://BUCKET/FOLDER of a run; or give --model", metavar="RUN", word=True
    )
    name: str | None = flag(None, "name of the model", metavar="NAME", shown="the folder's")
    machine: str = flag("n1-standard-4", "type of the machines", metavar="TYPE")
    accelerator: str | None = flag(
        None,
        "type of GPU, such as NVIDIA_TESLA_T4; needs --image, built from the target serve-gpu",
        metavar="TYPE",
    )
    replicas: int = flag(1, "smallest number of machines", minimum=1)
    most_replicas: int | None = flag(
        None, "largest number of machines", metavar="N", minimum=1, shown="--replicas"
    )
    endpoint: str | None = flag(
        None,
        "resource name of an endpoint, which then sends all its traffic to this model",
        metavar="NAME",
        shown="a new one",
    )
    image: str | None = flag(
        None,
        "container image, the target serve of launch/Dockerfile",
        metavar="IMAGE",
        shown="tftpu-serve in the project's registry",
    )
    region: str = flag("us-central1", "region of the endpoint", metavar="REGION")
    service_account: str | None = flag(
        None, "e-mail address that the server runs as", metavar="EMAIL", shown="Vertex AI's own"
    )
    dry_run: bool = flag(False, "print the requests, and send nothing")


def run(options: Options) -> None:
    """Prints the requests, or sends them and waits for the deployment.

    Raises:
        UserError: Vertex AI would reject a value or cannot serve the model, or deploying it failed.
    """
    if (options.model is None) == (options.workdir is None):
        raise UserError(
            "Give a run, `tftpu launch vertex-endpoint gs://BUCKET/RUN`, or an export, "
            "--model=gs://BUCKET/FOLDER."
        )
    _check_place(options)
    if options.accelerator and options.image is None:
        raise UserError(
            f"--accelerator={options.accelerator} needs --image=IMAGE, with packages for GPUs: "
            "build the target serve-gpu of launch/Dockerfile. The target serve computes on the CPU."
        )
    project = options.resolve_project(CLIENT, options.dry_run)
    order = _build_endpoint(options, project)
    order.check()
    if options.dry_run:
        print_dry_run(order.as_yaml(), project=options.project)
        print(
            f"tftpu: not checked in a dry run: whether {order.model or order.workdir} can be "
            "served. Without --dry_run that is checked before anything is sent.",
            file=sys.stderr,
        )
        return
    _check_source(order, (options.model or "").rstrip("/"))
    from tftpu.launch.cloud.vertex import endpoint_client

    clients = endpoint_client.create_clients(options.region)
    serving = endpoint_client.launch(clients, order)
    print(f"Serving  {serving.endpoint}")
    number = serving.endpoint.rpartition("/")[2]
    print(
        f"Predict: gcloud ai endpoints predict {number} --region={options.region} "
        f"--project={project} --json-request=FILE"
    )
    print(endpoint_client.explain_how_to_end(serving, order))


def _check_place(options: Options) -> None:
    """Raises `UserError` if Vertex AI cannot read or serve what --model or --workdir names."""
    flag, source = ("model", options.model) if options.model else ("workdir", options.workdir or "")
    if not re.fullmatch(r"gs://[^/\s]+/[^/\s]\S*", source):
        raise UserError(
            f"--{flag}={source} is not a folder in a bucket, but Vertex AI can read only buckets: "
            f"{_suggest_place(source, bool(options.model))}."
        )
    if options.workdir and source.endswith(".onnx"):
        finished.check_no_export(source)
    if source.endswith(".onnx") and source.count("/") < 4:
        bucket, _, file = source.rpartition("/")
        moved = f"{bucket}/{file.removesuffix('.onnx')}/{file}"
        raise UserError(
            f"--model={source} is not in a folder, but Vertex AI copies whole folders: copy it "
            f"with `gcloud storage cp {source} {moved}`, and give --model={moved}."
        )
    if source.endswith((".tflite", ".keras", ".h5", ".safetensors")):
        raise UserError(f"--model={source} cannot be served: only ONNX files and SavedModels can.")


def _suggest_place(source: str, is_export: bool) -> str:
    if not is_export:
        return "train with `--workdir=gs://BUCKET/FOLDER`"
    if not source.endswith(".onnx"):
        return "export with `tftpu export --output=gs://BUCKET/FOLDER`"
    file = source.rpartition("/")[2]
    there = f"gs://BUCKET/{file.removesuffix('.onnx')}/{file}"
    return f"copy it with `gcloud storage cp {source} {there}`, and give --model={there}"


def _build_endpoint(options: Options, project: str) -> vertex_endpoint.VertexEndpoint:
    source = (options.model or options.workdir or "").rstrip("/")
    folder = source.rpartition("/")[0] if source.endswith(".onnx") else source
    return vertex_endpoint.VertexEndpoint(
        name=options.name or job.to_resource_name(source.removesuffix(".onnx")),
        model=folder if options.model else None,
        workdir=source if options.workdir else None,
        project=project,
        region=options.region,
        image=options.image or format_image(options.region, project, "tftpu-serve"),
        machine=options.machine,
        accelerator=options.accelerator,
        replicas=options.replicas,
        most_replicas=options.most_replicas or options.replicas,
        service_account=options.service_account,
        endpoint=options.endpoint,
    )


def _check_source(order: vertex_endpoint.VertexEndpoint, source: str) -> None:
    """Raises `UserError` if the container could not serve the model, before anything costs money.

    Args:
        order: the endpoint, with the folder that the container reads.
        source: the value of --model without a final slash: the folder, or a file in it.
    """
    if order.workdir:
        _check_run(order.workdir)
        return
    folder = order.model or ""
    names = files.list_names(folder) if files.exists(folder) else []
    models = [name for name in names if name.endswith(".onnx") or name == "saved_model.pb"]
    if len(models) != 1:
        raise UserError(
            f"{folder} holds {len(models)} models (SavedModel or ONNX): give a folder with a "
            "single model, as `tftpu export --output=gs://...` writes it."
        )
    file = files.join(folder, models[0])
    if source.endswith(".onnx") and source != file:
        raise UserError(f"There is no {source}. The model in that folder is {file}: give that one.")
    if order.accelerator and file.endswith(".onnx"):
        print(
            f"tftpu: warning: the image of serve-gpu computes {file} on the CPU, as its ONNX "
            "Runtime has no CUDA: export a SavedModel for the GPU.",
            file=sys.stderr,
        )


def _check_run(workdir: str) -> None:
    """Raises `UserError` if a run cannot be served in the container, which has no local files."""
    finished.check_no_export(workdir)
    path = files.join(workdir, "config.json")
    if not files.exists(path):
        raise UserError(f"There is no run in {workdir}: it has no config.json.")
    export = f"export it, `tftpu export {workdir} --output=gs://BUCKET/FOLDER`, and give --model"
    try:
        experiment = from_json(files.read(path))
    except UserError as error:
        raise UserError(
            f"The run in {workdir} cannot start in the container, which does not have your code: "
            f"{error} Instead, {export}."
        ) from error
    if not manifest.list_steps(files.join(workdir, "checkpoints")):
        raise UserError(f"There is no complete checkpoint in {workdir} yet: train it first.")
    if isinstance(experiment.model, sizes.GPT | sizes.Llama) and _has_local_tokens(experiment.data):
        raise UserError(
            f"The run in {workdir} needs a tokenizer or data in a local folder to write text, "
            f"which the container does not have. To serve logits, {export}. To serve text, run "
            "`tftpu serve` on a machine that has the file."
        )


def _has_local_tokens(data: DataConfig) -> bool:
    """Returns whether local files are needed to convert a language model's tokens to text."""
    if getattr(data, "tokenizer", None):
        return True
    if isinstance(data, sources.Text) or getattr(data, "train_text", ""):
        return False
    return not files.is_remote(data.data_dir or "") or not texts.has_byte_tokens(data)
