"""Weight files of strangers: HDF5 that names other files, or states more than it holds."""

import struct

import h5py
import numpy as np
import pytest

from tftpu.errors import UserError
from tftpu.models.weights import files

SECRET = np.arange(6, dtype=np.float32)


def external(group, elsewhere) -> None:
    raw = elsewhere.with_suffix(".raw")
    raw.write_bytes(SECRET.tobytes())
    group.create_dataset("0", (6,), np.float32, external=[(str(raw), 0, 24)])


def external_link(group, elsewhere) -> None:
    group["0"] = h5py.ExternalLink(str(elsewhere), "/secret")


def soft_link(group, elsewhere) -> None:
    group["0"] = h5py.SoftLink("/elsewhere")
    group.file["elsewhere"] = h5py.ExternalLink(str(elsewhere), "/secret")


def virtual(group, elsewhere) -> None:
    layout = h5py.VirtualLayout((6,), np.float32)
    layout[:] = h5py.VirtualSource(str(elsewhere), "secret", (6,))
    group.create_virtual_dataset("0", layout)


def never_written(group, elsewhere) -> None:
    group.create_dataset("0", (1 << 40,), np.float32, chunks=(1024,))


def inflated(group, elsewhere) -> None:
    zeros = np.zeros(1 << 22, np.float32)
    group.create_dataset("0", data=zeros, chunks=(1 << 20,), compression="gzip")


def huge_chunk(group, elsewhere) -> None:
    group.create_dataset(
        "0", (1,), np.uint8, maxshape=(None,), chunks=((1 << 32) - 1,), compression="gzip"
    )


def text(group, elsewhere) -> None:
    group.create_dataset("0", data=["a", "b"], dtype=h5py.string_dtype())


def folder(group, elsewhere) -> None:
    group.create_group("0")


HOSTILE = {
    external: "is in another file",
    external_link: "'0' is a link to another place",
    soft_link: "'0' is a link to another place",
    virtual: "is in another file",
    never_written: "needs 4,398,046,511,104 bytes, but the file holds only 0 of them",
    inflated: "needs 16,777,216 bytes, but the file holds only",
    huge_chunk: "needs 1 bytes, but the file holds only 0",
    text: "has the dtype object, not numbers",
    folder: "is not an array",
}


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("make", HOSTILE)
def test_a_hostile_array_is_refused(tmp_path, make, version):
    with h5py.File(tmp_path / "secret.h5", "w") as file:
        file["secret"] = SECRET
    path = tmp_path / "weights.h5"
    with h5py.File(path, "w") as file:
        if version == 2:
            file.attrs["layer_names"] = [b"conv"]
            group = file.create_group("conv")
            group.attrs["weight_names"] = [b"conv/0"]
            group = group.create_group("conv")
        else:
            group = file.create_group("layers/conv/vars")
            group.attrs["name"] = "conv"
        make(group, tmp_path / "secret.h5")
    with pytest.raises(UserError, match=HOSTILE[make]) as error:
        files.read(str(path))
    assert str(path) in str(error.value)


def test_a_group_that_is_a_link_is_refused(tmp_path):
    with h5py.File(tmp_path / "secret.h5", "w") as file:
        group = file.create_group("conv/conv")
        file.attrs["layer_names"] = [b"conv"]
        file["conv"].attrs["weight_names"] = [b"conv/0"]
        group["0"] = SECRET
    for name in ("conv", "model_weights"):
        with h5py.File(tmp_path / "weights.h5", "w") as file:
            file.attrs["layer_names"] = [b"conv"]
            file[name] = h5py.ExternalLink(str(tmp_path / "secret.h5"), name.replace("conv", "/"))
        with pytest.raises(UserError, match=f"'{name}' is a link to another place"):
            files.read(str(tmp_path / "weights.h5"))


def test_compressed_weights_are_read(tmp_path):
    """Real weights shrink by a tenth or so, and some are zeros."""
    values = np.random.default_rng(0).normal(size=20_000).astype(np.float32)
    with h5py.File(tmp_path / "weights.h5", "w") as file:
        group = file.create_group("layers/conv/vars")
        group.attrs["name"] = "conv"
        group.create_dataset("0", data=values, compression="gzip", shuffle=True)
        group.create_dataset("1", data=np.zeros(1000, np.float32), compression="gzip")
        group.create_dataset("2", data=np.zeros(0, np.float32))
        group.create_dataset("3", data=np.float32(7))
    found = files.read(str(tmp_path / "weights.h5"))
    np.testing.assert_array_equal(found["conv/0"].content(), values)
    assert found["conv/1"].shape == (1000,) and found["conv/2"].content().size == 0
    assert found["conv/3"].content() == 7


def test_a_pipe_is_not_waited_for(tmp_path):
    import os

    for name in ("w.h5", "w.safetensors"):
        os.mkfifo(tmp_path / name)
        with pytest.raises(UserError, match="There is no weight file"):
            files.read(str(tmp_path / name))


def with_a_name(path) -> bytes:
    """Returns a file of Keras 3, whose texts lie in a heap."""
    with h5py.File(path, "w") as file:
        group = file.create_group("layers/conv/vars")
        group.attrs["name"] = "conv"
        group["0"] = SECRET
    return path.read_bytes()


@pytest.mark.parametrize("number", [0, 1])
def test_a_heap_on_which_the_library_would_hang_is_refused(tmp_path, number):
    path = tmp_path / "weights.h5"
    data = bytearray(with_a_name(path))
    assert files.read(str(path))
    objects = data.find(b"GCOL") + 16
    # The size that makes its reader take no step: of what is free, or of a text.
    struct.pack_into("<H6xQ", data, objects, number, 0 if number == 0 else (1 << 64) - 16)
    path.write_bytes(data)
    with pytest.raises(UserError, match=r"the heap at byte \d+ is damaged"):
        files.read(str(path))


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (0, 0, "does not begin as an HDF5 file"),
        (8, 9, "has a version that Keras does not write"),
        (14, 4, "its header is damaged"),
    ],
)
def test_another_header_is_refused(tmp_path, place, value, message):
    path = tmp_path / "weights.h5"
    data = bytearray(with_a_name(path))
    data[place] = value
    path.write_bytes(data)
    with pytest.raises(UserError, match=message):
        files.read(str(path))
    path.write_bytes(bytes(data[:8]))
    with pytest.raises(UserError, match="cannot be read"):
        files.read(str(path))
