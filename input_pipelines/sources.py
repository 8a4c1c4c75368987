"""The data sets that a config can name, and their fields. No TensorFlow here."""

import dataclasses

from tftpu.config import Data
from tftpu.errors import UserError


@dataclasses.dataclass
class Augment:
    """What is done to training images, and how evaluation cuts them; see `augment.py`."""

    crop: bool = True  # a random part, resized; False: the same part as in evaluation
    min_area: float = 0.08  # of a random crop, as a share of the image's area
    max_aspect: float = 4 / 3  # of a random crop, its longer side over its shorter one
    flip: bool = True  # left and right, for half of the images
    randaugment: int = 0  # operations in a row; 2 is usual
    magnitude: float = 9.0  # of RandAugment, from 0 to 30
    jitter: float = 0.0  # brightness, contrast and saturation times 1 - jitter to 1 + jitter
    hue: float = 0.0  # turned by up to so much of the circle, to 0.5
    erasing: float = 0.0  # probability that a rectangle is filled with noise
    mixup: float = 0.0  # alpha of its Beta distribution; 0: no MixUp
    cutmix: float = 0.0  # the same; with both, each image draws one of them
    eval_crop: float = 0.875  # side of the central square over the image's shorter side

    def validate(self) -> None:
        """Raises `UserError` for a value that makes no sense."""
        for field, low, high in (
            ("min_area", 1e-4, 1.0),
            ("max_aspect", 1.0, 100.0),
            ("randaugment", 0, 14),
            ("magnitude", 0.0, 30.0),
            ("jitter", 0.0, 10.0),
            ("hue", 0.0, 0.5),
            ("erasing", 0.0, 1.0),
            ("mixup", 0.0, 100.0),
            ("cutmix", 0.0, 100.0),
            ("eval_crop", 0.01, 1.0),
        ):
            value = getattr(self, field)
            if not low <= value <= high:
                raise UserError(
                    f"data.augment.{field} is {value}: it must lie between {low} and {high}."
                )


@dataclasses.dataclass
class Images(Data):
    """A TFDS data set of images with a class each."""

    image_size: int = 224
    channels: int = 3
    train_split: str = "train"
    eval_split: str = "test"
    shift: int = 0  # augmentation: moves the image by up to so many pixels, zeros come in

    def validate(self) -> None:
        super().validate()
        for field in ("image_size", "channels"):
            if getattr(self, field) < 1:
                raise UserError(f"data.{field} is {getattr(self, field)}: it must be 1 or more.")
        if self.shift < 0:
            raise UserError(f"data.shift is {self.shift}: it must be 0 or more.")


@dataclasses.dataclass
class Text(Data):
    """A TFDS data set of documents, read as bytes and cut into windows."""

    context: int = 128  # bytes of a window
    train_split: str = "train"
    eval_split: str = "test"

    def validate(self) -> None:
        super().validate()
        if self.context < 1:
            raise UserError(f"data.context is {self.context}: it must be 1 or more.")
