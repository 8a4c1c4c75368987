"""Any file is read as Keras's HDF5 or refused with one clear error."""

import io

import h5py
import numpy as np
import pytest
from hypothesis import strategies as st

from tests.support.hostile.fuzzing import damaged, fuzzed, only_user_errors
from tftpu.models.weights import files


def keras_3() -> bytes:
    """Returns a file like those of Keras 3."""
    file = io.BytesIO()
    with h5py.File(file, "w") as root:
        group = root.create_group("layers/dense/vars")
        group.attrs["name"] = "dense"
        group.create_dataset("0", data=np.ones((3, 2), np.float32))
        group.create_dataset("1", data=np.zeros(2, np.float32), chunks=(1,), compression="gzip")
    return file.getvalue()


def keras_2() -> bytes:
    """Returns a file like those of Keras 2."""
    file = io.BytesIO()
    with h5py.File(file, "w") as root:
        root.attrs["layer_names"] = [b"stem"]
        group = root.create_group("stem")
        group.attrs["weight_names"] = [b"stem/conv/kernel:0"]
        group.create_dataset("stem/conv/kernel:0", data=np.ones((3, 2), np.float32))
    return file.getvalue()


@pytest.mark.parametrize("make", [keras_3, keras_2])
def test_the_files_are_read(tmp_path, make):
    (tmp_path / "w.h5").write_bytes(make())
    assert files.read(str(tmp_path / "w.h5"))


@fuzzed(80, data=damaged(keras_3()) | damaged(keras_2()) | st.binary(max_size=64))
def test_damaged_bytes(tmp_path, data):
    path = tmp_path / "w.h5"
    path.write_bytes(data)
    with only_user_errors():
        arrays = files.read(str(path))
        assert sum(array.content().nbytes for array in arrays.values()) <= 100 * len(data)
