"""Plans the conversions of one source: one for each split, including a held-out one."""

import dataclasses
from collections.abc import Callable
from typing import Any

from tftpu.errors import UserError
from tftpu.input_pipelines.convert.conversion import Conversion
from tftpu.input_pipelines.reading import image_files
from tftpu.input_pipelines.reading.image_files import Splits

_OF_IMAGES = ("images", "index")
_OF_CLASSES = {"classes": (*_OF_IMAGES, "tfrecord"), "num_classes": ("index", "tfrecord")}
HELD_OUT = "validation"  # the split that `validation_fraction` makes


def plan_conversions(
    conversion: Conversion, validation_fraction: float = 0.0, say: Callable[[str], None] = print
) -> list[Conversion]:
    """Returns the conversions of a source, one for each split of the output.

    Args:
        conversion: the conversion of the whole source. If its split is "", all splits of a folder
            are converted; a source without folders of splits becomes the split "train".
        validation_fraction: the share of each class to hold out as the split `HELD_OUT`; 0: none.
        say: a function that is called with lines about files that are in no split.

    Raises:
        UserError: an option is not allowed, or does not apply to the source.
    """
    options = conversion.options
    kind, _, what = conversion.source.partition(":")
    if kind not in _OF_IMAGES and (validation_fraction or options.skip_bad):
        raise UserError(
            "validation_fraction and skip_bad work only with the sources images and index. For "
            "tfds, --split=validation=train[90%:] makes a validation split of a tenth of the "
            "data."
        )
    for name, kinds in _OF_CLASSES.items():
        if getattr(options, name) and kind not in kinds:
            raise UserError(
                f"{name} works only with the sources {', '.join(kinds)}: {conversion.source} has "
                "its own classes. Leave it out."
            )
    if not 0 <= validation_fraction < 1:
        raise UserError(f"validation_fraction is {validation_fraction}: it must be in [0, 1).")
    splits = Splits({}, {})
    if kind == "images" and what:
        splits = image_files.list_splits(what, options.classes)
    found = splits.classes
    if not found:
        plain = _replace_options(conversion, split=options.split or "train")
        return _hold_out(plain, validation_fraction)
    if options.split:
        raise UserError(
            f"The folders of {what} are the splits {', '.join(found)}: leave out --split to "
            "convert all of them, or convert one of them with "
            f"--source=images:{what}/{next(iter(found))}."
        )
    for line in image_files.describe_left_out(splits.left_out):
        say(line)
    classes = options.classes or tuple(sorted({n for names in found.values() for n in names}))
    conversions = [
        dataclasses.replace(
            _replace_options(conversion, split=name, classes=classes),
            source=f"images:{what}/{name}",
        )
        for name in found
    ]
    if not validation_fraction:
        return conversions
    validation = [name for name in found if name.lower() in image_files.VALIDATION_NAMES]
    training = [c for c in conversions if c.split.lower() in image_files.TRAINING_NAMES]
    if validation or len(training) != 1:
        raise UserError(
            f"The folders of {what} are the splits {', '.join(found)}. validation_fraction works "
            "only if there is a single training split and no validation split."
        )
    others = [c for c in conversions if c is not training[0]]
    return [*_hold_out(training[0], validation_fraction), *others]


def _hold_out(conversion: Conversion, fraction: float) -> list[Conversion]:
    if not fraction:
        return [conversion]
    rest = _replace_options(conversion, validation_fraction=fraction)
    return [rest, _replace_options(rest, split=HELD_OUT, held_out=True)]


def _replace_options(conversion: Conversion, **options: Any) -> Conversion:
    changed = dataclasses.replace(conversion.options, **options)
    return dataclasses.replace(conversion, options=changed)
