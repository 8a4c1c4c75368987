"""The digest of frozen weights that checkpoints leave out."""

import keras
import numpy as np
import pytest

import tftpu
from tftpu.checkpoint.frozen_base import Base
from tftpu.engines.leaf import Leaf


class Alone:
    """Hosts that are one."""

    exchange = None


class Exchange:
    """Values that hosts give each other, of those that gave before."""

    def __init__(self, others: list[str]):
        self.given: list[str] = []
        self._others = others

    def collect(self, name: str, text: str) -> list[str]:
        self.given.append(text)
        return [text, *self._others]

    def announce(self, name: str, text: str) -> str:
        return text


class Several:
    """A host among several."""

    def __init__(self, others: list[str]):
        self.exchange = Exchange(others)


def leaf(name: str, value: np.ndarray, parts=None, written=None) -> Leaf:
    whole = (tuple((0, size) for size in value.shape),)
    held = tuple(parts or whole)

    def read(region):
        return value[tuple(slice(*bounds) for bounds in region)]

    return Leaf(name, value.shape, str(value.dtype), held, tuple(written or held), read, print)


def digest(leaves: list[Leaf], hosts=Alone, paths=("a", "b")) -> str:
    hosts = hosts() if isinstance(hosts, type) else hosts
    return Base(paths, lambda: {"model": leaves, "step": []}, hosts).digest


@pytest.fixture
def values() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {"a": rng.normal(size=(6, 4)).astype("float32"), "b": rng.integers(0, 9, 5, "int8")}


def test_the_digest_does_not_depend_on_how_devices_divide_a_variable(values):
    whole = digest([leaf(name, value) for name, value in values.items()])
    quarters = [((i, i + 3), (j, j + 2)) for i in (0, 3) for j in (0, 2)]
    assert digest([leaf("a", values["a"], quarters), leaf("b", values["b"])]) == whole


def test_the_digest_does_not_depend_on_how_hosts_divide_a_variable(values):
    whole = digest([leaf(name, value) for name, value in values.items()])
    halves = [((0, 3), (0, 4)), ((3, 6), (0, 4))]
    other = Several([])
    second = [leaf("a", values["a"], halves, halves[1:]), leaf("b", values["b"], None, [((0, 0),)])]
    digest(second, other)
    first = [leaf("a", values["a"], halves, halves[:1]), leaf("b", values["b"])]
    assert digest(first, Several(other.exchange.given)) == whole


@pytest.mark.parametrize("change", ["element", "swap", "names"])
def test_the_digest_changes_with_the_values_and_their_places(values, change):
    before = digest([leaf(name, value) for name, value in values.items()])
    a, b = values["a"].copy(), values["b"]
    if change == "element":
        a[2, 1] = np.nextafter(a[2, 1], 9)
    if change == "swap":
        a[[0, 1]] = a[[1, 0]]
    names = ("b", "a") if change == "names" else ("a", "b")
    assert digest([leaf(names[0], a), leaf(names[1], b)]) != before


def test_weights_that_are_saved_do_not_count(values):
    base = digest([leaf("a", values["a"])])
    assert digest([leaf("a", values["a"]), leaf("adapter", values["b"])]) == base
    assert digest([leaf("a", values["a"])], paths=()) == ""


def test_after_a_refusal_the_right_weights_are_accepted(values):
    held = dict(values)
    right = Base(("a",), lambda: {"model": [leaf("a", held["a"])]}, Alone()).digest
    held["a"] = values["a"] + 1
    other = Base(("a",), lambda: {"model": [leaf("a", held["a"])]}, Alone())
    with pytest.raises(
        tftpu.UserError, match="Load the weights that the adapters were trained with"
    ):
        other.check({"base": right}, "runs/x")
    held["a"] = values["a"]
    other.check({"base": right}, "runs/x")


def test_what_checkpoints_leave_out_are_frozen_weights():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3, name="h")])
    frozen = keras.Sequential([model, keras.layers.Dense(1, name="o")])
    frozen.build((None, 2))
    model.trainable = False
    state = {"model": [leaf(v.path, v.numpy()) for v in frozen.weights]}
    kernel, trained = model.weights[0].path, frozen.trainable_variables[0].path
    Base((kernel,), lambda: state, Alone()).begin(frozen)
    for path in (trained, "nothing"):
        with pytest.raises(tftpu.UserError, match=f"base has '{path}'.* frozen weights"):
            Base((path,), lambda: state, Alone()).begin(frozen)
    with pytest.raises(tftpu.UserError, match=r"is a string: give a collection"):
        Base(kernel, lambda: state, Alone())
