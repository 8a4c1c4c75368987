"""A config file is imported under its own name, with its neighbours, from any folder."""

import contextlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

import tftpu
from tests.support import projects, warm
from tftpu.config import Experiment, from_json, to_json
from tftpu.errors import UserError
from tftpu.launch.main import main
from tftpu.launch.run import finished
from tftpu.launch.settings import config_flags, own_code

MODULES = ("mine", "model", "data", "losses", "other", "net", "far", "deep")


@pytest.fixture(autouse=True)
def _path(monkeypatch):
    """Leaves `sys.path` as it was, and no module of a project loaded."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in (
            "mine",
            "model",
            "data",
            "losses",
            "other",
            "net",
            "far",
            "deep",
        ):
            del sys.modules[name]


def test_the_folder_of_the_config_is_what_travels(tmp_path, monkeypatch):
    projects.write(tmp_path / "a", "loss='mse'")
    monkeypatch.chdir(tmp_path)
    code = own_code.find_code("a/mine.py")
    assert (code.folder, code.module) == (tmp_path / "a", "mine")
    assert code.file == tmp_path / "a" / "mine.py"
    assert own_code.find_code("digits_resnet") is None


def test_neighbours_are_plain_modules_of_the_config(tmp_path):
    path = projects.write(tmp_path, "loss='mse'")
    experiment = config_flags.load(str(path), [])
    assert type(experiment.model).__module__ == "model"
    assert type(experiment.data).__module__ == "data"
    assert sys.modules["mine"].__file__ == str(path)
    assert experiment.config_file == str(path)


def test_two_projects_with_the_same_names_in_one_process_keep_apart(tmp_path):
    one = projects.write(tmp_path / "one", "loss='mse'")
    wider = projects.MODEL.replace("outputs: int = 1", "outputs: int = 7")
    two = projects.write(tmp_path / "two", "loss='mse'", model=wider)
    for path, outputs in ((one, 1), (two, 7), (one, 1)):
        assert config_flags.load(str(path), []).model.outputs == outputs


def test_the_same_folder_elsewhere_gives_the_same_names(tmp_path):
    """Another path and another process stand for another machine."""
    projects.write(tmp_path / "sent", "loss='mse'")
    code = (
        "from tftpu.launch.settings import config_flags\n"
        "e = config_flags.load('mine.py', [])\n"
        "print(type(e.model).__module__, type(e.data).__qualname__)\n"
    )
    done = warm.run(
        [sys.executable, "-c", code], cwd=tmp_path / "sent", capture_output=True, text=True
    )
    assert done.stdout == "model Sums\n", done.stderr


@pytest.mark.parametrize("name", ["keras", "json", "tftpu", "pytest", "absl"])
def test_a_config_with_the_name_of_an_installed_module_is_refused(name, tmp_path):
    path = projects.write(tmp_path, "loss='mse'", name=name)
    with pytest.raises(UserError, match=f"{name}.py has the name of an installed module"):
        config_flags.load(str(path), [])


def test_a_neighbour_that_would_replace_an_installed_module_is_refused(tmp_path):
    path = projects.write(tmp_path, "loss='mse'", random="")
    with pytest.raises(UserError, match="holds a module 'random'"):
        config_flags.load(str(path), [])


def test_a_neighbour_with_the_name_of_a_loaded_package_is_refused(tmp_path):
    """The installed one would be what `import` finds."""
    path = projects.write(tmp_path, "loss='mse'", pytest="")
    with pytest.raises(UserError, match="rename yours"):
        config_flags.load(str(path), [])


def test_a_dot_in_the_name_is_refused_with_another_name(tmp_path):
    path = projects.write(tmp_path, "loss='mse'").rename(tmp_path / "my.config.py")
    with pytest.raises(UserError, match=r"rename it, for example to my_config\.py"):
        config_flags.load(str(path), [])


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"model": "import tftpu\n1 / 0\n"}, "in line 2 of model.py with ZeroDivisionError"),
        ({"data": "import nowhere\n"}, "in line 1 of data.py with ModuleNotFoundError"),
        ({"mine": "def get_config(:\n"}, "SyntaxError"),
        (
            {"model": "import tftpu\nopen('/tmp/nowhere.csv')\n"},
            "in line 2 of model.py: there is no file '/tmp/nowhere.csv'.",
        ),
        ({"mine": "x = 1\n"}, "has no get_config()"),
        ({"mine": "print(1 / 0)  # is not run\n"}, "has no get_config()"),
        ({"mine": "from other import *\n", "other": "x = 1\n"}, "has no get_config()"),
        ({"mine": "def get_config():\n    return 5\n"}, "returns a int"),
    ],
)
def test_a_mistake_is_reported_with_its_file_and_line(files, message, tmp_path):
    path = projects.write(tmp_path, "loss='mse'", **files)
    with pytest.raises(UserError) as error:
        config_flags.load(str(path), [])
    assert message in str(error.value)


def test_failures_outside_a_users_code_are_not_the_users(tmp_path):
    with pytest.raises(ZeroDivisionError), own_code.failures_of("The config", Path(tmp_path)):
        raise ZeroDivisionError


PACKAGE = {
    "net/__init__.py": "",
    "net/losses.py": projects.LOSSES,
    "net/models/__init__.py": "from .linear import Linear",
    "net/models/linear.py": projects.MODEL,
    "net/templates/x.py": "print '{{ name }}'",
    "mine.py": """
