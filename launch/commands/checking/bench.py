"""Times a config's training step, its input pipeline and both together.

With --compare, Keras's own fit is timed as well. All of these take turns of a few steps, so that
other load on the machine affects them alike; medians over the turns are printed.

    tftpu bench digits_resnet --compare
"""

import dataclasses

from tftpu.engines import selection
from tftpu.launch.preflight import mesh_choice
from tftpu.launch.settings.options import RunOptions, flag
from tftpu.launch.startup import import_tensorflow


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(RunOptions):
    """The config to time, and its devices."""

    compare: bool = flag(False, "time Keras's own fit as well")


def run(options: Options) -> None:
    """Prints each contestant's milliseconds per step, and the trainer's time relative to it."""
    experiment = options.load_experiment()
    words = [f"--config={options.config}", *options.overrides]
    experiment.cluster.mesh = mesh_choice.choose_mesh(experiment.cluster, words)
    selection.choose_backend(experiment.cluster)
    import_tensorflow()
    from tftpu.launch import benchmark

    benchmark.run(experiment, options.name, compare=options.compare)
