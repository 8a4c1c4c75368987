"""Predictions for data of any size, written to files atomically, with each record exactly once.

The records are divided into ranges that depend on neither the batch nor the devices. Each range is
written as one shard file, which is either complete or missing. An interrupted prediction therefore
continues with the missing or damaged shards, and several machines share the work by taking ranges
in turn. The manifest is written last, by the process that finds all shards.
"""

import collections
import concurrent.futures
import contextlib
import dataclasses
import json
import logging
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import keras
import numpy as np

from tftpu.engines.data.outputs import join_outputs
from tftpu.errors import UserError, counted
from tftpu.inference.prediction import plans, sums
from tftpu.inference.prediction.outputs import Columns, check_kept
from tftpu.inference.prediction.plans import MANIFEST, PLAN, SHARD
from tftpu.inference.prediction.sums import Sums
from tftpu.storage import files, locks
from tftpu.tensors import Nest

_log = logging.getLogger(__name__)

RECORDS_PER_SHARD = 4096
_OWN = ("file", "record", "error")  # columns of all predictions; `encode` adds "error"
_NAMED = 20  # most damaged files that a message names
# How a format holds values that are not finite, for messages; other formats keep NaN and infinity.
_NOT_FINITE = {"jsonl": "null", "csv": "empty cells, or as null in lists"}
_WAITING = 2  # shards in memory that may wait to be written


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
        """The reasons why records could not be used, by record number."""
        ...

    def features(self, ranges: Sequence[range], /) -> Any:
        """Returns a data set of full batches of features; the last batch of a range is padded."""
        ...

    def places(self, numbers: range, /) -> tuple[list[str], list[int]]:
        """Returns, for each record of a range, its file, and its number in the file.

        The list of numbers is empty if each file is one record.
        """
        ...

    def read_fields(self, numbers: range, names: Sequence[str]) -> Mapping[str, Any]:
        """Returns fields of a range of records by name. Raises `UserError` for an unknown one."""
        ...


@dataclasses.dataclass(frozen=True)
class Job:
    """Predictions to make: what is predicted, and where the predictions are written.

    Args:
        output: the folder of the shards, local or `gs://`.
        format: the file name extension of the shards, such as "jsonl".
        encode: a function that returns the content of a shard, given its columns and, by row
            number, the reasons why rows have no values.
        columns: a function that maps a model's outputs to columns.
        plan: JSON values that say what is predicted; a folder holds the predictions of one plan.
        keep: the fields of the input to write beside the predictions.
        records_per_shard: the number of records in a range.
        machine: the number of this machine, from 1, and the number of all machines.
    """

    output: str
    format: str
    encode: Callable[[Columns, Mapping[int, str]], bytes]
    columns: Callable[[Nest], Columns]
    plan: Mapping[str, Any]
    keep: Sequence[str] = ()
    records_per_shard: int = RECORDS_PER_SHARD
    machine: tuple[int, int] = (1, 1)


@dataclasses.dataclass(frozen=True)
class _Shard:
    """A range of records, and the name of the file with its predictions."""

    name: str
    numbers: range


def predict(
    trainer: Predictor,
    records: Records,
    job: Job,
    report: Callable[[int, int], None] = lambda done, all_records: None,
) -> bool:
    """Writes the missing predictions of this machine's records.

    Args:
        trainer: the trainer with the weights to predict with.
        records: the records to predict.
        job: what is predicted, and where it is written.
        report: a function that is called with the number of records that this machine has
            predicted, and the number that it must predict in all.

    Returns:
        Whether the predictions of all machines are complete.

    Raises:
        UserError: the folder holds other predictions, another process writes the same ones, a
            record cannot be used, or a kept field is unknown or has the name of a column.
        OSError: a shard cannot be written.
    """
    records.read_fields(range(0), job.keep)  # raises early if a field is unknown
    check_kept(job.keep, _OWN)
    shards = _list_shards(records.count, job)
    mine = shards[job.machine[0] - 1 :: job.machine[1]]
    plan = _describe_plan(job, records)
    with locks.locked(_resolve_locked_folder(job)), contextlib.ExitStack() as stack:
        known = _read_known_sums(job, plan)
        _check_plan(job, plan, known)
        names = [shard.name for shard in mine]
        _remove_unfinished(job, [known.name, *names])
        known.start(names)
        stack.callback(known.close)
        missing = _find_missing(job, mine, known)
        done, all_mine = (sum(len(s.numbers) for s in part) for part in (missing, mine))
        done = all_mine - done
        wrong: list[int] = []
        report(done, all_mine)
        written = stack.enter_context(
            contextlib.closing(_write_shards(trainer, records, job, missing, known))
        )
        for shard, not_finite in written:
            done += len(shard.numbers)
            wrong += not_finite
            report(done, all_mine)
        if wrong:
            [file], numbers = records.places(range(wrong[0], wrong[0] + 1))
            _log.warning(
                "%s that %s written now %s outputs that are not finite (NaN or infinity), first "
                "%s%s; the files hold them as %s.",
                counted(len(wrong), "record"),
                *(("was", "has") if len(wrong) == 1 else ("were", "have")),
                *("".join(f"record {number} of " for number in numbers), file),
                _NOT_FINITE.get(job.format, "NaN or infinity"),
            )
        known.close()
        return _write_manifest_if_complete(job, plan, shards, known)


