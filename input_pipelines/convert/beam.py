"""The conversion of `convert` as a job of Apache Beam: the same bytes, made by many machines.

    parts -> records -> (shard, place in it) -> a group for each shard -> sorted, written
          -> counts and bytes of each part -> the plan

The shuffle is Beam's own grouping, so nothing is staged and a runner needs no shared disk; a shard
is held in memory while it is written. The job itself publishes the manifest, last of all.
"""

import os
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from tftpu.errors import UserError
from tftpu.input_pipelines.convert import converter, parts
from tftpu.input_pipelines.convert.converter import Conversion
from tftpu.input_pipelines.convert.plan import Plan
from tftpu.input_pipelines.formats import tfrecord
from tftpu.input_pipelines.formats.manifest import Shard


def run(conversion: Conversion, arguments: list[str]) -> None:
    """Converts as a Beam job, and waits for its end.

    Args:
        conversion: what; the output is a folder that all workers reach.
        arguments: of Beam, as ["--runner=DataflowRunner", "--project=P", "--region=R"].

    Raises:
        UserError: a mistake, or Beam is not installed.
    """
    try:
        import apache_beam as beam
        from apache_beam.options.pipeline_options import PipelineOptions
    except ImportError as error:
        raise UserError(
            "Apache Beam is not installed: run `pip install 'tftpu[beam]'`, or leave --runner out."
        ) from error

    conversion.validate()
    source = parts.source(conversion.source, conversion.options)
    if not source.ordered:
        raise UserError(
            f"{conversion.source} has no order of its own, so it is converted on one machine: "
            "leave --runner out."
        )
    if converter.begun(conversion, source) is None:
        print(f"{conversion.output} holds all of it already.")
        return
    numbers = range(len(source.parts))
    # Beam would check the hints of our functions, and stumbles over protocols.
    options = PipelineOptions(arguments, pipeline_type_check=False)
    with beam.Pipeline(options=options) as job:
        records = (
            job
            | "Parts" >> beam.Create(list(numbers))
            | "Spread" >> beam.Reshuffle()
            | "Encode" >> beam.FlatMap(_records, source)
        )
        sizes = (
            records
            | "Size" >> beam.Map(lambda found: (found[0], (1, len(found[2]) + tfrecord.OVERHEAD)))
            | "Sizes" >> beam.CombinePerKey(_added)
        )
        planned = (
            job
            | "Once" >> beam.Create([None])
            | "Plan" >> beam.Map(_plan, beam.pvalue.AsDict(sizes), conversion, len(numbers))
        )
        shards = (
            records
            | "Place" >> beam.ParDo(_place(beam), beam.pvalue.AsSingleton(planned))
            | "Shards" >> beam.GroupByKey()
            | "Write" >> beam.Map(_write, beam.pvalue.AsSingleton(planned), conversion)
        )
        _ = (
            job
            | "Last" >> beam.Create([None])
            | "Publish" >> beam.Map(_publish, beam.pvalue.AsList(shards), conversion, source)
        )


def _records(part: int, source: parts.Source) -> Iterator[tuple[int, int, bytes]]:
    """(part, number in it, record)."""
    for number, record in enumerate(converter.encoded(source, part)):
        yield part, number, record


def _added(pairs: Iterable[tuple[int, int]]) -> tuple[int, int]:
    """Counts and bytes, added up."""
    count, size = 0, 0
    for one, other in pairs:
        count, size = count + one, size + other
    return count, size


def _plan(_, sizes: dict[int, tuple[int, int]], conversion: Conversion, count: int) -> Plan:
    counts = [sizes.get(part, (0, 0))[0] for part in range(count)]
    return converter.plan(conversion, counts, sum(size for _, size in sizes.values()))


def _place(beam):
    class Place(beam.DoFn):
        """(part, number, record) -> (shard, (place, record)); the places of a part are kept."""

        def setup(self):
            self._part = None

        def process(self, found, planned: Plan):
            part, number, record = found
            if part != self._part:
                self._part, (self._shards, self._places) = part, planned.places_of(part)
            yield int(self._shards[number]), (int(self._places[number]), record)

    return Place()


def _write(
    group: tuple[int, Iterable[tuple[int, bytes]]], planned: Plan, conversion: Conversion
) -> tuple[int, Shard]:
    shard, records = group
    records = [record for _, record in sorted(records)]
    name = converter.shard_name(conversion.split, shard, planned.shards)
    if "://" not in conversion.output:
        os.makedirs(conversion.output, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        return shard, converter.put(conversion, name, records, Path(scratch))


def _publish(_, shards: list[tuple[int, Shard]], conversion: Conversion, source) -> None:
    converter.publish(conversion, source, [shard for _, shard in sorted(shards, key=_first)])


def _first(pair: tuple) -> int:
    return pair[0]
