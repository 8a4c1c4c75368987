"""Trains a config, or resumes its run from the last checkpoint.

A run lives in its workdir. The same command resumes it, after a crash, a preemption or with more
steps.

    tftpu train digits_resnet
    tftpu train digits_resnet --config.train.steps=500 --workdir=runs/short
"""

from tftpu.launch import output
from tftpu.launch.run.start import Options, run_training


def run(options: Options) -> None:
    """Trains, or resumes from the last checkpoint of the workdir."""
    with output.reporting_if_slow(f"Loading {options.config}"):
        experiment = options.load_experiment()
    run_training(options, experiment)
