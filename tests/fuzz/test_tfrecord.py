"""Any file is read as TFRecord shards or refused: by Python's reader, and by TensorFlow's."""

import dataclasses
import gzip
import os

from hypothesis import strategies as st

from tests.support.hostile.files import masked, stated_length
from tests.support.hostile.fuzzing import damaged, fuzzed, only_user_errors
from tftpu.input_pipelines.formats import tfrecord
from tftpu.input_pipelines.reading import counted
from tftpu.input_pipelines.reading.shards import Piece, Shards

WHOLE = b"".join(tfrecord.frame_record(bytes([n]) * 9 * n) for n in range(6))
COUNT = 6


@st.composite
def records(draw) -> bytes:
    """Draws records, some with another length than they state, all with valid checksums."""
    content = b""
    for data in draw(st.lists(st.binary(max_size=32), min_size=1, max_size=6)):
        odd = st.sampled_from((0, 1, 2**16, 2**31, 2**36, 2**60, 2**63, 2**64 - 16, 2**64 - 1))
        length = draw(st.just(len(data)) | odd)
        content += stated_length(length) + data + masked(data)
    return content


@fuzzed(80, content=damaged(WHOLE) | records() | st.binary(max_size=64))
def test_any_file(tmp_path, content):
    path = tmp_path / "f"
    path.write_bytes(content)
    with only_user_errors():
        found = tfrecord.scan_shard(str(path))
        assert found.bytes == len(content)
    assert 0 <= tfrecord.count_readable(str(path), 0, COUNT) <= COUNT


@fuzzed(60, content=(damaged(WHOLE) | records()).map(gzip.compress) | damaged(gzip.compress(WHOLE)))
def test_any_compressed_file(tmp_path, content):
    path = tmp_path / "f"
    path.write_bytes(content)
    with only_user_errors():
        tfrecord.scan_shard(str(path), "GZIP")


@fuzzed(4, content=damaged(WHOLE) | records(), compressed=st.booleans())
def test_what_training_reads(tmp_path, content, compressed):
    """TensorFlow gives what Python's reader gives before the first damage, and "" for the rest."""
    path = tmp_path / "f"
    path.write_bytes(gzip.compress(content) if compressed else content)
    compression = "GZIP" if compressed else ""
    expected = []
    with only_user_errors():
        for _, record in tfrecord.read_records(str(path), compression):
            expected.append(record)
    piece = Piece(str(path), COUNT, bytes=os.path.getsize(path))
    source = Shards([piece, dataclasses.replace(piece)], compression, shuffle=1)
    found = [record.numpy() for record, _ in source.iterate_once()]
    assert len(found) == 2 * COUNT
    assert found[:COUNT] == [*expected[:COUNT], *[b""] * (COUNT - len(expected))]


def test_a_damaged_note_of_what_was_counted_is_counted_again(tmp_path, monkeypatch):
    monkeypatch.setenv("TFTPU_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "records"
    folder.mkdir()
    (folder / "train-0").write_bytes(WHOLE)
    whole = counted.read_manifest(str(folder), "train", {})
    (note,) = (tmp_path / "cache" / "counted").iterdir()
    content = note.read_bytes()
    for index in range(len(content)):
        for damage in (bytes([content[index] ^ 1 << index % 8]), b""):
            note.write_bytes(content[:index] + damage + content[index + 1 :])
            assert counted.read_manifest(str(folder), "train", {}) == whole
    for other in (b"", b"[]", b"\xff", content[:20]):
        note.write_bytes(other)
        assert counted.read_manifest(str(folder), "train", {}) == whole
