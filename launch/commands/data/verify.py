"""Reads every record of a converted data set, and compares it with its manifest.

tftpu data verify data/flowers
"""

import dataclasses

from tftpu.amounts import format_size
from tftpu.errors import UserError, counted
from tftpu.launch.settings.options import flag, required
from tftpu.launch.startup import import_tensorflow


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The data set to verify."""

    folder: str = required("FOLDER", "folder of the data set, local or gs://", word=True)
    workers: int = flag(0, "number of processes", metavar="N", shown="one per core")


def run(options: Options) -> None:
    """Prints each problem with its file and record, or a summary if there are none.

    Raises:
        UserError: the data set has no manifest, or differs from it.
    """
    import_tensorflow()
    from tftpu.input_pipelines.convert import verify

    manifest, problems = verify.run(options.folder.rstrip("/"), options.workers)
    for problem in problems:
        print(problem)
    if problems:
        raise UserError(
            f"{counted(len(problems), 'problem')} in {options.folder}: remove it and convert it "
            "again."
        )
    for split, shards in manifest.splits.items():
        size = sum(shard.bytes for shard in shards)
        print(
            f"{split}: {counted(manifest.count_examples(split), 'example')} in "
            f"{counted(len(shards), 'shard')}, {format_size(size)}, all matching the manifest"
        )
