"""The options of a conversion, and the values derived from them."""

import dataclasses
import hashlib
import json
import math
import re

from tftpu.errors import UserError
from tftpu.input_pipelines.convert.plan import Plan
from tftpu.input_pipelines.convert.readers.reader import Reader, ReadOptions
from tftpu.input_pipelines.formats import manifest
from tftpu.storage import buckets

MIB = 1 << 20
# Options that older versions of tftpu lack; the fingerprint leaves out those at their defaults.
_NEWER = ("num_classes", "image_feature", "label_feature", "first_class")


@dataclasses.dataclass(frozen=True)
class Conversion:
    """The source, the output and the options of a conversion.

    Args:
        source: address of the source, as `readers.addresses` reads it.
        output: a folder, local or `gs://`, which is empty or holds this data set.
        options: the options of the reader.
        seed: the seed of the shuffle.
        shard_mb: approximate size of a shard in MiB. The numbers of examples in two shards differ
            by at most one.
        min_shards: minimum number of shards; every host should have at least one.
        compression: "" or "GZIP".
    """

    source: str
    output: str
    options: ReadOptions = dataclasses.field(default_factory=ReadOptions)
    seed: int = 0
    shard_mb: float = 150
    min_shards: int = 1
    compression: str = ""

    def validate(self) -> None:
        """Raises `UserError` for a value that is not allowed."""
        if not (self.shard_mb > 0 and math.isfinite(self.shard_mb)):
            raise UserError(f"shard_mb is {self.shard_mb}: it must be a number above 0.")
        if not re.fullmatch(r"\w[\w.+-]*", self.split):
            raise UserError(
                f"The split {self.split!r} cannot name the shards' files: use letters, digits, "
                "'_', '-', '+' and '.', as in --split=train. To give it another name, write "
                "--split=NAME=SPLIT."
            )
        if self.min_shards < 1:
            raise UserError(f"min_shards is {self.min_shards}: it must be 1 or more.")
        if self.compression not in manifest.COMPRESSIONS:
            raise UserError(f"compression is {self.compression!r}: use GZIP, or leave it out.")

    @property
    def split(self) -> str:
        """The split's name in the output."""
        return self.options.output_split

    def compute_fingerprint(self, reader: Reader) -> str:
        """Returns a hash of the options and the source's state, equal only for equal output."""
        options = dataclasses.asdict(self.options)
        if self.options.tokenizer:
            options["tokenizer"] = buckets.describe_file(self.options.tokenizer).crc32c
        for name in _NEWER:  # conversions made before these options keep their hash
            if options[name] == getattr(ReadOptions, name):
                del options[name]
        made_of = {**dataclasses.asdict(self), "options": options, "output": ""}
        made_of["shard_mb"] = float(self.shard_mb)
        made_of["state"] = reader.state
        return hashlib.sha256(json.dumps(made_of, sort_keys=True).encode()).hexdigest()[:16]

    def plan_shards(self, counts: list[int], size: int) -> Plan:
        """Returns the `Plan`, which has the number of shards and the place of each record.

        Args:
            counts: the number of records in each part.
            size: the total size of the records, in bytes.

        Raises:
            UserError: there are fewer records than `min_shards`.
        """
        examples = sum(counts)
        if examples < self.min_shards:
            raise UserError(
                f"{self.source} has {examples:,} examples: too few for "
                f"min_shards={self.min_shards}."
            )
        shards = round(size / (self.shard_mb * MIB))
        shards = min(max(shards, self.min_shards, 1), examples)
        return Plan(tuple(counts), shards, self.seed)

    def format_shard_name(self, shard: int, shards: int) -> str:
        """Returns the file name of one of the split's shards."""
        return f"{self.split}-{shard:05d}-of-{shards:05d}.tfrecord"
