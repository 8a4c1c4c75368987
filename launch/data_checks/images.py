"""Counts the classes of image folders, and decodes a sample of the images."""

import time
from collections.abc import Iterator
from typing import Any

from tftpu.errors import UserError, counted
from tftpu.input_pipelines.sources import StreamedImages
from tftpu.launch.data_checks.finding import Finding
from tftpu.runtime.notes import without_notes
from tftpu.runtime.slow import report_activity

_SHOWN = 10  # largest number of damaged images that are named
_DECODED = 200  # images that are decoded between two looks at the clock
_PROGRESS = 10.0  # seconds between two lines of progress


def inspect_images(data: Any) -> Iterator[Finding]:
    """Yields findings on images: their classes and, in a folder or an index, damaged files."""
    if not isinstance(data, StreamedImages) or data.format == "tfds":
        return
    from tftpu.input_pipelines import overlap
    from tftpu.input_pipelines.datasets import image_survey, streamed_images

    if data.format == "tfrecord":
        yield from (Finding("ok", line) for line in image_survey.describe_shards(data))
        if few := image_survey.describe_few(data.eval_split, image_survey.count_evaluation(data)):
            yield Finding("warning", few)
        return
    try:
        splits = {
            split: streamed_images.list_split(data, split)
            for split in dict.fromkeys((data.train_split, data.eval_split))
        }
    except UserError as error:
        yield Finding("error", str(error))
        return
    yield from (Finding("ok", line) for line in image_survey.describe_classes(splits))
    if few := image_survey.describe_few(data.eval_split, len(splits[data.eval_split].images)):
        yield Finding("warning", few)
    yield from (Finding("warning", line) for line in image_survey.find_imbalance(splits))
    if len(splits) == 2 and (same := overlap.describe_images(*splits.values())):
        yield Finding("warning", same)
    paths = [path for found in splits.values() for path in image_survey.sample_paths(found)]
    report_activity(f"Decoding {counted(len(paths), 'image')}")
    damaged: dict[str, str] = {}
    said = time.monotonic()
    for first in range(0, len(paths), _DECODED):
        if time.monotonic() - said >= _PROGRESS:
            report_activity(f"{first:,} of {len(paths):,} images")
            said = time.monotonic()
        with without_notes((b"",)):  # hides decoders' errors, which do not name the file
            damaged |= image_survey.find_damaged(paths[first : first + _DECODED])
    yield _describe_damaged(damaged, len(paths), data.on_bad_record == "skip")


def _describe_damaged(damaged: dict[str, str], decoded: int, skips: bool) -> Finding:
    """Returns a finding: the number of damaged images, what to do, and the first files."""
    if not damaged:
        return Finding("ok", f"{counted(decoded, 'image')} can be decoded")
    advice = "they are skipped"
    if not skips:
        advice = "remove or replace them, or skip them with --config.data.on_bad_record=skip"
    lines = [f"{len(damaged):,} of {counted(decoded, 'image')} cannot be decoded: {advice}"]
    lines += [f"{path} {why}" for path, why in list(damaged.items())[:_SHOWN]]
    if len(damaged) > _SHOWN:
        lines.append(f"and {len(damaged) - _SHOWN:,} others")
    return Finding("warning" if skips else "error", f"\n{'':13}".join(lines))
