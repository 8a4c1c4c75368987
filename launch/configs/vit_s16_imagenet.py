"""ViT-S/16 on ImageNet-1k, 90 epochs.

    tftpu train vit_s16_imagenet --config.data.data_dir=gs://BUCKET/tfds

Recipe: Beyer et al. 2022 (https://arxiv.org/abs/2205.01580), whose config for big_vision reports
76.5 % top-1 after 6 to 7 hours on a v3-8; 80.0 % after 300 epochs (`--config.train.steps=375300`).
They train on the first 99 % of the training images. Not run here. `data_dir` is where TFDS prepared
imagenet2012. The batch is 128 images per core on a v3-8.
"""

from tftpu import models
from tftpu.config import Experiment, OptimizerConfig, TrainConfig
from tftpu.input_pipelines.sources import Augment, StreamedImages

IMAGES, BATCH, EPOCHS = 1_281_167, 1024, 90


def get_config() -> Experiment:
    epoch = IMAGES // BATCH
    return Experiment(
        model=models.config("vit_s16", pooling="mean"),
        data=StreamedImages(
            name="imagenet2012",
            global_batch_size=BATCH,
            augment=Augment(min_area=0.05, randaugment=2, magnitude=10.0, mixup=0.2),
        ),
        optimizer=OptimizerConfig(
            name="adamw",
            learning_rate=1e-3,
            warmup_steps=10_000,
            weight_decay=0.1,  # times the learning rate: the paper's 1e-4
        ),
        train=TrainConfig(
            steps=EPOCHS * epoch,
            eval_every=2 * epoch,
            checkpoint_every=epoch,
            global_clipnorm=1.0,
            best_metric="accuracy",
        ),
    )
