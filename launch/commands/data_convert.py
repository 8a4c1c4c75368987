"""`tftpu data convert`: any source to shuffled, balanced TFRecord shards with a manifest."""

import shlex

from tftpu.errors import UserError


def run(
    source: str | None,
    output: str | None,
    split: str,
    seed: int,
    shard_mb: float,
    min_shards: int,
    compression: str,
    workers: int,
    staging: str | None,
    data_dir: str | None,
    features: str,
    tokenizer: str | None,
    end_of_text: str | None,
    context: int,
    field: str,
    snapshot: str | None,
    runner: str | None,
    beam_options: str,
) -> None:
    """Converts here, or as a job of Apache Beam."""
    if not source or not output:
        raise UserError(
            "tftpu data convert needs --source=KIND:WHAT, as images:FOLDER, and --output=DIR."
        )
    if beam_options and not runner:
        raise UserError("--beam_options are for --runner=NAME, as DirectRunner or DataflowRunner.")
    from tftpu.input_pipelines.convert import converter
    from tftpu.input_pipelines.convert.conversion import Conversion
    from tftpu.input_pipelines.convert.readers.reader import ReadOptions

    options = ReadOptions(
        split=split,
        data_dir=data_dir,
        features=tuple(name for name in features.split(",") if name),
        tokenizer=tokenizer,
        end_of_text=end_of_text,
        context=context,
        field=field,
        snapshot=snapshot,
    )
    conversion = Conversion(
        source, output.rstrip("/"), options, seed, shard_mb, min_shards, compression
    )
    if runner:
        from tftpu.input_pipelines.convert import beam

        beam.run(conversion, [f"--runner={runner}", *shlex.split(beam_options)])
    else:
        converter.run(conversion, workers, staging)
