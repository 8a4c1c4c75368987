"""`tftpu export-weights`: the places that it writes to."""

import pytest

from tftpu.launch.main import main


@pytest.mark.parametrize("ending", [".weights.h5", ".safetensors"])
def test_a_place_that_is_taken_is_answered_with_one_of_the_same_ending(tmp_path, capsys, ending):
    taken = tmp_path / f"words{ending}"
    taken.write_text("mine")
    assert main(["export-weights", str(tmp_path / "run"), f"--output={taken}"]) == 2
    assert f"such as {tmp_path / 'words_2'}{ending}." in capsys.readouterr().err
    assert taken.read_text() == "mine"
