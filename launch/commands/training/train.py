"""Trains a config, or resumes its run from the last checkpoint.

A run lives in its workdir. The same command resumes it, after a crash, a preemption or with more
steps.

    tftpu train digits_resnet
    tftpu train digits_resnet --config.train.steps=500 --workdir=runs/short
"""

from tftpu.launch.run.start import Options, load_experiment, run_training


def run(options: Options) -> None:
    """Trains, or resumes from the last checkpoint of the workdir."""
    run_training(options, load_experiment(options))
