"""Files of a checkpoint: parts of variables, read by range; and files that are not tftpu's."""

import json
from collections.abc import Iterator

import google_crc32c
import numpy as np
import pytest

from tests.support.models.leaves import leaf, leaves, step_of, value_of
from tftpu.checkpoint import manifest, matching
from tftpu.checkpoint.host_copy import HostCopy
from tftpu.checkpoint.manifest import Block, StoredFile
from tftpu.checkpoint.store import Checkpoints
from tftpu.engines.leaf import Leaf
from tftpu.errors import UserError
from tftpu.storage import files, regions
from tftpu.storage.own_files import OwnFile
from tftpu.storage.regions import Region
from tftpu.storage.safetensors import TensorFile

WHOLE = np.arange(24 * 6, dtype=np.float32).reshape(24, 6)


def rows(parts: int) -> list[Region]:
    """Returns the regions of WHOLE cut into equal parts along its rows."""
    size = len(WHOLE) // parts
    return [((i * size, (i + 1) * size), (0, 6)) for i in range(parts)]


def columns(parts: int) -> list[Region]:
    """Returns the regions of WHOLE cut into equal parts along its columns."""
    size = 6 // parts
    return [((0, 24), (i * size, (i + 1) * size)) for i in range(parts)]


class Cut:
    """A kernel of which one process holds some regions."""

    def __init__(self, held: list[Region], dtype: str = "float32"):
        self.values: dict[Region, np.ndarray] = {}

        def read(region: Region) -> np.ndarray:
            return WHOLE[regions.to_slices(region)]

        held = tuple(held)
        self.leaf = Leaf("kernel", (24, 6), dtype, held, held, read, self.values.update)

    @property
    def groups(self) -> dict[str, list[Leaf]]:
        return {"model": [self.leaf]}

    def check(self) -> None:
        assert set(self.values) == set(self.leaf.held)
        for region, found in self.values.items():
            expected = WHOLE[regions.to_slices(region)].astype(self.leaf.dtype)
            np.testing.assert_array_equal(found, expected)


def saved_by(folder, *processes: Cut) -> str:
    """Writes a checkpoint as several processes do: each its own file, then one manifest."""
    contents = {"state.json": lambda: [b"{}"]}
    for number, process in enumerate(processes):
        [copied] = HostCopy().take(process.groups).values()
        name = f"model-{number}.safetensors" if number else "model.safetensors"
        contents[name] = TensorFile(matching.group_by_name(copied)).iterate_blocks
    path = str(folder / "checkpoints" / "3")
    marker = OwnFile(str(folder), "checkpoints", "3", manifest.FILE)
    marker.see()
    manifest.remove_leftovers(path, marker)
    manifest.commit(3, manifest.write_files(path, contents), marker)
    return path


def restored(path: str, cut: Cut) -> None:
    matching.assign(matching.read(manifest.read(path), cut.groups, 3))
    cut.check()


@pytest.mark.parametrize("held", [rows(1), rows(4), rows(3), columns(2), rows(8)[2:4]])
def test_any_division_is_restored_from_any_other(held, tmp_path):
    path = saved_by(tmp_path, Cut(rows(4)[:2]), Cut(rows(4)[2:]))
    restored(path, Cut(held))
    restored(path, Cut(held, "float16"))


def test_one_process_saves_and_restores_parts(tmp_path):
    checkpoints = Checkpoints(str(tmp_path))
    checkpoints.save(1, Cut(columns(3)).groups, {})
    again = Cut(rows(2))
    assert checkpoints.restore(again.groups).step == 1
    again.check()


@pytest.fixture
def ranges(monkeypatch) -> Iterator[list[tuple[str, int]]]:
    """Yields the files and numbers of bytes that are read."""
    found: list[tuple[str, int]] = []
    read_range = files.read_range

    def read(path, first, count):
        found.append((path.rsplit("/", 1)[1], count))
        return read_range(path, first, count)

    monkeypatch.setattr(files, "read_range", read)
    yield found


def test_a_process_reads_only_what_its_devices_hold(ranges, tmp_path):
    path = saved_by(tmp_path, Cut(rows(4)[:2]), Cut(rows(4)[2:]))
    restored(path, Cut(rows(8)[2:3]))  # in the second part of the first file
    part = 4 * 6 * 6  # bytes
    headers, rest = ranges[:2], ranges[2:]
    assert [name for name, _ in headers] == ["model.safetensors", "model-1.safetensors"]
    assert rest == [("model.safetensors", part)]


