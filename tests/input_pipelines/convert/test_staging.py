"""A conversion that is resumed trusts nothing that is not as it was written."""

import contextlib
import itertools

import pytest

from tests.support.data.conversions import content, of_text, silent
from tests.support.fakes.faulty_storage import KilledError, storage
from tftpu.errors import UserError
from tftpu.input_pipelines.convert import converter, publishing, shards, staging, verify
from tftpu.input_pipelines.convert.conversion import Conversion
from tftpu.storage import files

pytestmark = pytest.mark.usefixtures("small_parts")

STAGED = ".converting-train"


def interrupted(made: Conversion, before: tuple[object, str]) -> None:
    """Converts until a function is called."""

    class StopError(Exception):
        pass

    def stop(*_, **__):
        raise StopError

    with pytest.MonkeyPatch.context() as patch, pytest.raises(StopError):
        patch.setattr(*before, stop)
        converter.run(made, workers=1, say=silent)


def flipped(data: bytes, place: int) -> bytes:
    return data[:place] + bytes([data[place] ^ 4]) + data[place + 1 :]


DAMAGE = {
    "cut to nothing": lambda data: b"",
    "cut": lambda data: data[:-5],
    "a bit in the middle": lambda data: flipped(data, len(data) * 2 // 5),
    "a bit at the end": lambda data: flipped(data, len(data) - 2),
    "longer": lambda data: data + b"1",
    "zeros": lambda data: bytes(len(data)),
}


@pytest.mark.parametrize(
    ("name", "how"),
    [
        *(("part-0", how) for how in DAMAGE),
        *itertools.product(("part-0.npy", "part-0.json", "conversion"), ("cut", "zeros")),
        ("part-0.npy", "a bit at the end"),
        ("part-0.json", "a bit in the middle"),
    ],
)
def test_a_staged_file_that_was_damaged_is_made_again(texts, tmp_path, name, how):
    converter.run(of_text(texts, tmp_path / "whole"), workers=1, say=silent)
    made = of_text(texts, tmp_path / "out")
    interrupted(made, (shards.ShardWriter, "__call__"))
    path = tmp_path / "out" / STAGED / name
    path.write_bytes(DAMAGE[how](path.read_bytes()))
    converter.run(made, workers=1, say=silent)
    assert content(tmp_path / "out") == content(tmp_path / "whole")


@pytest.mark.parametrize("how", ["cut to nothing", "a bit in the middle"])
@pytest.mark.parametrize("place", ["shard", "note"])
def test_a_finished_shard_that_was_damaged_is_made_again(texts, tmp_path, place, how):
    converter.run(of_text(texts, tmp_path / "whole"), workers=1, say=silent)
    made = of_text(texts, tmp_path / "out")
    interrupted(made, (publishing, "publish"))
    name = "train-00001-of-00003.tfrecord"
    path = tmp_path / "out" / name
    if place == "note":
        path = tmp_path / "out" / STAGED / f"{name}.json"
    path.write_bytes(DAMAGE[how](path.read_bytes()))
    converter.run(made, workers=1, say=silent)
    assert content(tmp_path / "out") == content(tmp_path / "whole")
    assert verify.run(str(tmp_path / "out"), workers=1)[1] == []


def test_a_record_damaged_while_it_waits_is_not_signed_again(texts, tmp_path, monkeypatch):
    made = of_text(texts, tmp_path / "out")
    path = tmp_path / "out" / STAGED / "part-1"
    make = shards.ShardWriter.__call__

    def damaging(*arguments):
        path.write_bytes(flipped(path.read_bytes(), 100))
        return make(*arguments)

    with monkeypatch.context() as patch, pytest.raises(UserError, match="part-1 was damaged"):
        patch.setattr(shards.ShardWriter, "__call__", damaging)
        converter.run(made, workers=1, say=silent)
    converter.run(made, workers=1, say=silent)
    assert verify.run(str(tmp_path / "out"), workers=1)[1] == []


def test_the_order_of_a_source_without_one_is_made_of_whole_hashes(texts, tmp_path, monkeypatch):
    monkeypatch.setattr("tftpu.input_pipelines.convert.readers.text.TextReader.ordered", False)
    converter.run(of_text(texts, tmp_path / "whole"), workers=1, say=silent)
    made = of_text(texts, tmp_path / "out")
    interrupted(made, (staging.Staging, "save_order"))
    path = tmp_path / "out" / STAGED / "part-1.hashes.npy"
    path.write_bytes(flipped(path.read_bytes(), 140))
    converter.run(made, workers=1, say=silent)
    assert content(tmp_path / "out") == content(tmp_path / "whole")


def test_only_the_partial_files_of_the_split_itself_are_removed(texts, tmp_path):
    output = tmp_path / "out"
    output.mkdir()
    own = output / ".train-00000-of-00001.tfrecord.1.tmp"
    others = [
        output / f".{split}-00000-of-00001.tfrecord.1.tmp"
        for split in ("train-extra", "train-1", "train-1-of-2", "test")
    ]
    for path in (own, *others):
        path.write_bytes(b"")
    converter.run(of_text(texts, output), workers=1, say=silent)
    assert not own.exists() and all(path.exists() for path in others)


@pytest.mark.slow
@pytest.mark.parametrize(
    "how",
    [
        "EIO",
        "torn",
        *(pytest.param(how, marks=pytest.mark.slow) for how in ("ENOSPC", "EROFS", "kill")),
    ],
)
def test_the_nth_operation_of_a_conversion_fails_for_every_n(how, texts, memory):
    """Whatever failed, the same command then gives the same bytes."""
    converter.run(of_text(texts, memory / "whole"), workers=1, say=silent)
    whole = content(memory / "whole")
    for n in itertools.count(1):
        made = of_text(texts, memory / str(n))
        with storage(n, how) as faulty, contextlib.suppress(KilledError, OSError, UserError):
            converter.run(made, workers=1, say=silent)
        converter.run(made, workers=1, say=silent)
        assert content(memory / str(n)) == whole
        if not faulty.reached:
            break
        files.remove_tree(memory / str(n))
    assert n > 40