def verify(output: str) -> list[str]:
    """Compares the files of complete predictions with their manifest; returns a text per fault.

    Raises:
        UserError: the predictions are not complete, or were written without checksums.
    """
    path = files.join(output, MANIFEST)
    if not files.exists(path):
        raise UserError(f"{output} has no {MANIFEST}: these predictions are not complete.")
    manifest, listed = sums.read_manifest(path)
    if manifest is None:
        return [f"{MANIFEST} is not what was written"]
    if not listed and manifest["shards"]:
        raise UserError(
            f"{path} has no checksums, because an earlier version of tftpu wrote it. The same "
            "command without --verify adds the checksums of the present files."
        )
    there = sums.read_stored_sums(output, [*listed, PLAN])
    plan = {name: value for name, value in manifest.items() if name not in ("shards", "crc32c")}
    expected = {PLAN: sums.sum_of(sums.seal(plan)), **listed}
    problems = []
    for name, wanted in expected.items():
        found = there.get(name)
        if found is None:
            problems.append(f"{name} is missing")
        elif found.bytes != wanted.bytes:
            problems.append(f"{name} has {found.bytes:,} bytes, but {wanted.bytes:,} were written")
        elif found != wanted:
            problems.append(f"{name} is not what was written (CRC32C)")
    return problems


def _list_shards(count: int, job: Job) -> list[_Shard]:
    firsts = range(0, count, job.records_per_shard)
    return [
        _Shard(
            f"{SHARD}{number:05d}-of-{len(firsts):05d}.{job.format}",
            range(first, min(first + job.records_per_shard, count)),
        )
        for number, first in enumerate(firsts)
    ]


def _resolve_locked_folder(job: Job) -> str:
    """Returns the folder that this process locks while it writes."""
    machine, machines = job.machine
    return job.output if machines == 1 else f"{job.output}/.machine-{machine}-of-{machines}"


def _describe_plan(job: Job, records: Records) -> dict[str, Any]:
    """Returns the settings that determine the output files."""
    return {
        **job.plan,
        "records": records.count,
        "keep": list(job.keep),
        "format": job.format,
        "records_per_shard": job.records_per_shard,
        "machines": job.machine[1],
    }


def _read_known_sums(job: Job, plan: Mapping[str, Any]) -> Sums:
    """Returns the checksums of the shards that all machines have written so far."""
    manifest, listed = sums.read_manifest(files.join(job.output, MANIFEST))
    same = manifest is not None and all(manifest.get(name) == plan[name] for name in plan)
    return Sums(job.output, plan, listed if same else {}, job.machine)


def _check_plan(job: Job, plan: Mapping[str, Any], known: Sums) -> None:
    """Writes the plan into the folder, or compares it with the plan there.

    Raises:
        UserError: the folder holds other predictions, or a plan that cannot be read.
    """
    path = files.join(job.output, PLAN)
    if not files.exists(path):
        files.write_whole(path, sums.seal(plan))
    # Read again, because another machine may have written its plan at the same time.
    content = files.read(path)
    if content == sums.seal(plan):
        return
    if known.of_plan:
        _log.warning("%s is damaged and is written again.", path)
        files.write_whole(path, sums.seal(plan))
        return
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise UserError(f"{path} is damaged: choose another output folder.")
    found.pop("crc32c", None)
    different = [name for name in {**plan, **found} if plan.get(name) != found.get(name)]
    # An equal plan without a checksum, as earlier versions wrote it, is replaced. So is a different
    # one if no shard is written, unless other machines, which have separate locks, may use it.
    alone = plan["machines"] == found.get("machines") == 1
    if not different or (alone and not plans.has_predictions(job.output)):
        files.write_whole(path, sums.seal(plan))
        return
    raise UserError(plans.describe_difference(job.output, plan, found, different))


