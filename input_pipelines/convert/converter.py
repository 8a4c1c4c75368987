"""Converts any source to TFRecord shards: shuffled, balanced, byte for byte reproducible.

1. `staging`: each part of the source (`readers`) is encoded into a file of records.
2. `plan` and `shards`: the number of records and their bytes give the number of shards. A seeded
   permutation gives each record its place, so each shard can be made on its own.
3. `publishing`: the manifest is written last, after all shards.

Every file is written atomically, and its content depends only on the source and the options, not
on the process that writes it or the time. (Records of a source without an order, such as BigQuery,
are sorted by their hashes before stage 2.) So a conversion that is started again resumes with the
missing files, and any number of processes, or a Beam job (`beam`), makes the same bytes.
"""

import os
from collections.abc import Callable

from tftpu.amounts import format_size
from tftpu.errors import counted
from tftpu.input_pipelines.convert import processes, publishing, shards, staging
from tftpu.input_pipelines.convert.conversion import Conversion
from tftpu.input_pipelines.convert.readers.reader import Reader
from tftpu.input_pipelines.convert.staging import Staging
from tftpu.input_pipelines.formats import manifest
from tftpu.input_pipelines.formats.manifest import Manifest, Shard
from tftpu.storage import files

Say = Callable[[str], None]
_SHOWN = 20  # maximum number of skipped files that are listed


def run(
    conversion: Conversion,
    workers: int = 0,
    staging_folder: str | None = None,
    say: Say = print,
    reader: Reader | None = None,
) -> Manifest:
    """Converts a source on this machine, and returns the manifest of the output.

    Args:
        conversion: the conversion.
        workers: number of processes; 0: one per core.
        staging_folder: a local folder with room for all records, which are removed at the end;
            None: a folder in the output if that is local, otherwise in the cache folder.
        say: a function that is called with lines about the progress.
        reader: the reader of the source; None: the source is opened here.

    Raises:
        UserError: an option is wrong, or a record cannot be read or written.
    """
    conversion.validate()
    reader = reader or publishing.open_reader(conversion)
    folder = staging.choose_folder(conversion, staging_folder)
    if publishing.find_unfinished(conversion, reader) is None:
        # A process killed after it wrote the manifest may have left its staging folder.
        files.remove_tree(str(folder))
        say(f"The split {conversion.split!r} of {conversion.output} is already complete.")
        return manifest.read(conversion.output)
    with staging.claimed(folder, say):
        if (
            publishing.find_unfinished(conversion, reader) is None
        ):  # the process that had locked the folder has made the split
            return manifest.read(conversion.output)
        for line in reader.notes:
            say(f"{conversion.split}: {line}")
        staging.prepare_folder(folder, conversion, reader)
        staged = Staging(reader, folder)
        made = _make_shards(conversion, staged, workers, say)
        skipped = staged.list_skipped()
        after = publishing.publish(conversion, reader, made, skipped)
    files.remove_tree(str(folder))
    if skipped:
        say(f"Left out {counted(len(skipped), 'file')}, listed in {manifest.NAME}:")
        for left in skipped[:_SHOWN]:
            say(f"  {left.file} {left.why}")
    say(f"The split {conversion.split!r} of {conversion.output} is ready.")
    return after


def _make_shards(conversion: Conversion, staged: Staging, workers: int, say: Say) -> list[Shard]:
    """Stages the parts and makes the shards, in parallel."""
    reader: Reader = staged.reader
    count = len(reader.parts)
    with processes.parallel_map(workers or os.cpu_count() or 1, count) as each:
        say(f"{counted(count, 'part')} to read, {staged.count_done()} of them done")
        lengths = each(staged.stage_part, range(count))
        size = sum(int(part.sum()) for part in lengths)
        planned = conversion.plan_shards([len(part) for part in lengths], size)
        if not reader.ordered:
            staged.save_order()
        say(
            f"{counted(planned.examples, 'example')}, {format_size(size)}: "
            f"{counted(planned.shards, 'shard')}"
        )
        existing = shards.list_existing(conversion.output)
        make = shards.ShardWriter(conversion, staged, planned, existing)
        return each(make, range(planned.shards))
