from tftpu import models
from tftpu.config import Experiment, Optimizer, Train
from tftpu.input_pipelines.sources import StreamedImages


def get_config() -> Experiment:
    return Experiment(
        model=models.config("resnet18", num_classes=3, image_size=64, norm_batch=8),
        data=StreamedImages(
            format="folder",
            data_dir="photos",
            eval_split="val",
            num_classes=3,
            image_size=64,
            global_batch_size=16,
        ),
        optimizer=Optimizer(name="sgd", learning_rate=0.05, warmup_steps=20),
        train=Train(steps=200, eval_every=100, checkpoint_every=100),
    )
