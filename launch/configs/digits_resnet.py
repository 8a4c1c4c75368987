"""A small ResNet on 8x8 digits, to try all of tftpu in a minute or two.

    tftpu train digits_resnet

It takes one to two minutes on 2 CPU cores and reaches an accuracy of 0.997. The results with eight
virtual replicas (`--virtual_devices=8`) differ only by rounding.
"""

from tftpu.config import Experiment, OptimizerConfig, TrainConfig
from tftpu.input_pipelines.sources import Images
from tftpu.models.sizes import ResNet


def get_config() -> Experiment:
    return Experiment(
        model=ResNet(
            name="digits_resnet",
            blocks=(1, 1, 1),
            width=32,
            bottleneck=False,
            stem="small",
            image_size=8,
            channels=1,
            num_classes=10,
            norm_batch=16,
        ),
        data=Images(name="digits", global_batch_size=128, image_size=8, channels=1, shift=1),
        optimizer=OptimizerConfig(
            name="sgd", learning_rate=0.1, warmup_steps=50, weight_decay=5e-4, nesterov=True
        ),
        train=TrainConfig(
            steps=900,
            steps_per_loop=20,
            log_every=60,
            eval_every=180,
            checkpoint_every=180,
            label_smoothing=0.1,
            best_metric="accuracy",
        ),
    )
