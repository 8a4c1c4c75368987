"""Predictions for data of any size, in files that are written whole, each record exactly once.

The records are cut into ranges that depend on neither the batch nor the devices. A range is one
shard: it is there, complete, or it is not. So a prediction that was ended at any moment continues
with the ranges that are missing, and several machines share the work by taking ranges in turn.
The manifest is written last, by whoever finds all shards there.
"""

import collections
import concurrent.futures
import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import keras

from tftpu.engines.outputs import joined
from tftpu.errors import UserError
from tftpu.inference.prediction.outputs import Columns
from tftpu.storage import claims, files
from tftpu.tensors import Nest

MANIFEST, PLAN = "manifest.json", "plan.json"
RECORDS_PER_SHARD = 4096
_WAITING = 2  # shards that may wait to be written, each in memory


class Predictor(Protocol):
    """A model with its weights, such as a `tftpu.Trainer`."""

    def predict_batches(self, x: Any) -> Iterator[Nest]:
        """Yields the outputs for each batch of a data set of features."""
        ...


class Records(Protocol):
    """Records to predict, in an order that is the same at every call."""

    @property
    def count(self) -> int:
        """The number of records."""
        ...

    @property
    def skipped(self) -> Mapping[int, str]:
        """The reasons why records could not be used, by number."""
        ...

    def features(self, ranges: Sequence[range], /) -> Any:
        """Returns a data set of complete batches of features; each range ends filled up."""
        ...

    def places(self, numbers: range, /) -> tuple[list[str], list[int]]:
        """Returns the files of a range of records, and their numbers in these."""
        ...

    def kept(self, numbers: range, names: Sequence[str]) -> Mapping[str, Any]:
        """Returns fields of a range of records by name. Raises `UserError` for an unknown one."""
        ...


@dataclasses.dataclass(frozen=True)
class Job:
    """Predictions to be made: of what, and where they are written.

    Args:
        output: folder of the shards, local or `gs://`.
        format: ending of the shards' names, such as "jsonl".
        encode: returns the content of a shard, of its columns and of the reasons why rows have no
            values, by their place.
        columns: returns the columns of a model's outputs.
        plan: JSON values that say what is predicted; a folder holds the predictions of one plan.
        keep: fields of the input to write beside the predictions.
        records_per_shard: the length of a range.
        share: number of this machine, from 1, and of all machines.
    """

    output: str
    format: str
    encode: Callable[[Columns, Mapping[int, str]], bytes]
    columns: Callable[[Nest], Columns]
    plan: Mapping[str, Any]
    keep: Sequence[str] = ()
    records_per_shard: int = RECORDS_PER_SHARD
    share: tuple[int, int] = (1, 1)


@dataclasses.dataclass(frozen=True)
class _Shard:
    """A range of records, and the name of the file that its predictions are in."""

    name: str
    numbers: range


def predict(
    trainer: Predictor,
    records: Records,
    job: Job,
    report: Callable[[int, int], None] = lambda done, all_records: None,
) -> bool:
    """Writes the predictions of all records, or of a machine's share, that are not there yet.

    Args:
        trainer: with the weights to predict with.
        records: to predict.
        job: what is predicted, and where it is written.
        report: called with the records that this machine has predicted, and is to predict.

    Returns:
        Whether the predictions of all machines are complete.

    Raises:
        UserError: the folder holds other predictions, or another process writes the same ones, or
            a record cannot be used.
        OSError: a shard cannot be written.
    """
    records.kept(range(0), job.keep)  # an unknown field is refused before anything is computed
    shards = _shards(records.count, job)
    mine = shards[job.share[0] - 1 :: job.share[1]]
    with claims.claim(_claimed(job)):
        _check_plan(job, records)
        _remove_unfinished(job, mine)
        there = set(files.names_in(job.output))
        missing = [shard for shard in mine if shard.name not in there]
        done, all_mine = (sum(len(s.numbers) for s in part) for part in (missing, mine))
        done = all_mine - done
        report(done, all_mine)
        for shard in _written(trainer, records, job, missing):
            done += len(shard.numbers)
            report(done, all_mine)
        return _completed(job, shards)


def _shards(count: int, job: Job) -> list[_Shard]:
    firsts = range(0, count, job.records_per_shard)
    return [
        _Shard(
            f"predictions-{number:05d}-of-{len(firsts):05d}.{job.format}",
            range(first, min(first + job.records_per_shard, count)),
        )
        for number, first in enumerate(firsts)
    ]