def test_neighbouring_blocks_are_read_together(monkeypatch, ranges, tmp_path):
    path = saved_by(tmp_path, Cut(rows(6)))
    restored(path, Cut(rows(1)))
    part = 4 * 4 * 6
    assert [count for _, count in ranges[1:]] == [6 * part]
    ranges.clear()
    monkeypatch.setattr(manifest, "_AT_ONCE", 2 * part)
    restored(path, Cut(rows(1)))
    assert [count for _, count in ranges[1:]] == [2 * part] * 3


def test_damage_counts_where_it_is_read(tmp_path):
    path = saved_by(tmp_path, Cut(rows(4)))
    file = tmp_path / "checkpoints/3/model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1  # of the last part
    file.write_bytes(data)
    restored(path, Cut(rows(4)[:3]))
    with pytest.raises(ValueError, match=r"model.safetensors does not match its checksums"):
        restored(path, Cut(rows(4)[3:]))


def test_a_part_that_is_missing_or_there_twice_is_said(tmp_path):
    overlapping = [((0, 12), (0, 6)), ((6, 18), (0, 6))]  # as many elements, and a gap
    for wrong in (rows(4)[:3], [*rows(4)[1:], rows(2)[0]], overlapping):
        path = saved_by(tmp_path, Cut(wrong))
        with pytest.raises(
            UserError, match=r"step 3 was changed: .*each part of kernel exactly once"
        ):
            restored(path, Cut(rows(1)))


def test_nothing_is_assigned_if_one_file_is_damaged(tmp_path):
    checkpoints = Checkpoints(str(tmp_path))
    checkpoints.save(1, leaves(1), {})
    checkpoints.wait()
    (tmp_path / "checkpoints/1/step.safetensors").write_bytes(b"")
    target = leaves(0)
    with pytest.raises(UserError, match=r"No checkpoint .* is complete"):
        checkpoints.restore(target)
    assert value_of(target) == step_of(target) == 0


def test_checkpoints_of_an_earlier_version_are_not_called_damaged(tmp_path, caplog):
    checkpoints = Checkpoints(str(tmp_path))
    checkpoints.save(1, leaves(1), {})
    checkpoints.wait()
    old = {"step": 1, "files": {"state.json": {"bytes": 2, "crc32c": 3}}}
    (tmp_path / "checkpoints/1/manifest.json").write_text(json.dumps(old))
    with pytest.raises(UserError, match="An earlier version of tftpu wrote the checkpoints"):
        checkpoints.restore(leaves(0))
    assert not caplog.text


def header(**arrays: object) -> bytes:
    text = json.dumps(arrays).encode()
    return len(text).to_bytes(8, "little") + text


def described(shape: list[int], size: int) -> dict[str, object]:
    return {"dtype": "I8", "shape": shape, "data_offsets": [0, size]}


@pytest.mark.parametrize(
    "blocks",
    [
        [b""],
        [b"\xff" * 64],
        [header().replace(b"{}", b"[]")],
        [header(w=described([1], 1)), b"\x01"],  # a name without its number
        [header(**{"00000 w": described([2], 2)}), b"\x01"],  # another size in the manifest
        [header(**{"00000 w": described([1], 1)})],  # a block is missing
        [header(**{"00000 w [0:1] of [1, 2]": described([1], 1)}), b"\x01"],
        [header(**{"00000 w [1:3] of [2]": described([2], 2)}), b"\x01\x02"],
        [header(**{"00000 w [0:2] of [4]": described([1], 1)}), b"\x01"],
    ],
)
def test_a_file_of_another_format_is_one_clear_error(blocks, tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"".join(blocks))
    listed = [Block(len(block), google_crc32c.value(block)) for block in blocks]
    with pytest.raises(UserError, match=r"step 7 was not written by tftpu.* model.safetensors"):
        matching.read({"model.safetensors": StoredFile(str(path), listed)}, leaves(0), 7)


def test_empty_and_scalar_variables_are_parts_as_well(tmp_path):
    checkpoints = Checkpoints(str(tmp_path))
    checkpoints.save(1, {"model": [leaf("none", np.ones((0, 3))), leaf("one", np.array(2.0))]}, {})
    none, one = np.zeros((0, 3)), np.array(0.0)
    checkpoints.restore({"model": [leaf("none", none), leaf("one", one)]})
    assert one == 2.0