import tftpu
from data import Sums
from net import losses

def get_config():
    from net.models import Linear  # once it is needed
    return tftpu.Experiment(Linear(), Sums(), loss=losses.Scaled(2.0), metrics=(losses.half,))
""",
}


def written(folder: Path, files: dict[str, str]) -> Path:
    """Writes a project with more files; returns its config file."""
    path = projects.write(folder, "")
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return path


def read_again(path: Path, text: str) -> Experiment:
    """Returns the experiment of a config.json, where nothing but the config file is loaded."""
    code = own_code.find_code(str(path))
    assert code
    for name in [name for name in sys.modules if name.partition(".")[0] in ("net", "far", "deep")]:
        del sys.modules[name]
    own_code.import_config(code)
    return from_json(text, *own_code.list_modules(code))


def test_a_run_finds_its_classes_in_a_package_that_the_config_imports_when_it_is_called(tmp_path):
    """A file that is not Python and that nothing imports is none of its concern."""
    path = written(tmp_path, PACKAGE)
    experiment = config_flags.load(str(path), [])
    assert type(experiment.model).__module__ == "net.models.linear"
    assert to_json(read_again(path, to_json(experiment))) == to_json(experiment)


@pytest.mark.parametrize("module", ["net.__main__", "net.runs.bad.evil", "net.templates.x", "evil"])
def test_a_config_json_imports_nothing_that_the_config_does_not(module, tmp_path):
    evil = f"open({str(tmp_path / 'ran')!r}, 'w')\n{projects.MODEL}{projects.LOSSES}"
    files = ("net/__main__.py", "net/runs/bad/evil.py", "net/templates/x.py", "evil.py")
    path = written(tmp_path / "code", PACKAGE | dict.fromkeys(files, evil))
    text = to_json(config_flags.load(str(path), []))
    for own in ("net.models.linear", "net.losses"):
        with pytest.raises(UserError, match="is not part of the run's own code"):
            read_again(path, text.replace(own, module))
    assert not (tmp_path / "ran").exists()


def test_what_own_code_imported_of_others_is_not_its_own(tmp_path):
    path = written(
        tmp_path, PACKAGE | {"net/losses.py": f"{projects.LOSSES}\nfrom os import popen"}
    )
    text = to_json(config_flags.load(str(path), []))
    with pytest.raises(UserError, match=r"config.json names net\.losses\.popen"):
        read_again(path, text.replace("net.losses.half", "net.losses.popen"))


def test_a_package_that_may_be_missing_and_one_that_it_hands_on_give_losses(tmp_path, monkeypatch):
    for name, text in ("far", "from deep.inner import half"), ("deep/inner", projects.LOSSES):
        (tmp_path / "site" / f"{name}.py").parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "site" / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path / "site")
    maybe = "try:\n    import far as losses\nexcept ImportError:\n    losses = None"
    text = PACKAGE["mine.py"].replace("from net import losses", maybe)
    text = text.replace("losses.Scaled(2.0)", "losses.half")
    path = written(tmp_path / "code", PACKAGE | {"mine.py": text})
    experiment = config_flags.load(str(path), [])
    assert to_json(read_again(path, to_json(experiment))) == to_json(experiment)


@pytest.mark.parametrize(
    ("path", "is_read"),
    [
        ("far.half", True),  # which the config names
        ("far.erase", False),
        ("tensorflow.io.write_file", False),
        ("keras.utils.get_file", False),
        ("far.Scaled", True),
        ("far.Program", False),
    ],
)
def test_of_a_package_a_config_json_names_losses_and_functions_that_the_config_names(
    path, is_read, tmp_path, monkeypatch
):
    more = "def erase(*_): pass\n\nclass Program(keras.layers.Layer): pass\n"
    (tmp_path / "site").mkdir()
    (tmp_path / "site/far.py").write_text(projects.LOSSES + more)
    monkeypatch.syspath_prepend(tmp_path / "site")
    code = PACKAGE["mine.py"].replace("from net import losses", "import far, keras, tensorflow")
    code = code.replace("losses.", "far.")
    file = written(tmp_path / "code", PACKAGE | {"mine.py": code})
    plain = json.loads(to_json(config_flags.load(str(file), [])))
    module, _, name = path.rpartition(".")
    if name.istitle():
        plain["loss"]["description"] |= {"module": module, "class_name": name}
    else:
        plain["metrics"] = [{"class": "tftpu.config.objects.Function", "name": path}]
    refused = pytest.raises(UserError, match=f"config.json names {path}, .* that occur in")
    with contextlib.nullcontext() if is_read else refused:
        read_again(file, json.dumps(plain))


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("far", "half"),  # which the config names, as a loss
        ("mine", "get_config"),
        ("mine", "Log"),
        ("far", "Log"),
    ],
)
def test_no_description_in_a_config_json_names_what_keras_would_call_with_its_arguments(
    module, name, tmp_path, monkeypatch
):
    """Keras takes a function and a class by the name that any part of a description has."""
    log = (
        "class Log(keras.callbacks.Callback):\n    def __init__(self, *_, path): open(path, 'w')\n"
    )
    (tmp_path / "site").mkdir()
    (tmp_path / "site/far.py").write_text(f"{projects.LOSSES}\n{log}")
    monkeypatch.syspath_prepend(tmp_path / "site")
    code = PACKAGE["mine.py"].replace("from net import losses", f"import far, keras\n{log}")
    code = code.replace("losses.", "far.")
    file = written(tmp_path / "code", PACKAGE | {"mine.py": code})
    plain = json.loads(to_json(config_flags.load(str(file), [])))
    part = {"module": module, "class_name": name, "config": {}}
    settings = {"fn": {"module": "builtins", "class_name": "function", "config": name}}
    wrapper = {"module": "keras.metrics", "class_name": "MeanMetricWrapper", "part": part}
    description = {**wrapper, "config": {**settings, "path": "f"}}
    kind = "tftpu.config.objects.KerasObject"
    plain["metrics"] = [{"class": kind, "description": description}]
    with pytest.raises(UserError, match=f"config.json names {module}.{name}, "):
        read_again(file, json.dumps(plain))


@pytest.mark.parametrize(
    ("imports", "inside", "loss", "missing"),
    [
        ("from far import half", "", "half", ""),
        ("import far", "", "far.half", ""),
        ("import far", "", "far.twice", "half"),
        ("import far", "", "far.get('half')", "half"),
        ("", "import far", "far.half", "half"),
        ("", "from far import Scaled", "Scaled()", "Scaled"),
    ],
)
def test_a_config_whose_config_json_could_not_be_read_is_refused_when_it_is_loaded(
    imports, inside, loss, missing, tmp_path, monkeypatch
):
    """Nothing calls get_config() when a config.json is read, and an alias is not recorded."""
    more = "twice = half\n\ndef get(name):\n    return globals()[name]\n"
    (tmp_path / "site").mkdir()
    (tmp_path / "site/far.py").write_text(projects.LOSSES + more)
    monkeypatch.syspath_prepend(tmp_path / "site")
    text = projects.CONFIG.format(rest=f"loss={loss}")
    text = f"{imports}\n{text}".replace("():\n", f"():\n    {inside}\n")
    file = projects.write(tmp_path / "code", "", mine=text)
    if missing:
        said = f"uses far.{missing}, .* Write `from far import {missing}` at the top"
        with pytest.raises(UserError, match=said):
            config_flags.load(str(file), [])
    else:
        experiment = config_flags.load(str(file), [])
        assert read_again(file, to_json(experiment)) == experiment


def test_the_run_of_a_module_file_of_tfx_is_read_with_that_file(tmp_path):
    """In a fresh process: nothing has loaded the code, nor `Examples`."""
    text = projects.CONFIG.format(rest="loss='mse'").replace("Sums()", "Examples(label='width')")
    text = text.replace("from data import Sums", "from tftpu.launch.tfx import Examples")
    experiment = config_flags.load(str(projects.write(tmp_path, "", mine=text)), [])
    experiment.config_file = ""
    (tmp_path / "config.json").write_text(to_json(experiment))
    code = (
        "from tftpu.launch.run import finished\nfrom tftpu.errors import UserError\n"
        "try:\n    finished.load_experiment('.')\nexcept UserError as error:\n    print(error)\n"
        "print(finished.load_experiment('.', "
        "finished.FinishedRunOptions(config='mine.py')).data.label)"
    )
    done = warm.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    said = done.stdout.splitlines()
    assert "model.Linear, but 'model' is not part of the run's own code" in said[0], done.stderr
    assert "--config=FILE.py" in said[0] and said[1] == "width"


@pytest.mark.parametrize("is_imported", [True, False])
@pytest.mark.parametrize("part", ["model", "data", "a part of the model"])
def test_a_config_whose_classes_only_get_config_imports_is_refused_when_it_is_loaded(
    part, is_imported, tmp_path, monkeypatch
):
    """Follows the message's advice in a fresh process: the config loads."""
    (tmp_path / "site/far").mkdir(parents=True)
    (tmp_path / "site/far/__init__.py").write_text("")
    inner = "import dataclasses, model\n\n@dataclasses.dataclass\nclass Inner(model.Part): pass"
    texts = {"model": projects.MODEL, "data": projects.DATA}
    (tmp_path / "site/far/parts.py").write_text(texts.get(part, inner))
    monkeypatch.syspath_prepend(tmp_path / "site")
    name = {"model": "Linear", "data": "Sums"}.get(part, "Inner")
    (tmp_path / "site/far/base.py").write_text(f"from .parts import {name}\n")
    text = projects.CONFIG.format(rest="loss='mse'")
    text = text.replace("():\n", f"():\n    from far.base import {name}\n")
    files = {"mine": f"import far.parts\n{text}" if is_imported else text}
    if name == "Inner":
        files["mine"] = files["mine"].replace("Linear()", "Linear(parts=(Inner(),))")
        base = "import dataclasses\n\n@dataclasses.dataclass\nclass Part: pass\n"
        files["model"] = f"{base}{projects.MODEL}\n    parts: tuple[Part, ...] = ()\n"
    path = projects.write(tmp_path / "code", "", **files)
    if not is_imported:
        with pytest.raises(UserError, match=rf"far\.parts\.{name}, .* write `import far.parts` at"):
            config_flags.load(str(path), [])
        return
    text = to_json(config_flags.load(str(path), []))
    assert f"far.parts.{name}" in text and to_json(read_again(path, text)) == text


