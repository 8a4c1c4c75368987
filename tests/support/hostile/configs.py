"""Files that name modules whose import, or objects whose creation, has an effect."""

import copy
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from keras.src.utils import python_utils

_OBJECTS = "tftpu.config.objects"
_EXAMPLES = "tftpu.launch.tfx.examples.Examples"
MODULES = ("canary", "canary_package", "canary_package.inner")
# A file of a folder that is on `sys.path`; modules of Python and of packages that nothing loads;
# functions that run what they are given; classes of Keras that do; and classes of tftpu itself.
PATHS = (
    *("canary.Model", "canary_package.inner.Model", "this.s", "lib2to3.main.main"),
    *("os.system", "subprocess.Popen", "builtins.eval", "importlib.import_module", "pickle.loads"),
    *(
        "tensorflow.python.keras.layers.core.Lambda",
        "keras.layers.Lambda",
        "keras.layers.TFSMLayer",
    ),
    *("keras.src.utils.torch_utils.TorchModuleWrapper", "keras.utils.get_file", "numpy.load"),
    *("keras.config.enable_unsafe_deserialization", "keras.src.backend.tests.backend_test.Model"),
    *("tftpu.optim.optimizers.Optimizer", "tftpu.launch.main.run", "keras_hub.models.Llama"),
)


def write_modules(folder: Path) -> Path:
    """Writes the modules of `MODULES`, whose import creates a file; returns its place."""
    ran = folder / "ran"
    text = (
        f"open({str(ran)!r}, 'a').write(__name__ + '\\n')\nimport dataclasses, tftpu\n"
        "@dataclasses.dataclass\nclass Model(tftpu.ModelConfig):\n    pass\n"
        "def get_config():\n    return None\n"
    )
    (folder / "canary_package").mkdir(parents=True)
    for name in ("canary.py", "canary_package/__init__.py", "canary_package/inner.py"):
        (folder / name).write_text(text)
    return ran


def values(path: str, ran: Path) -> Iterator[Any]:
    """Yields what may stand in a file for a class or function, in all forms that readers know.

    Args:
        path: of the class or function.
        ran: of the file that bytecode creates.
    """
    module, _, name = path.rpartition(".")
    part = {"module": module, "class_name": name, "config": {}, "registered_name": None}
    function = {**part, "class_name": "function", "config": name}
    described = {"class": f"{_OBJECTS}.KerasObject"}
    legacy = _bytecode(ran)
    lambda_ = {"class_name": "__lambda__", "config": {"code": legacy[0], "value": list(legacy)}}
    layer = {"function": legacy, "function_type": "lambda", "name": "a", "module": "canary"}
    yield path
    yield {"class": path}
    yield {"class": path, "name": path, "fn": path}
    yield {"class": _EXAMPLES, "label": path, "transform_graph": path}
    yield {"class": f"{_OBJECTS}.Function", "name": path}
    yield {**described, "description": part}
    yield {**described, "description": {**part, "config": {**layer, "defaults": None}}}
    yield {**described, "description": {**part, "registered_name": f"{module}>{name}"}}
    yield {**described, "description": lambda_}
    outer = {"module": "keras.metrics", "class_name": "MeanMetricWrapper", "registered_name": None}
    yield {**described, "description": {**outer, "config": {"fn": function, "name": "a"}}}
    yield {**described, "description": {**outer, "config": {"fn": lambda_, "name": "a"}}}
    yield {**described, "description": {**outer, "config": {"fn": part}}}
    for fn in (function, name, part):  # which another part lets Keras find
        for settings in ({"output_stream": f"file://{ran}", "sep": "\n"}, {"path": str(ran)}):
            named = {**outer, "config": {"fn": fn, "name": "a", **settings}, "other": part}
            yield {**described, "description": named}
    yield part
    yield function
    yield {**part, "class_name": "__typespec__", "spec_name": name}
    yield {"class_name": name, "config": layer, "module": module, "registered_name": path}
    yield {"pythonClassName": path, "type": path, "content": {}, "auto_mapping": path}
    yield str(ran.parent / "canary.py")


def mutants(value: Any, ran: Path, depth: int = 99) -> Iterator[Any]:
    """Yields copies of a JSON value with a hostile one in place of each of its parts.

    The first path is tried in all forms, the others in one form each, another in the next place.

    Args:
        value: JSON.
        ran: of the file that bytecode creates.
        depth: of the places.
    """
    forms = [list(values(path, ran)) for path in PATHS]
    for number, place in enumerate(p for p in _places(value) if len(p) <= depth):
        for several in forms:
            chosen = several if several is forms[0] else [several[number % len(several)]]
            for hostile in chosen:
                yield _replaced(value, place, hostile)


def drawn(value: Any, ran: Path) -> Iterator[Any]:
    """Yields copies without end, with a hostile value in one place or in two."""
    places = list(_places(value))
    forms = [form for path in PATHS for form in values(path, ran)]
    while True:
        one, other = random.choices(places, k=2)
        mutant = _replaced(value, one, random.choice(forms))
        if one[: len(other)] != other[: len(one)]:  # neither is within the other
            mutant = _replaced(mutant, other, random.choice(forms))
        yield mutant


def _bytecode(ran: Path) -> tuple:
    return python_utils.func_dump(eval(f"lambda *_: open({str(ran)!r}, 'a').write('lambda')"))


def _places(value: Any, place: tuple = ()) -> Iterator[tuple]:
    yield place
    if isinstance(value, dict | list):
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _places(part, (*place, key))


def _replaced(value: Any, place: tuple, hostile: Any) -> Any:
    if not place:
        return hostile
    whole = copy.deepcopy(value)
    parent = whole
    for key in place[:-1]:
        parent = parent[key]
    parent[place[-1]] = hostile
    return whole
