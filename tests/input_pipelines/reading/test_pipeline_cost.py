"""The cost of reading: linear in the shards, constant per epoch, nothing for earlier steps."""

import ctypes
import os
import struct
import sys
from pathlib import Path

import pytest

from tests.support import warm
from tests.support.data import data_sets
from tftpu.input_pipelines.formats import tfrecord
from tftpu.input_pipelines.formats.manifest import INDEX_EVERY
from tftpu.input_pipelines.reading.shards import Piece, Shards

# Counts the bytes that a process reads, by the kernel's own numbers.
PROGRAM = """
import os, sys
os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
import numpy as np
from tftpu.input_pipelines.formats import manifest
from tftpu.input_pipelines.reading import shards

def read_so_far():
    return int(open("/proc/self/io").read().split("rchar: ")[1].split()[0])

folder, batch, skipped, steps, turns = sys.argv[1], *map(int, sys.argv[2:])
source = shards.from_manifest(manifest.read(folder), "train", shuffle=64)
batches = iter(source.draw_records(batch, 0, skipped))
for turn in range(turns):
    before = read_so_far()
    for _ in range(steps):
        next(batches)
    resident = int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    print(read_so_far() - before, resident)
del batches  # Python's end stops threads that call it, and the iterator waits for those that have
"""
RECORD = 2000
FEATURES = {"x": data_sets.Feature("string")}


def made(folder: Path, shards: int, records: int) -> Path:
    folder.mkdir()
    example = {"x": b"x" * RECORD}
    data_sets.shards(folder, FEATURES, {"train": [[example] * records] * shards})
    return folder


def costs(folder: Path, batch: int, skipped: int, steps: int, turns: int) -> list[list[int]]:
    """Returns the bytes read and the bytes resident of each turn of `steps` steps."""
    numbers = map(str, (batch, skipped, steps, turns))
    done = warm.run(
        [sys.executable, "-c", PROGRAM, str(folder), *numbers],
        capture_output=True,
        text=True,
        check=True,
    )
    return [[int(word) for word in line.split()] for line in done.stdout.splitlines()]


@pytest.mark.slow
def test_each_of_five_epochs_reads_the_data_once_in_constant_memory(tmp_path):
    folder = made(tmp_path / "data", shards=40, records=100)
    size = sum(path.stat().st_size for path in folder.iterdir())
    turns = costs(folder, batch=40, skipped=0, steps=100, turns=6)
    read, resident = zip(*turns)
    # Some records are read ahead in an earlier epoch, and two tracks read the shard at a border.
    assert 5.5 * size < sum(read) < 9 * size
    assert resident[-1] - resident[1] < 30 << 20  # the first fills the windows


@pytest.mark.slow
def test_resuming_reads_no_earlier_shard(tmp_path):
    folder = made(tmp_path / "data", shards=4, records=20 * INDEX_EVERY)
    size = sum(path.stat().st_size for path in folder.iterdir())
    epoch = 4 * 20 * INDEX_EVERY // 8
    ((read, _),) = costs(folder, batch=8, skipped=epoch * 9 // 10, steps=1, turns=1)
    # One index entry and some blocks of each of four tracks; not nine tenths of the epoch.
    assert read < size / 4


class Opened:
    """A counter of opened files in a folder, by the kernel (inotify)."""

    def __init__(self, folder: Path):
        libc = ctypes.CDLL(None)
        self._events = libc.inotify_init1(os.O_NONBLOCK)
        assert libc.inotify_add_watch(self._events, str(folder).encode(), 0x20) > 0  # IN_OPEN

    def count(self) -> int:
        """Returns the number of files opened since the last call."""
        found = 0
        while True:
            try:
                data = os.read(self._events, 1 << 16)
            except BlockingIOError:
                return found
            while data:
                data = data[16 + struct.unpack_from("iIII", data)[3] :]
                found += 1


@pytest.mark.slow
@pytest.mark.parametrize("shards", [10, 100, pytest.param(1000, marks=pytest.mark.slow)])
def test_files_opened_grow_with_the_shards_and_not_with_the_epoch(tmp_path, shards):
    number, pieces = 0, []
    for shard in range(shards):
        written = tfrecord.write(str(tmp_path / str(shard)), [b"x"] * 8)
        pieces.append(Piece(str(tmp_path / str(shard)), 8, 0, written.offsets, written.bytes))
        number += 8
    source = Shards(pieces, shuffle=64)
    tracks = source.plan_tracks(40).number
    opened = Opened(tmp_path)
    batches = iter(source.draw_records(40, 0, 0))
    for _ in range(4):
        for _ in range(number // 40):
            next(batches)
        # A shard is opened once to see that it can be, once to compare the lengths of its records
        # with its size, both of which may be counted as one with the next, and once to read it. Two
        # tracks open the one at their border; each reads ahead a bit.
        assert shards - 3 * tracks <= opened.count() <= 3 * shards + 6 * tracks
