"""`tftpu data verify`: reads a whole data set and compares it with its manifest."""

from tftpu.errors import UserError


def run(folder: str, workers: int) -> None:
    """Prints what is wrong, each with its file and record, or that nothing is."""
    from tftpu.input_pipelines.convert import verify

    manifest, problems = verify.run(folder.rstrip("/"), workers)
    for problem in problems:
        print(problem)
    if problems:
        raise UserError(
            f"{len(problems)} things are wrong with {folder}: remove it and convert it again."
        )
    for split, shards in manifest.splits.items():
        size = sum(shard.bytes for shard in shards)
        print(
            f"{split}: {manifest.examples(split):,} examples in {len(shards)} shards, "
            f"{size / 2**20:,.1f} MiB, all as the manifest says"
        )
