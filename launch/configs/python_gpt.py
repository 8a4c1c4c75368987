"""A small GPT on the bytes of Python's standard library.

    tftpu train python_gpt

It takes less than 3 minutes on 2 CPU cores, and ends well below the bits per byte of a bigram
model, with a sample of its text.
"""

from tftpu.config import Experiment, OptimizerConfig, TrainConfig
from tftpu.input_pipelines.sources import Text
from tftpu.models.sizes import GPT


def get_config() -> Experiment:
    return Experiment(
        model=GPT(name="python_gpt", vocabulary=256, context=128, layers=4, width=128, heads=4),
        data=Text(name="python_source", global_batch_size=32, context=128),
        optimizer=OptimizerConfig(
            name="adamw", learning_rate=2e-3, warmup_steps=60, weight_decay=0.1, beta_2=0.98
        ),
        train=TrainConfig(
            steps=600,
            steps_per_loop=20,
            log_every=60,
            eval_every=300,
            checkpoint_every=300,
            global_clipnorm=1.0,
        ),
    )