def _claimed(job: Job) -> str:
    """Returns the folder that this process holds while it writes."""
    machine, machines = job.share
    return job.output if machines == 1 else f"{job.output}/.share-{machine}-of-{machines}"


def _check_plan(job: Job, records: Records) -> None:
    """Writes what the folder holds, or compares it.

    Raises:
        UserError: the folder holds predictions of something else.
    """
    path = files.join(job.output, PLAN)
    plan = {
        **job.plan,
        "records": records.count,
        "keep": list(job.keep),
        "format": job.format,
        "records_per_shard": job.records_per_shard,
        "machines": job.share[1],
    }
    if not files.exists(path):
        files.write_whole(path, json.dumps(plan, indent=1).encode())
    # Read again what was written: another machine may have begun at the same time.
    try:
        found = json.loads(files.read(path))
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise UserError(f"{path} is damaged: choose another output folder.")
    for name in {**plan, **found}:
        if plan.get(name) != found.get(name):
            raise UserError(
                f"{job.output} holds predictions with {name} = {found.get(name)!r}, and these "
                f"have {plan.get(name)!r}: choose another output folder, or remove that one."
            )


def _remove_unfinished(job: Job, mine: Sequence[_Shard]) -> None:
    """Removes what a process left that was killed while it wrote; nobody else writes these."""
    if files.is_remote(job.output):
        return  # where an object appears when it is complete
    own = [shard.name for shard in mine] + ([PLAN, MANIFEST] if job.share[1] == 1 else [])
    begins = tuple(f".{name}." for name in own)
    for name in files.names_in(job.output):
        if name.startswith(begins) and name.endswith(".tmp"):
            files.remove(files.join(job.output, name))


def _written(
    trainer: Predictor, records: Records, job: Job, missing: Sequence[_Shard]
) -> Iterator[_Shard]:
    """Yields each shard once it is written, which another thread does while the devices compute."""
    if not missing:
        return
    waiting: collections.deque[Any] = collections.deque()
    pool = concurrent.futures.ThreadPoolExecutor(1, "predictions")
    try:
        for shard, outputs in _computed(trainer, records, missing):
            waiting.append(pool.submit(_write, records, job, shard, outputs))
            while len(waiting) > _WAITING:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def _computed(
    trainer: Predictor, records: Records, shards: Sequence[_Shard]
) -> Iterator[tuple[_Shard, Nest]]:
    """Yields the outputs for the records of each shard."""
    batches = trainer.predict_batches(records.features([shard.numbers for shard in shards]))
    for shard in shards:
        count, parts = 0, []
        while count < len(shard.numbers):
            found = next(batches, None)
            if found is None:
                raise UserError(
                    f"The input ended before record {shard.numbers.start + count:,} of "
                    f"{records.count:,}: has it changed?"
                )
            parts.append(found)
            count += len(keras.tree.flatten(parts[-1])[0])
        size = len(shard.numbers)
        yield shard, keras.tree.map_structure(lambda array, size=size: array[:size], joined(parts))


def _write(records: Records, job: Job, shard: _Shard, outputs: Nest) -> _Shard:
    places, numbers = records.places(shard.numbers)
    columns = {"file": places, "record": numbers}
    found = {**records.kept(shard.numbers, job.keep), **job.columns(outputs)}
    for name in found:
        if name in columns:
            raise UserError(f"The input's field {name!r} has the name of a column: do not keep it.")
    skipped = records.skipped
    errors = {n: skipped[number] for n, number in enumerate(shard.numbers) if number in skipped}
    claims.check(_claimed(job))
    files.write_whole(files.join(job.output, shard.name), job.encode({**columns, **found}, errors))
    return shard


def _completed(job: Job, shards: Sequence[_Shard]) -> bool:
    """Returns whether all shards are there, after writing the manifest if they are."""
    there = set(files.names_in(job.output))
    if not all(shard.name in there for shard in shards):
        return False
    manifest = {
        **json.loads(files.read(files.join(job.output, PLAN))),
        "shards": [
            {"name": s.name, "first": s.numbers.start, "records": len(s.numbers)} for s in shards
        ],
    }
    files.write_whole(files.join(job.output, MANIFEST), json.dumps(manifest, indent=1).encode())
    return True
