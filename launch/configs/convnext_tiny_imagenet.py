"""ConvNeXt-T on ImageNet-1k, 300 epochs.

    tftpu train convnext_tiny_imagenet --config.data.data_dir=gs://BUCKET/tfds

Recipe: Liu et al. 2022 (https://arxiv.org/abs/2201.03545), table 5: 82.1 % top-1 on the validation
images, resized to 256 pixels and cropped to 224. Not run here. `data_dir` is where TFDS prepared
imagenet2012. The batch of 4096 is 128 images per core on a v3-32; on a smaller slice use
`--config.train.gradient_accumulation_steps`, which gives the same results.
"""

from tftpu import models
from tftpu.config import Experiment, OptimizerConfig, TrainConfig
from tftpu.input_pipelines.sources import Augment, StreamedImages

IMAGES, BATCH, EPOCHS = 1_281_167, 4096, 300


def get_config() -> Experiment:
    epoch = IMAGES // BATCH
    return Experiment(
        model=models.config("convnext_tiny"),
        data=StreamedImages(
            name="imagenet2012",
            global_batch_size=BATCH,
            augment=Augment(randaugment=2, magnitude=9.0, erasing=0.25, mixup=0.8, cutmix=1.0),
        ),
        optimizer=OptimizerConfig(
            name="adamw", learning_rate=4e-3, warmup_steps=20 * epoch, weight_decay=0.05
        ),
        train=TrainConfig(
            steps=EPOCHS * epoch,
            eval_every=5 * epoch,
            checkpoint_every=epoch,
            label_smoothing=0.1,
            ema_momentum=0.9999,
            best_metric="accuracy",
        ),
    )