def of_tfx(folder: Path) -> Path:
    """Writes a config of TFX's examples with a transform graph; returns its file."""
    rest = "loss='mse'"
    text = projects.CONFIG.format(rest=rest).replace(
        "Sums()", "Examples(label='x', transform_graph='graph')"
    )
    text = text.replace("from data import Sums", "from tftpu.launch.tfx import Examples")
    return projects.write(folder, "", mine=text)


@pytest.mark.parametrize("words", [["evaluate"], ["export", "--to=m.onnx"], ["predict"], ["serve"]])
def test_a_transform_graph_of_a_config_json_runs_where_the_config_is_named(words, tmp_path, capsys):
    """Also where the config.json has tftpu's own classes alone, or a known config."""
    path = of_tfx(tmp_path)
    plain = json.loads(to_json(config_flags.load(str(path), [])))
    known = json.dumps(plain)
    model = json.loads(to_json(config_flags.load("digits_resnet", [])))["model"]
    for text in (known, json.dumps({**plain, "model": model, "config_file": ""})):
        (tmp_path / "config.json").write_text(text)
        more = ["--input=evaluation", "--output=p"] if words == ["predict"] else []
        assert main([*words, *more, f"--workdir={tmp_path}"]) == 2
        said = capsys.readouterr().err
        assert "names the transform graph 'graph', a program" in said
        assert "config file with --config=FILE.py." in said
    (tmp_path / "goodput.json").touch()
    assert main(["config", "show", str(tmp_path)]) == 2
    assert "config file in place of the run." in capsys.readouterr().err
    named = finished.FinishedRunOptions(config=str(path))
    (tmp_path / "config.json").write_text(known)
    assert finished.load_experiment(str(tmp_path), named).data.transform_graph == "graph"


