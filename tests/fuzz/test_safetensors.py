"""Any file is read as safetensors or refused with one clear error."""

import json

import numpy as np
from hypothesis import strategies as st

from tests.support.hostile.fuzzing import damaged, fuzzed, only_user_errors, reshaped
from tftpu.models.weights import files
from tftpu.storage import safetensors

ARRAYS = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones(4, np.int8)}
WHOLE = b"".join(safetensors.TensorFile(ARRAYS, {"format": "pt"}))
SPLIT = 8 + int.from_bytes(WHOLE[:8], "little")


def read(path, data: bytes) -> None:
    path.write_bytes(data)
    with only_user_errors():
        for array in files.read(str(path)).values():
            assert array.content().nbytes <= len(data)


@fuzzed(100, data=damaged(WHOLE) | st.binary(max_size=64))
def test_damaged_bytes(tmp_path, data):
    read(tmp_path / "w.safetensors", data)


@fuzzed(100, header=reshaped(json.loads(WHOLE[8:SPLIT])))
def test_any_header(tmp_path, header):
    text = json.dumps(header).encode()
    length = len(text).to_bytes(8, "little")
    read(tmp_path / "w.safetensors", length + text + WHOLE[SPLIT:])


@fuzzed(50, index=reshaped({"metadata": {}, "weight_map": {"a": "w.safetensors"}}))
def test_any_index(tmp_path, index):
    (tmp_path / "w.safetensors").write_bytes(WHOLE)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with only_user_errors():
        files.read(str(tmp_path))
