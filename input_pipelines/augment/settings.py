"""The options of image augmentation. Imports no TensorFlow."""

import dataclasses

from tftpu.errors import UserError


@dataclasses.dataclass
class Augment:
    """The augmentation of training images, and the crop of evaluation images."""

    # True: trains on a random crop, resized; False: on the central square that evaluation uses
    crop: bool = True
    min_area: float = 0.08  # smallest area of a random crop, as a share of the image's area
    max_aspect: float = 4 / 3  # largest ratio of a random crop's longer side to its shorter one
    flip: bool = True  # flips half of the images left to right
    randaugment: int = 0  # operations per image; 2 is common
    magnitude: float = 9.0  # strength of RandAugment's operations, from 0 to 30
    jitter: float = 0.0  # scales brightness, contrast, saturation by 1 - jitter to 1 + jitter
    hue: float = 0.0  # largest rotation of the hue, as a share of the circle, up to 0.5
    erasing: float = 0.0  # probability that a rectangle is filled with noise
    mixup: float = 0.0  # alpha of MixUp's Beta distribution; 0: no MixUp
    # alpha of CutMix's Beta distribution; 0: no CutMix. With MixUp, each image gets one of the two.
    cutmix: float = 0.0
    # Side of evaluation's central square, as a share of the image's shorter side; None: 0.875, or
    # 1 if `crop` is False.
    eval_crop: float | None = None

    @property
    def central_side(self) -> float:
        """The side of the central square, as a share of the image's shorter side."""
        if self.eval_crop is not None:
            return self.eval_crop
        return 0.875 if self.crop else 1.0

    def validate(self) -> None:
        """Raises `UserError` for a value out of range."""
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
            if value is not None and not low <= value <= high:
                raise UserError(
                    f"data.augment.{field} is {value}: it must be between {low} and {high}."
                )
