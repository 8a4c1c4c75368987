"""Any `config.json` is read as an experiment or refused with one clear error."""

import json
import sys

from hypothesis import strategies as st

from tests.support.hostile.fuzzing import damaged, fuzzed, only_user_errors, reshaped
from tftpu.config import from_json, to_json
from tftpu.launch.settings import config_flags

WHOLE = to_json(config_flags.load("python_gpt", ["--config.metrics=accuracy"]))


@fuzzed(150, text=damaged(WHOLE.encode()) | st.binary(max_size=64))
def test_damaged_bytes(text):
    with only_user_errors():
        from_json(text).validate()


@fuzzed(200, value=reshaped(json.loads(WHOLE)))
def test_any_json(value):
    with only_user_errors():
        found = from_json(json.dumps(value))
        found.validate()
        assert from_json(to_json(found)) == found


NAMES = st.sampled_from(sorted({*sys.stdlib_module_names, "tftpu.launch.main", "numpy", "a.b"}))


@fuzzed(60, module=NAMES, name=st.sampled_from(("main", "Popen", "system", "Model", "path")))
def test_no_class_of_another_module(module, name):
    before = set(sys.modules)
    plain = json.loads(WHOLE)
    plain["model"]["class"] = f"{module}.{name}"
    with only_user_errors():
        from_json(json.dumps(plain))
        raise AssertionError(f"{module}.{name} was accepted")
    new = {m.partition(".")[0] for m in set(sys.modules) - before}
    assert module.partition(".")[0] == "tftpu" or module not in new
