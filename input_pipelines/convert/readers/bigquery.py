"""BigQuery tables and queries."""

from collections.abc import Iterator
from typing import Any

from tftpu.input_pipelines.convert.readers.reader import Example, Part, ReadOptions


class BigQueryReader:
    """Reader of the rows of a table or query, which BigQuery divides into arbitrary streams.

    Args:
        what: `project.dataset.table`, or a query.
        options: `features` and `snapshot` are used.
    """

    ordered = False  # BigQuery divides a table differently each time

    def __init__(self, what: str, options: ReadOptions):
        from tftpu.input_pipelines.datasets.bigquery import Table

        self._table = Table(what, options.features, options.snapshot)
        self.features = self._table.features
        self.parts: list[Part] = self._table.parts
        self.state: Part = self._table.state
        self.about: dict[str, Any] = {}
        self.notes: list[str] = []

    def read_examples(self, part: Part) -> Iterator[Example]:
        return self._table.read_examples(part)