def test_a_search_of_a_pipelines_examples_is_joined_where_its_config_is_named(tmp_path, capsys):
    """Its overrides, its space and its trials may name another transform graph."""
    path = of_tfx(tmp_path)
    config_flags.load(str(path), [])
    flags = ["--config.data.transform_graph=gs://evil/graph"]
    plan = {"config": str(path), "overrides": flags, "space": ["train.seed=uniform:1..2"]}
    (tmp_path / "search.json").write_text(json.dumps({**plan, "metric": "loss", "fields": {}}))
    assert main(["search", "--join", f"--workdir={tmp_path}"]) == 2
    assert (
        f"any transform graph, which is a program. If you trust them, give the config with "
        f"--config={path}." in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("context", {"class": "tftpu.config.objects.Function", "name": "a.b"}, "must be int"),
        ("data_dir", {"path": 3}, "its type must be"),
        ("global_batch_size", -3, "it must be 1 or more"),
    ],
)
def test_a_config_json_is_checked_before_its_data_are_read(field, value, said, tmp_path):
    plain = json.loads(to_json(config_flags.load("python_gpt", [])))
    plain["data"][field] = value
    (tmp_path / "config.json").write_text(json.dumps(plain))
    with pytest.raises(UserError, match=rf"data\.{field} is .*{said}"):
        finished.load_experiment(str(tmp_path))


