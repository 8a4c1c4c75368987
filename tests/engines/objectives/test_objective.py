"""`Objective` and `objectives=`: a wrong call says what to write."""

import keras
import pytest

import tftpu
from tests.support.models.strategies import mlp
from tftpu.errors import UserError


def loss_fn(model, batch, training):
    return model(batch[0])[:, 0]


def objective(**arguments) -> tftpu.Objective:
    return tftpu.Objective(
        **{"loss_fn": loss_fn, "variables": None, "optimizer": "sgd"} | arguments
    )


WRONG = {
    "a fraction of a step": ({"every": 1.5}, r"every is 1\.5: it must be a whole number"),
    "no step": ({"every": 0}, "every is 0"),
    "the name of a layer": ({"variables": "dense"}, "variables is the text 'dense': pass a layer"),
    "a variable": ({"variables": keras.Variable(1.0)}, "variables is Variable: pass a layer"),
    "an optimizer's name": (
        {"optimizer": "adma"},
        r"'adma', which Keras does not have\. Did you mean 'adam",
    ),
    "no optimizer": ({"optimizer": None}, "optimizer is a NoneType: pass a Keras optimizer"),
    "two parameters": (
        {"loss_fn": lambda model, batch: 0.0},
        r"takes \(model, batch\), but it is called with \(model, batch, training\)",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_objective_says_what_to_write(case):
    arguments, sentence = WRONG[case]
    with pytest.raises(UserError, match=sentence):
        objective(**arguments)


def test_wrong_lists_of_objectives_say_what_to_write():
    for given, sentence in (
        (objective(), r"pass a list, objectives=\[Objective\(\.\.\.\)\]"),
        ([loss_fn], r"holds a function: each item must be a tftpu\.Objective"),
        ([objective(), objective()], "Two objectives have the name 'loss_fn'"),
    ):
        with pytest.raises(UserError, match=sentence):
            tftpu.Trainer(mlp(), objectives=given)


def test_functions_with_defaults_methods_and_callables_are_taken():
    class Loss:
        def __call__(self, model, batch, training, scale=1.0):
            return loss_fn(model, batch, training)

    assert objective(loss_fn=Loss()).name == "objective"
    assert objective(loss_fn=lambda *args: 0.0, every=2).every == 2
