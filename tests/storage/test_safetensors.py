"""Safetensors of strangers: one clear error, and nothing larger than the file."""

import json

import numpy as np
import pytest

from tftpu.storage import safetensors

A = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def file(header, data: bytes = bytes(8), length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


DAMAGE = {
    "an overlap": (
        file({"a": A, "b": {**A, "data_offsets": [4, 12]}}, bytes(12)),
        "'b' overlaps another array",
    ),
    "the same bytes twice": (file({"a": A, "b": A}), "'b' overlaps another array"),
    "a hole": (
        file({"a": A, "b": {**A, "data_offsets": [12, 20]}}, bytes(20)),
        "'b' follows a gap",
    ),
    "a hole at the begin": (file({"a": {**A, "data_offsets": [4, 12]}}, bytes(12)), "a gap"),
    "bytes at the end": (file({"a": A}, bytes(9)), "1 bytes at its end belong to no array"),
    "too few bytes": (file({"a": A}, bytes(7)), "'a' ends after the end of the file"),
    "a negative shape": (file({"a": {**A, "shape": [-1, -2]}}), r"'a' has the shape \[-1, -2\]"),
    "a shape of texts": (file({"a": {**A, "shape": ["2"]}}), "'a' has the shape"),
    "a shape of truths": (file({"a": {**A, "shape": [True, 2]}}), "'a' has the shape"),
    "another shape": (
        file({"a": {**A, "shape": [3]}}),
        r"8 bytes, which is not the size of F32 \[3\]",
    ),
    "a huge shape": (file({"a": {**A, "shape": [0, 2**70]}}), "'a' has the shape"),
    "many dimensions": (file({"a": {**A, "shape": [2] + [1] * 99}}), "'a' has the shape"),
    "negative offsets": (file({"a": {**A, "data_offsets": [-8, 0]}}), "has the data_offsets"),
    "three offsets": (file({"a": {**A, "data_offsets": [0, 8, 8]}}), "has the data_offsets"),
    "backward offsets": (file({"a": {**A, "data_offsets": [8, 0]}}), "has the data_offsets"),
    "an unknown dtype": (file({"a": {**A, "dtype": "F7"}}), "'a' has the unknown dtype 'F7'"),
    "no dtype": (file({"a": {"shape": [2]}}), "'a' lacks dtype, shape or data_offsets"),
    "a number as an array": (file({"a": 1}), "'a' lacks dtype, shape or data_offsets"),
    "a list as header": (file([A]), "its header is not a JSON object"),
    "null as header": (file(b"null"), "its header is not a JSON object"),
    "no JSON": (file(b"{'a': 1}"), "its header is not JSON"),
    "deep JSON": (file(b"[" * 100_000), "its header is not JSON"),
    "no UTF-8": (file(b'{"\xff": 1}'), "its header is not JSON"),
    "a lone surrogate": (file({"\ud800": A}), "surrogates not allowed"),
    "a huge header": (file({"a": A}, length=1 << 60), "its header must end at byte 1,152,921"),
    "a negative header": (file({"a": A}, length=2**64 - 1), "its header must end at byte"),
    "no header": (file(b""), "its header must end at byte 8"),
    "a few bytes": (b"\x02\x00", "its header must end at byte"),
    "nothing": (b"", "its header must end at byte 8"),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_what_is_not_safetensors_is_one_clear_error(what):
    data, message = DAMAGE[what]
    with pytest.raises(ValueError, match=message) as error:
        safetensors.decode(data)
    assert "\n" not in str(error.value)


def test_arrays_in_any_order_of_names_and_empty_ones_are_read():
    header = {
        "__metadata__": {"format": "pt"},
        "z": {"dtype": "I8", "shape": [2], "data_offsets": [8, 10]},
        "empty": {"dtype": "I8", "shape": [0, 3], "data_offsets": [8, 8]},
        "a": A,
    }
    found = safetensors.decode(file(header, np.ones(2, "<f4").tobytes() + b"\x01\x02"))
    assert list(found) == ["a", "empty", "z"]  # in the order of their bytes
    assert found["a"].tolist() == [1, 1] and found["z"].tolist() == [1, 2]
    assert found["empty"].shape == (0, 3)


def test_the_header_has_a_limit(monkeypatch):
    monkeypatch.setattr(safetensors, "_LONGEST_HEADER", 20)
    with pytest.raises(ValueError, match="its header has 61 bytes, but at most 20 are allowed"):
        safetensors.decode(file({"a": A}))
