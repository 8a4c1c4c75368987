"""A config file is imported under its own name, with its neighbours, from any folder."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import projects
from tftpu.errors import UserError
from tftpu.launch import config_flags, own_code


@pytest.fixture(autouse=True)
def _path(monkeypatch):
    """Leaves `sys.path` as it was, and no module of a project loaded."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name in ("mine", "model", "data", "losses", "other"):
            del sys.modules[name]


def test_the_folder_of_the_config_is_what_travels(tmp_path, monkeypatch):
    projects.write(tmp_path / "a", "loss='mse'")
    monkeypatch.chdir(tmp_path)
    code = own_code.own_code("a/mine.py")
    assert (code.folder, code.module) == (tmp_path / "a", "mine")
    assert code.file == tmp_path / "a" / "mine.py"
    assert own_code.own_code("digits_resnet") is None


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
        "from tftpu.launch import config_flags\n"
        "e = config_flags.load('mine.py', [])\n"
        "print(type(e.model).__module__, type(e.data).__qualname__)\n"
    )
    done = subprocess.run(
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
        ({"mine": "x = 1\n"}, "has no function get_config()"),
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
