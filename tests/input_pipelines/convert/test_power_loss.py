"""A conversion on a machine that loses power: the same command gives the same bytes afterwards."""

from pathlib import Path

import pytest

from tests.support.data.conversions import content, of_text, silent
from tests.support.fakes import power_loss
from tftpu.input_pipelines.convert import converter, verify

pytestmark = pytest.mark.usefixtures("small_parts")


@pytest.mark.medium
@pytest.mark.parametrize("every", [7, pytest.param(1, marks=pytest.mark.slow)])
def test_a_conversion_after_a_power_loss_at_any_moment(texts, memory, every):
    """At each moment, whatever was not synced is kept, lost or torn."""
    folder: Path = memory / "out"
    folder.mkdir()
    (memory / "scratch").mkdir()
    with power_loss.watching(folder) as outages:
        converter.run(of_text(texts, folder), workers=1, say=silent)
    whole = content(folder)
    assert verify.run(str(folder), workers=1)[1] == []
    assert len(outages) > 40
    for outage in outages[::every]:
        for survivor in outage.survivors(memory / "scratch"):
            converter.run(of_text(texts, survivor), workers=1, say=silent)
            assert content(survivor) == whole, outage.before
