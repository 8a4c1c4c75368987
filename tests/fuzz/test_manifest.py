"""Any `dataset.json` is read as a manifest or refused with one clear error."""

import json

from hypothesis import strategies as st

from tests.support.hostile.fuzzing import damaged, fuzzed, only_user_errors, reshaped
from tests.support.hostile.texts import WHOLE
from tftpu.input_pipelines.formats import manifest


@fuzzed(80, text=damaged(WHOLE.encode()) | st.binary(max_size=64))
def test_damaged_bytes(tmp_path, text):
    (tmp_path / manifest.NAME).write_bytes(text)
    with only_user_errors():
        manifest.read(str(tmp_path))


@fuzzed(80, value=reshaped(json.loads(WHOLE)))
def test_any_json(value):
    with only_user_errors():
        found = manifest.from_json(json.dumps(value), ".")
        # What is accepted is written and read again unchanged.
        assert manifest.from_json(manifest.to_json(found), ".") == found
