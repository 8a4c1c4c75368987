"""Runs the conversion of `converter` as an Apache Beam job: many machines make the same bytes.

    parts of the source -> records -> (shard, (place, record)) -> a group per shard, sorted, written
    records -> number and bytes of each part's records -> the plan, which gives shard and place

The shuffle is Beam's own grouping, so nothing is staged and a runner needs no shared disk; a shard
is held in memory while it is written. The job publishes the manifest last.
"""

import os
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tftpu import installation
from tftpu.errors import UserError
from tftpu.input_pipelines.convert import publishing, shards, staging
from tftpu.input_pipelines.convert.conversion import Conversion
from tftpu.input_pipelines.convert.plan import Plan
from tftpu.input_pipelines.convert.readers.reader import Reader
from tftpu.input_pipelines.formats import tfrecord
from tftpu.input_pipelines.formats.manifest import Shard


def run(conversion: Conversion, arguments: list[str]) -> None:
    """Converts as a Beam job, and waits for its end.

    Args:
        conversion: the conversion, whose output is a folder that all workers can reach.
        arguments: arguments for Beam, such as ["--runner=DataflowRunner", "--project=P",
            "--region=R"].

    Raises:
        UserError: an option or the source does not work with a runner, or Beam is not installed.
    """
    if conversion.options.skip_bad:
        raise UserError(
            "skip_bad does not work with a runner: leave out --runner to convert on this machine."
        )
    try:
        import apache_beam
        from apache_beam.options.pipeline_options import PipelineOptions
    except ImportError as error:
        raise UserError(
            f"Apache Beam is not installed: run `{installation.command('beam')}`, or convert "
            "without a runner."
        ) from error

    beam: Any = apache_beam  # Beam's types omit the names that it re-exports
    conversion.validate()
    reader = publishing.open_reader(conversion)
    if not reader.ordered:
        raise UserError(
            f"{conversion.source} has no fixed order, so it is converted on one machine: "
            "convert without a runner."
        )
    if publishing.find_unfinished(conversion, reader) is None:
        print(f"The split {conversion.split!r} of {conversion.output} is already complete.")
        return
    for line in reader.notes:
        print(f"{conversion.split}: {line}")
    numbers = range(len(reader.parts))
    # Beam's check of our functions' type hints fails on protocols.
    options = PipelineOptions(arguments, pipeline_type_check=False)
    with beam.Pipeline(options=options) as job:
        records = (
            job
            | "Parts" >> beam.Create(list(numbers))
            | "Spread" >> beam.Reshuffle()
            | "Encode" >> beam.FlatMap(_iterate_records, reader)
        )
        sizes = (
            records
            | "Size" >> beam.Map(lambda found: (found[0], (1, len(found[2]) + tfrecord.OVERHEAD)))
            | "Sizes" >> beam.CombinePerKey(_sum_pairs)
        )
        planned = (
            job
            | "Once" >> beam.Create([None])
            | "Plan"
            >> beam.Map(_plan_conversion, beam.pvalue.AsDict(sizes), conversion, len(numbers))
        )
        made = (
            records
            | "Place" >> beam.ParDo(_place(beam), beam.pvalue.AsSingleton(planned))
            | "Shards" >> beam.GroupByKey()
            | "Write" >> beam.Map(_write, beam.pvalue.AsSingleton(planned), conversion)
        )
        _ = (
            job
            | "Last" >> beam.Create([None])
            | "Publish" >> beam.Map(_publish, beam.pvalue.AsList(made), conversion, reader)
        )


def _iterate_records(part: int, reader: Reader) -> Iterator[tuple[int, int, bytes]]:
    """Yields (part, number in the part, record)."""
    for number, record in enumerate(staging.encode_part(reader, part)):
        # Always bytes: only `skip_bad` yields skipped files, and `run` rejects it.
        if isinstance(record, bytes):
            yield part, number, record


def _sum_pairs(pairs: Iterable[tuple[int, int]]) -> tuple[int, int]:
    """Adds up pairs (number of records, bytes)."""
    count, size = 0, 0
    for one, other in pairs:
        count, size = count + one, size + other
    return count, size


def _plan_conversion(
    _: None, sizes: dict[int, tuple[int, int]], conversion: Conversion, count: int
) -> Plan:
    counts = [sizes.get(part, (0, 0))[0] for part in range(count)]
    return conversion.plan_shards(counts, sum(size for _, size in sizes.values()))


def _place(beam: Any) -> Any:
    class Place(beam.DoFn):
        """Maps (part, number, record) to (shard, (place, record)); caches one part's places."""

        def setup(self):
            self._part = None

        def process(self, found, planned: Plan):
            part, number, record = found
            if part != self._part:
                self._part, (self._shards, self._places) = part, planned.list_places(part)
            yield int(self._shards[number]), (int(self._places[number]), record)

    return Place()


def _write(
    group: tuple[int, Iterable[tuple[int, bytes]]], planned: Plan, conversion: Conversion
) -> tuple[int, Shard]:
    shard, placed = group
    records = [record for _, record in sorted(placed)]
    name = conversion.format_shard_name(shard, planned.shards)
    if "://" not in conversion.output:
        os.makedirs(conversion.output, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        return shard, shards.write_shard(conversion, name, records, Path(scratch))


def _publish(
    _: None, made: list[tuple[int, Shard]], conversion: Conversion, reader: Reader
) -> None:
    publishing.publish(conversion, reader, [shard for _, shard in sorted(made, key=_select_number)])


def _select_number(pair: tuple[int, Shard]) -> int:
    return pair[0]
