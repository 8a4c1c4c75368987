"""The checksum of an exported ONNX file: what it covers, and what computing it costs."""

import tracemalloc

import google_crc32c
import pytest

from tftpu.inference.exporting import onnx_seal

onnx = pytest.importorskip("onnx")


def model(weights: bytes) -> bytes:
    made = onnx.ModelProto(producer_name="a test")
    made.graph.initializer.add(name="weights", raw_data=weights)
    made.metadata_props.add(**onnx_seal.make_blank_entry())
    made.metadata_props.add(key="last", value="1")
    return made.SerializeToString()


@pytest.mark.parametrize("size", [0, 5, 3_000_000])
def test_the_checksum_is_of_all_but_itself(tmp_path, size):
    data = model(bytes(range(256)) * (size // 256))
    onnx_seal.write_sealed(tmp_path / "m.onnx", data)
    sealed = (tmp_path / "m.onnx").read_bytes()
    entries = {e.key: e.value for e in onnx.load_from_string(sealed).metadata_props}
    place = data.rindex(b"0" * 8)
    rest = data[:place] + data[place + 8 :]
    assert entries == {"crc32c": f"{google_crc32c.value(rest):08x}", "last": "1"}
    assert sealed[:place] + sealed[place + 8 :] == rest
    assert onnx_seal.is_intact(sealed) and not onnx_seal.is_intact(data)


def test_sealing_and_checking_a_large_file_hold_no_copy_of_it(tmp_path):
    data = model(bytes(50_000_000))
    tracemalloc.start()
    try:
        onnx_seal.write_sealed(tmp_path / "m.onnx", data)
        assert not onnx_seal.is_intact(data)
        assert tracemalloc.get_traced_memory()[1] < 20_000_000
    finally:
        tracemalloc.stop()


def test_a_file_whose_metadata_were_removed_is_not_checked():
    made = onnx.load_from_string(model(b"abc"))
    del made.metadata_props[:]
    assert onnx_seal.is_intact(made.SerializeToString())
