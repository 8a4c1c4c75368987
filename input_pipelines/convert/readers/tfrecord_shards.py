"""Data sets of TFRecord shards, to be split or shuffled again."""

import itertools
from collections.abc import Iterator

from tftpu.input_pipelines.convert.readers.reader import (
    Example,
    OrderedReader,
    Part,
    ReadOptions,
    chosen,
)
from tftpu.input_pipelines.formats import manifest, tfrecord

_BATCH = 256  # records parsed at a time


class ShardReader(OrderedReader):
    """The shards of a split.

    Args:
        folder: of the data set.
        options: split, features.
    """

    def __init__(self, folder: str, options: ReadOptions):
        found = manifest.read(folder)
        self._all, self._compression = found.features, found.compression
        super().__init__(
            chosen(found.features, options.features),
            [[found.path(s), s.examples, s.crc32c] for s in found.shards(options.source_split)],
            {key: value for key, value in found.about.items() if key != "conversions"},
        )

    def examples(self, part: Part) -> Iterator[Example]:
        import tensorflow as tf

        from tftpu.input_pipelines.formats import example_proto

        parse = example_proto.parser(self._all)
        path, _, _ = part
        records_of_file = enumerate(tfrecord.records(path, self._compression))
        while batch := list(itertools.islice(records_of_file, _BATCH)):
            names = tf.constant([f"record {number} of {path}" for number, _ in batch])
            examples = parse(tf.constant([record for _, (_, record) in batch]), names)
            columns = [examples[name].numpy() for name in self.features]
            for values in zip(*columns):
                yield dict(zip(self.features, values))
