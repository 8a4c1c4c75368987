"""Files of a checkpoint that match their checksums, and are not tftpu's."""

import json

import pytest

from tests.support.leaves import leaves
from tftpu.checkpoint import matching
from tftpu.errors import UserError

ONE = {"dtype": "I8", "shape": [1], "data_offsets": [0, 1]}  # under a name without its number


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff" * 64,
        (2).to_bytes(8, "little") + b"[]",
        (60).to_bytes(8, "little")
        + json.dumps({"w": {"dtype": "I8", "shape": [1], "data_offsets": [0, 1]}})
        .encode()
        .ljust(60)
        + b"\x01",  # a name without its number
    ],
)
def test_a_file_of_another_format_is_one_clear_error(data):
    with pytest.raises(UserError, match=r"step 7 was not written by tftpu.* model.safetensors"):
        matching.load({"model.safetensors": data}, leaves(0), 7)
