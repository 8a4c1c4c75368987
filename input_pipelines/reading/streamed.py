"""The options of data sets that are read while training. Imports no TensorFlow."""

import dataclasses
import re

from tftpu.config import OPERATIONAL, DataConfig
from tftpu.errors import UserError, did_you_mean

ON_BAD_RECORD = ("raise", "skip")


@dataclasses.dataclass
class Streamed(DataConfig):
    """The options common to all data sets that are read while training; see `pipeline`."""

    shuffle: int = 16_384  # examples shuffled in memory at a time; file lists are fully shuffled
    # raise: a record that cannot be used stops the run; skip: it gets weight 0
    on_bad_record: str = dataclasses.field(default="raise", metadata=OPERATIONAL)
    # the most records to skip; the next bad record stops the run
    max_bad_records: int = dataclasses.field(default=100, metadata=OPERATIONAL)
    # addresses HOST:PORT,... of machines that prepare the data; see service.py
    service: str = dataclasses.field(default="", metadata=OPERATIONAL)
    # a local folder that keeps copies of a bucket's shards after their first use
    cache_dir: str = dataclasses.field(default="", metadata=OPERATIONAL)
    # size limit of `cache_dir`, in GiB
    cache_gb: float = dataclasses.field(default=100.0, metadata=OPERATIONAL)

    def validate(self) -> None:
        super().validate()
        for field in ("shuffle", "max_bad_records"):
            if getattr(self, field) < 1:
                raise UserError(f"data.{field} is {getattr(self, field)}: it must be 1 or more.")
        check_one_of("data.on_bad_record", self.on_bad_record, ON_BAD_RECORD)
        if self.cache_gb <= 0:
            raise UserError(f"data.cache_gb is {self.cache_gb}: it must be above 0.")
        if self.cache_dir and self.service:
            raise UserError(
                "data.cache_dir is a folder on the machine that trains, but with data.service "
                "other machines read the data: use only one of the two."
            )
        if self.service and not all(
            re.fullmatch(r"[^/,\s]+:\d{1,5}", address) for address in self.services
        ):
            raise UserError(
                f"data.service is {self.service!r}: give addresses as HOST:PORT, separated by "
                "commas."
            )
        if self.service and self.on_bad_record == "skip":
            raise UserError(
                "data.on_bad_record=skip counts bad records in the process that trains, but "
                "data.service prepares the data in other processes: use only one of the two."
            )

    @property
    def weighted(self) -> bool:
        return self.on_bad_record == "skip"

    @property
    def services(self) -> list[str]:
        """The addresses in `service`."""
        return self.service.split(",") if self.service else []


def check_one_of(field: str, value: str, allowed: tuple[str, ...]) -> None:
    """Raises `UserError` if the value of a field is not one of the allowed ones."""
    if value not in allowed:
        raise UserError(f"{field} is {value!r}, which is unknown.{did_you_mean(value, allowed)}")
