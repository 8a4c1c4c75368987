"""Values of config fields, parsed by their declared types."""

import dataclasses
import functools
import sys
from collections.abc import Sequence
from typing import Any, Literal

import pytest

from tests.support import projects
from tftpu.errors import UserError
from tftpu.launch.commands.training.config import show
from tftpu.launch.settings import config_flags, config_values

Activation = Literal["relu", "tanh"]
VALUES = [
    (int, "5", 5),
    (float, "1e-3", 0.001),
    (float, "2", 2.0),
    (int, "64.0", 64),
    (int, "1e3", 1000),
    *((bool, text, True) for text in ("true", "True", "1")),
    *((bool, text, False) for text in ("false", "0")),
    (str, "a,b 'c'", "a,b 'c'"),
    (str | None, "None", None),
    (int | str, "32", 32),
    (str | int, "32", 32),
    (int | str, "global", "global"),
    (Activation, "tanh", "tanh"),
    (Activation | None, "none", None),
    (Literal[1, "1x", None], "1", 1),
    (tuple[float, ...], "(1,2)", (1.0, 2.0)),
    (tuple[int, ...], "5", (5,)),
    (tuple[int, ...], "()", ()),
    (tuple[int, ...], "[1, 2,]", (1, 2)),
    (tuple[int, str], "(1,a)", (1, "a")),
    (list[str], "a,b", ["a", "b"]),
    (list[str], "['a', 'b,c']", ["a", "b,c"]),
    (list[Activation], "(relu,tanh)", ["relu", "tanh"]),
    (tuple[tuple[int, int], ...], "(1,2),(3,4)", ((1, 2), (3, 4))),
    (tuple[tuple[int, int], ...], "((1,2),(3,4))", ((1, 2), (3, 4))),
    (Sequence[int], "1,2", (1, 2)),
]


@pytest.mark.parametrize(("kind", "text", "value"), VALUES)
def test_a_text_becomes_a_value_of_the_declared_type(kind, text, value):
    found = config_values.parse(text, kind)
    assert (found, type(found)) == (value, type(value))
    if isinstance(value, tuple):
        assert [*map(type, found)] == [*map(type, value)]


@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        (int, "1.5", "a whole number"),
        (bool, "yes", "true or false"),
        (float | None, "x", "a number, or none"),
        (Activation, "elu", "one of relu, tanh"),
        (tuple[int, ...], "(1,x)", "whole numbers in brackets, as (2,2,2,2)"),
        (tuple[int, str], "(1,a,b)", "2 values in brackets: a whole number, text"),
        (list[Activation], "relu,elu", "values in brackets, each one of relu, tanh"),
        (tuple[tuple[int, int], ...], "((1,2),(3,4,5))", "each 2 values in brackets"),
        (tuple[int, ...], "[" * 200, "whole numbers in brackets"),
    ],
)
def test_another_text_is_refused_in_words(kind, text, words):
    with pytest.raises(ValueError):
        config_values.parse(text, kind)
    assert words in config_values.describe_kind(kind)


@pytest.mark.parametrize("name", config_flags.list_names())
def test_every_line_of_config_show_is_a_flag_that_changes_nothing(name):
    config = config_flags.load(name, [])
    lines = show.iterate_lines("config", config)
    flags = [f"--{path}={text}" for path, text in lines if _is_a_value(config, path, text)]
    assert len(flags) > 30
    assert config_flags.load(name, flags) == config


def _is_a_value(config: Any, path: str, text: str) -> bool:
    value = functools.reduce(getattr, path.split(".")[1:], config)
    length = path in ("config.train.epochs", "config.callbacks", "config.config_file")
    return not dataclasses.is_dataclass(value) and text != "''" and not length


MODEL = """
from __future__ import annotations
import dataclasses
from typing import Any, Literal
import tftpu

@dataclasses.dataclass
class Options:
    depth: int = 1

@dataclasses.dataclass
class Linear(tftpu.ModelConfig):
    width: int = 1
    bias: bool = False
    activation: Literal["relu", "tanh"] = "relu"
    layers: list[str] = dataclasses.field(default_factory=list)
    options: Options = dataclasses.field(default_factory=Options)
    table: dict[str, int] = dataclasses.field(default_factory=dict)
"""


@pytest.fixture
def path(monkeypatch, tmp_path):
    """A project whose file has `from __future__ import annotations`."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield str(projects.write(tmp_path, "loss='mse'", model=MODEL))
    for name in ("mine", "model", "data"):
        sys.modules.pop(name, None)


def test_annotations_may_be_text(path):
    flags = ["width=9", "bias=true", "activation=tanh", "layers=a,b", "options.depth=3"]
    model: Any = config_flags.load(path, [f"--config.model.{flag}" for flag in flags]).model
    assert (model.width, model.bias, model.options.depth) == (9, True, 3)
    assert (model.activation, model.layers) == ("tanh", ["a", "b"])


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("activation=elu", "activation=elu: the value must be one of relu, tanh."),
        ("table=5", "cannot be set on the command line, because its type is dict[str, int]"),
    ],
)
def test_a_value_of_another_type_is_named(flag, message, path):
    with pytest.raises(UserError) as error:
        config_flags.load(path, [f"--config.model.{flag}"])
    assert message in str(error.value)


def test_a_type_that_is_not_imported_is_named(path, tmp_path):
    (tmp_path / "model.py").write_text(MODEL.replace("import Any, Literal", "import Any"))
    with pytest.raises(UserError, match="The type of a field of Linear is not defined"):
        config_flags.load(path, ["--config.model.width=9"])


@pytest.mark.parametrize("name", ["metrics", "weighted_metrics"])
def test_none_means_no_metrics(name):
    config = config_flags.load("digits_resnet", [f"--config.{name}=AUC", f"--config.{name}=none"])
    assert getattr(config, name) == ()
