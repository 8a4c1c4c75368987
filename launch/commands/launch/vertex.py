"""Trains a config on Vertex AI, as a custom job.

The running tftpu and the folder of your own config are sent to the job. Slices of v6e, and slices
with more than 4 chips, need the JAX engine.

    tftpu launch vertex resnet50_imagenet --slice=v5e-4 --workdir=gs://BUCKET/resnet50
"""

import dataclasses

from tftpu.launch.cloud.options import print_dry_run
from tftpu.launch.cloud.vertex import training_job
from tftpu.launch.cloud.vertex.options import VertexOptions
from tftpu.launch.settings.options import flag


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(VertexOptions):
    """The config to run, and the job for it."""

    tensorboard: str | None = flag(None, "resource name of a Vertex AI TensorBoard", metavar="NAME")


def run(options: Options) -> None:
    """Prints the job, or sends it and waits for its end.

    Raises:
        UserError: Vertex AI would reject a value, a value is missing, or the job failed.
    """
    order = options.build_job(options.load_experiment(), options.tensorboard)
    created = order.build_custom_job()
    if options.dry_run:
        print_dry_run(order.as_yaml(created), project=options.project, workdir=options.workdir)
        return
    _launch(order, created, options)


def _launch(
    order: training_job.VertexJob, created: training_job.CustomJob, options: Options
) -> None:
    from tftpu.launch.cloud.vertex import client as vertex_client
    from tftpu.launch.cloud.vertex import follow

    order.confirm_shipment(options.send_data)
    client = vertex_client.create_client(order.region)
    kind = vertex_client.CUSTOM
    name = vertex_client.submit(client, kind, order, created)
    print(vertex_client.explain_how_to_end(kind, name))
    print(f"Its console output:  gcloud ai custom-jobs stream-logs {name}")
    print(f"The run is in        {order.run_folder}", flush=True)
    if options.detach:
        return
    follow.follow_run(client, name)
