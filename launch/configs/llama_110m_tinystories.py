"""A Llama of 110 M parameters on TinyStories, 13 billion tokens.

    tftpu train llama_110m_tinystories --config.data.data_dir=gs://BUCKET/tinystories

Recipe: the defaults of train.py in karpathy/llama2.c, whose README reports a loss of 0.760 on the
validation stories for this size. Its windows cross from one story to the next, but here attention
and loss do not, so the losses are close, not equal. Not run here. `data_dir` is a folder of packed
shards made with the tokenizer.json of Llama 2 (32,000 tokens) and a context of 1024; see `tftpu
data convert`.
"""

from tftpu import models
from tftpu.config import Experiment, OptimizerConfig, TrainConfig
from tftpu.input_pipelines.sources import Tokens


def get_config() -> Experiment:
    return Experiment(
        model=models.config("llama_110m"),
        data=Tokens(
            name="tinystories", data_dir="data/tinystories", global_batch_size=128, context=1024
        ),
        optimizer=OptimizerConfig(
            name="adamw", learning_rate=5e-4, warmup_steps=1000, weight_decay=0.1, beta_2=0.95
        ),
        train=TrainConfig(
            steps=100_000, eval_every=5000, checkpoint_every=1000, global_clipnorm=1.0
        ),
    )
