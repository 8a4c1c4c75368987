"""Searches for the hyper-parameters of a config on Vertex AI, as a hyper-parameter tuning job.

Each trial is a run on its own slice, in a folder of the workdir, and resumes if it is preempted.
The service chooses the values. A space that it cannot express is an error.

    tftpu launch vertex-search digits_resnet --space=model.width=choice:8,16 --dry_run
"""

import dataclasses

from tftpu.launch.cloud.options import print_dry_run
from tftpu.launch.cloud.vertex import search as vertex_search
from tftpu.launch.cloud.vertex.options import VertexOptions
from tftpu.launch.cloud.vertex.search import VertexSearch
from tftpu.launch.search import checks, space
from tftpu.launch.settings import config_flags
from tftpu.launch.settings.options import TIME, flag


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(VertexOptions):
    """The config, its space, and the job that searches it."""

    space: tuple[str, ...] = flag(
        (),
        "values of a field: FIELD=log:LOW..HIGH, uniform:LOW..HIGH or choice:A,B; repeat it",
        metavar="FIELD=VALUES",
        shown="get_space() of the config",
    )
    trials: int = flag(20, "number of trials", minimum=1)
    parallel: int = flag(1, "trials at a time, each on its own slice", minimum=1)
    metric: str | None = flag(
        None, "metric of the evaluation", metavar="NAME", shown="train.best_metric of the config"
    )
    algorithm: str = flag("bayesian", "bayesian, random or grid", metavar="NAME")
    pruner: str = flag(
        "none", "ends trials that fall behind: none, median or decay_curve", metavar="NAME"
    )
    workdir: str | None = flag(None, "gs://BUCKET/FOLDER of the search (required)", metavar="DIR")
    tensorboard: str | None = flag(None, "resource name of a Vertex AI TensorBoard", metavar="NAME")
    timeout: float = flag(604_800.0, "time limit of a trial", metavar=TIME, minimum=60)


def run(options: Options) -> None:
    """Prints the job, or sends it and waits for its end.

    Raises:
        UserError: Vertex AI would reject or cannot express a value, a value is missing, or the
            job failed.
    """
    experiment = options.load_experiment()
    metric = checks.choose_metric(options.metric, options.overrides, experiment)
    dimensions = space.parse(options.space or config_flags.load_space(options.config), experiment)
    checks.check_space(dimensions, options.overrides, experiment)
    search = VertexSearch(
        order=options.build_job(experiment, options.tensorboard),
        space=dimensions,
        experiment=experiment,
        metric=metric,
        trials=options.trials,
        parallel=options.parallel,
        algorithm=options.algorithm,
        pruner=options.pruner,
    )
    created = search.build_tuning_job()
    if options.dry_run:
        print_dry_run(search.as_yaml(created), project=options.project, workdir=options.workdir)
        return
    _launch(search, created, options)


def _launch(search: VertexSearch, created: vertex_search.Spec, options: Options) -> None:
    from tftpu.launch.cloud.vertex import client as vertex_client
    from tftpu.launch.cloud.vertex import follow as vertex_follow

    order, kind = search.order, vertex_client.TUNING
    order.confirm_shipment(options.send_data)
    client = vertex_client.create_client(order.region)
    name = vertex_client.submit(client, kind, order, created)
    print(vertex_client.explain_how_to_end(kind, name))
    print(f"The search is at     {vertex_follow.format_page_url(name)}")
    print(f"The trials are in    {search.resolve_folder(created['displayName'])}", flush=True)
    if options.detach:
        print(vertex_follow.explain_how_to_follow(name))
        return
    vertex_follow.follow_search(client, name)
