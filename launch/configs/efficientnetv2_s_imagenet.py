"""EfficientNetV2-S on ImageNet-1k, 600 epochs at 300 pixels.

    tftpu train efficientnetv2_s_imagenet --config.data.data_dir=gs://BUCKET/tfds

Recipe: torchvision's reference training (references/classification of pytorch/vision), whose
weights reach 84.2 % top-1 at 384 pixels. Differences: RandAugment instead of TrivialAugment, no
repeated augmentation, evaluation at 300 pixels; so expect less. Not run here. Tan & Le 2021
(https://arxiv.org/abs/2104.00298) report 83.9 % with images that grow during training. `data_dir`
is where TFDS prepared imagenet2012. The batch is 32 images per core on a v3-32.
"""

from tftpu import models
from tftpu.config import Experiment, OptimizerConfig, TrainConfig
from tftpu.input_pipelines.sources import Augment, StreamedImages

IMAGES, BATCH, EPOCHS = 1_281_167, 1024, 600


def get_config() -> Experiment:
    epoch = IMAGES // BATCH
    return Experiment(
        model=models.config("efficientnetv2_s"),
        data=StreamedImages(
            name="imagenet2012",
            global_batch_size=BATCH,
            image_size=300,
            augment=Augment(randaugment=2, magnitude=9.0, erasing=0.1, mixup=0.2, cutmix=1.0),
        ),
        optimizer=OptimizerConfig(
            name="sgd",
            learning_rate=0.5,
            momentum=0.9,
            warmup_steps=5 * epoch,
            # torchvision adds 2e-5 of a weight to its gradient; momentum 0.9 multiplies it by 10.
            weight_decay=2e-4,
        ),
        train=TrainConfig(
            steps=EPOCHS * epoch,
            eval_every=10 * epoch,
            checkpoint_every=epoch,
            label_smoothing=0.1,
            ema_momentum=0.9999,
            best_metric="accuracy",
        ),
    )