def validating(folder: Path, part: str) -> Path:
    """Writes a project whose model or data has a mistake in `validate`; returns its config file."""
    check = "\n    def validate(self, *batch):\n        raise ValueError('too few')\n"
    texts = {"model": projects.MODEL, "data": projects.DATA}
    return projects.write(folder, "loss='mse'", **{part: texts[part] + check})


@pytest.mark.parametrize("part", ["model", "data"])
@pytest.mark.parametrize("command", ["train", "doctor", "config show", "search"])
def test_a_mistake_in_a_users_validate_is_reported_with_its_line(part, command, tmp_path, capsys):
    path = validating(tmp_path, part)
    words = {
        "config show": [str(path)],
        "search": [f"--config={path}", "--space=train.seed=uniform:1..2", f"--workdir={tmp_path}"],
    }.get(command, [f"--config={path}"])
    assert main([*command.split(), *words]) == 2
    line = len((tmp_path / f"{part}.py").read_text().splitlines())
    said = f"validate() fails in line {line} of {part}.py with ValueError: too few"
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("method", "command"),
    [
        ("training", "data check"),
        ("training", "data show"),
        ("batch_spec", "data check"),
        ("batch_spec", "preflight"),
    ],
)
def test_a_mistake_in_users_data_is_reported_with_its_line(method, command, tmp_path, capsys):
    mistake = f"\n    def {method}(self, *_):\n        return 1 / 0\n"
    path = projects.write(tmp_path, "loss='mse'", data=projects.DATA + mistake)
    flags = ["--slices=v5e-1"] if command == "preflight" else []
    assert main([*command.split(), f"--config={path}", *flags]) == 2
    output = capsys.readouterr()
    said = f"Sums.{method}() fails in line 28 of data.py with ZeroDivisionError"
    assert said in output.out + output.err


