"""Prepares the data of a training machine on this one, in the same order.

The training machine names this machine, or several, in --config.data.service=HOST:PORT,HOST:PORT.

    tftpu data serve photos.py --host=10.0.0.3 --port=5000
"""

import dataclasses

from tftpu.errors import UserError
from tftpu.input_pipelines.reading.streamed import Streamed
from tftpu.launch.settings.options import ConfigOptions, flag, required
from tftpu.launch.startup import import_tensorflow


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(ConfigOptions):
    """The data to serve, and where."""

    host: str = required("HOST", "address of this machine that the training machine reaches")
    port: int = flag(5000, "port; 0 takes any free one", minimum=0, metavar="PORT")
    allow_network: bool = flag(False, "listen at a public address, or at all of them")


def run(options: Options) -> None:
    """Serves the data until the process is stopped.

    Raises:
        UserError: the data set cannot be served, or the address cannot be used.
    """
    experiment = options.load_experiment()
    if not isinstance(experiment.data, Streamed):
        raise UserError(
            f"{type(experiment.data).__name__} cannot be served: data.service works only with "
            "sources that are read during training."
        )
    import_tensorflow()
    from tftpu.input_pipelines.serving import Server

    with Server(experiment.data, options.host, options.port, options.allow_network) as server:
        print(f"{options.host}:{server.port}", flush=True)
        server.serve_forever()
