"""ResNet-50 on ImageNet, 90 epochs, 76 % top-1.

The recipe of Goyal et al. 2017 (https://arxiv.org/abs/1706.02677), which reports 76.3 %. Not run
here.

    tftpu preflight resnet50_imagenet --slices=v3-8,v5e-8,v6e-8
    tftpu train resnet50_imagenet --config.data.data_dir=gs://BUCKET/tfds

The data set is TFDS's imagenet2012, prepared once. The learning rate scales with
`global_batch_size`; set `train.steps` as well, to keep 90 epochs. Batch statistics are over 32
examples, as in the paper; over 128 (`--config.model.norm_batch=128`, all examples of a core on 8
cores) a step is a fifth faster on a TPU (preflight for v5e-8: 41.9 instead of 54.1 ms).
"""

from tftpu import models
from tftpu.config import Experiment, OptimizerConfig, TrainConfig
from tftpu.input_pipelines.sources import StreamedImages

IMAGES = 1_281_167
BATCH = 1024
EPOCH = IMAGES // BATCH  # steps of an epoch


def get_config() -> Experiment:
    return Experiment(
        model=models.config("resnet50", norm_batch=32),
        data=StreamedImages(name="imagenet2012", global_batch_size=BATCH, image_dtype="uint8"),
        optimizer=OptimizerConfig(
            name="sgd",
            learning_rate=0.1,
            scaling="linear",
            warmup_steps=5 * EPOCH,
            decay="step",
            decay_steps=(30 * EPOCH, 60 * EPOCH, 80 * EPOCH),
            # Decoupled weight decay: the paper adds 1e-4 of a weight to its gradient, which
            # momentum multiplies by 10.
            weight_decay=1e-3,
        ),
        train=TrainConfig(
            steps=90 * EPOCH,
            steps_per_loop=100,
            log_every=100,
            eval_every=EPOCH,
            checkpoint_minutes=10,
            best_metric="accuracy",
        ),
    )