def test_a_mistake_in_an_inherited_method_is_reported_with_its_line(tmp_path):
    base = f"{projects.MODEL}\n    def validate(self, batch):\n        1 / 0\n"
    files = {"net/__init__.py": "", "net/base.py": base}
    files["model.py"] = "from net import base\n\nclass Linear(base.Linear):\n    pass\n"
    files["mine.py"] = projects.CONFIG.format(rest="loss='mse'")
    experiment = config_flags.load(str(written(tmp_path, files)), [])
    line = len(base.splitlines())
    said = rf"Linear\.validate\(\) fails in line {line} of base.py with ZeroDivisionError"
    with pytest.raises(UserError, match=said):
        own_code.validate(experiment)


def test_a_mistake_in_a_class_without_a_file_is_raised_as_it_is(tmp_path):
    """A notebook defines its classes in a module that has no file."""
    experiment = config_flags.load(str(projects.write(tmp_path, "loss='mse'")), [])
    base, cells = type(experiment.model), {"__name__": "cells"}
    exec("def validate(self, batch):\n    1 / 0", cells)
    model: Any = type("Cells", (base,), {"__module__": "cells", "validate": cells["validate"]})()
    with pytest.raises(ZeroDivisionError):
        own_code.validate(tftpu.Experiment(model, experiment.data, loss="mse"))


def test_of_a_users_parts_a_config_json_is_validated_by_the_model_alone(tmp_path):
    """The data may be on another machine, where their `validate` would look for them."""
    for part in ("data", "model"):
        path = validating(tmp_path / part, part)
        (path.parent / "config.json").write_text(to_json(config_flags.load(str(path), [])))
    experiment = finished.load_experiment(str(tmp_path / "data"))
    with pytest.raises(UserError, match=r"Linear\.validate\(\) fails in line 19 of model.py with"):
        finished.load_experiment(str(tmp_path / "model"))
    experiment.data.global_batch_size = 0
    with pytest.raises(UserError, match=r"data\.global_batch_size is 0"):
        own_code.validate_recorded(experiment)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("on_bad_record", "nope"),
        ("compression", "rar"),
        ("service", "not an address"),
        ("cache_gb", -1.0),
    ],
)
def test_fields_that_users_data_derive_are_validated_by_the_class_that_has_them(
    field, value, tmp_path
):
    derived = projects.DATA.replace("(tftpu.DataConfig)", "(Records)")
    derived += "\n    def validate(self):\n        super().validate()\n        1 / 0\n"
    derived = f"from tftpu.input_pipelines.sources import Records\n{derived}"
    path = projects.write(tmp_path, "loss='mse'", data=derived)
    spec = {"name": "tfrecord", "data_dir": "a", "spec": ["x: float32[4]", "y: float32[1]"]}
    plain = json.loads(to_json(config_flags.load(str(path), [])))
    plain["data"] |= spec
    (tmp_path / "config.json").write_text(json.dumps(plain))
    finished.load_experiment(str(tmp_path))
    plain["data"][field] = value
    (tmp_path / "config.json").write_text(json.dumps(plain))
    with pytest.raises(UserError, match=rf"data\.{field}"):
        finished.load_experiment(str(tmp_path))