def _find_missing(job: Job, mine: Sequence[_Shard], known: Sums) -> list[_Shard]:
    """Returns the shards of this machine that are missing or damaged."""
    there = sums.read_stored_sums(job.output, [shard.name for shard in mine])
    if there and not known.begun:
        _log.warning(
            "%s has %d files that an earlier version of tftpu wrote without checksums: they are "
            "used without a check.",
            *(job.output, len(there)),
        )
        for name, found in there.items():
            known.add(name, found)
    wrong = {name for name, found in there.items() if known.known.get(name) != found}
    damaged = sorted(wrong & set(known.known))
    if damaged:
        _log.warning(
            "%s has damaged files, which are written again: %s%s.",
            *(job.output, ", ".join(damaged[:_NAMED])),
            ", …" if len(damaged) > _NAMED else "",
        )
    return [shard for shard in mine if shard.name not in there or shard.name in wrong]


def _remove_unfinished(job: Job, mine: Sequence[str]) -> None:
    """Removes the unfinished files that a killed process of this machine has left."""
    if files.is_remote(job.output):
        return  # an object in a bucket appears only when it is complete
    own = [*mine, *((PLAN, MANIFEST) if job.machine[1] == 1 else ())]
    begins = tuple(f".{name}." for name in own)
    for name in files.list_names(job.output):
        if name.startswith(begins) and name.endswith(".tmp"):
            files.remove(files.join(job.output, name))


def _write_shards(
    trainer: Predictor, records: Records, job: Job, missing: Sequence[_Shard], known: Sums
) -> Generator[tuple[_Shard, list[int]]]:
    """Yields the results of `_write`, which runs while the devices compute the next shards."""
    if not missing:
        return
    waiting: collections.deque[Any] = collections.deque()
    pool = concurrent.futures.ThreadPoolExecutor(1, "predictions")
    try:
        for shard, outputs in _compute_shards(trainer, records, missing):
            waiting.append(pool.submit(_write, records, job, known, shard, outputs))
            while len(waiting) > _WAITING:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def _compute_shards(
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
        yield (
            shard,
            keras.tree.map_structure(lambda array, size=size: array[:size], join_outputs(parts)),
        )


def _write(
    records: Records, job: Job, known: Sums, shard: _Shard, outputs: Nest
) -> tuple[_Shard, list[int]]:
    """Writes a shard; returns it, and the record numbers of outputs that are not finite."""
    places, numbers = records.places(shard.numbers)
    columns = {"file": places, **({"record": numbers} if numbers else {})}
    predicted = job.columns(outputs)
    kept = records.read_fields(shard.numbers, job.keep)
    check_kept(kept, (*_OWN, *predicted))
    skipped = records.skipped
    errors = {n: skipped[number] for n, number in enumerate(shard.numbers) if number in skipped}
    content = job.encode({**columns, **kept, **predicted}, errors)
    locks.check_lock(_resolve_locked_folder(job))
    files.write_whole(files.join(job.output, shard.name), content)
    known.add(shard.name, sums.sum_of(content))
    wrong = _find_not_finite(predicted.values(), errors)
    return shard, [shard.numbers[place] for place in wrong]


def _find_not_finite(columns: Iterable[Any], skipped: Collection[int]) -> list[int]:
    """Returns the rows, except for skipped ones, with a value that is not finite."""
    # bfloat16 has the kind "V".
    numbers = [c for c in columns if isinstance(c, np.ndarray) and c.dtype.kind in "fV"]
    wrong = [~np.isfinite(c).all(axis=tuple(range(1, c.ndim))) for c in numbers]
    found = set(np.flatnonzero(np.any(wrong, axis=0))) if wrong else set()
    return sorted(int(place) for place in found - set(skipped))


def _write_manifest_if_complete(
    job: Job, plan: Mapping[str, Any], shards: Sequence[_Shard], known: Sums
) -> bool:
    """Writes the manifest if all shards exist; returns whether they do."""
    known.read()  # other machines may have written sums meanwhile
    there = set(files.list_names(job.output)) & set(known.known)
    if not all(shard.name in there for shard in shards):
        return False
    listed = [
        {
            "name": shard.name,
            "first": shard.numbers.start,
            "records": len(shard.numbers),
            **known.known[shard.name]._asdict(),
        }
        for shard in shards
    ]
    files.write_whole(files.join(job.output, MANIFEST), sums.seal({**plan, "shards": listed}))
    return True
