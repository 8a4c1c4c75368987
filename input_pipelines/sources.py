"""The data sets that a config can name, and their fields. No TensorFlow here."""

import dataclasses

from tftpu.config import Data
from tftpu.errors import UserError


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
