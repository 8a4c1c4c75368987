"""Export of weights to places that cannot be written."""

import pytest

from tests.support.strategies import mlp
from tftpu.errors import UserError
from tftpu.inference import export


@pytest.mark.parametrize("ending", ["safetensors", "weights.h5"])
def test_a_place_that_cannot_be_written_is_named(ending):
    path = f"/proc/nowhere/digits.{ending}"
    with pytest.raises(UserError, match=rf"{path} cannot be written \(.+\): choose another"):
        export.write_weights(mlp(), {}, path)
