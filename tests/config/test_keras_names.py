"""The names of losses and metrics, which a config is checked for without Keras, are Keras's."""

import subprocess
import sys

import keras
import pytest

from tftpu.config import keras_names
from tftpu.errors import UserError

ABSTRACT = ("Loss", "LossFunctionWrapper", "Metric", "metric", "MeanMetricWrapper")


def made_by_name(module) -> set[str]:
    """Returns the names that a module of Keras makes an object of."""
    found = set()
    for name in module.ALL_OBJECTS_DICT:
        try:
            module.get(name)
        except TypeError:  # it needs arguments
            continue
        found.add(name)
    return found.difference(ABSTRACT)


def test_the_names_are_those_that_keras_makes_objects_of():
    losses, metrics = keras.src.losses, keras.src.metrics
    assert set(keras_names.LOSSES) == made_by_name(losses)
    assert set(keras_names.METRICS) - {"acc"} == made_by_name(metrics)
    others = set(metrics.ALL_OBJECTS_DICT) - made_by_name(metrics) - set(ABSTRACT)
    assert set(keras_names.WITH_ARGUMENTS) == others - {"mean_metric_wrapper"}


@pytest.mark.parametrize("value", ["mse", {"a": ["mae", None], "b": ("hinge",)}, None, (), 3])
def test_names_that_keras_has_are_accepted_wherever_they_stand(value):
    keras_names.check_losses("loss", value)
    keras_names.check_metrics("metrics", value)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("sparse_crossentropy", "Did you mean 'sparse_categorical_crossentropy'?"),
        ("SparseCrossentropy", "Did you mean 'SparseCategoricalCrossentropy'?"),
        ("crossentropy", "has nothing of that name"),
        ("Mse", "has nothing of that name"),
    ],
)
def test_another_name_is_unknown_and_the_nearest_is_suggested(name, said):
    with pytest.raises(UserError) as error:
        keras_names.check_losses("loss", {"a": ("mse", name)})
    assert f"loss is {name!r}" in str(error.value) and said in str(error.value)


def test_a_wrong_name_is_said_before_tensorflow_or_keras_is_loaded(tmp_path):
    code = (
        "import sys\n"
        "from tftpu.launch.main import main\n"
        "code = main(['train', '--config=digits_resnet', '--config.loss=crossentropy'])\n"
        "print(code, {'tensorflow', 'keras', 'jax'} & set(sys.modules))"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout == "2 set()\n", done.stderr
    assert "loss is 'crossentropy'" in done.stderr and "smoothing" not in done.stderr


def test_the_direction_of_a_metric_is_keras_own_under_each_of_its_names():
    """The result of metrics=["MSE"] has the name "MSE"."""
    for name in sorted(set(keras_names.METRICS) - {"acc"}):
        direction = getattr(keras.metrics.get(name), "_direction", None)
        if direction is not None:
            assert keras_names.smaller_is_better(name) == (direction == "down"), name


@pytest.mark.parametrize(
    "name",
    [
        *("FalseNegatives", "false_positives", "falsenegatives", "RMSE", "glossary_loss", "bce_2"),
        *("bits_per_byte", "wer", "KLDivergence", "kl_divergence", "LogCoshError", "logcosh"),
        *("focalloss", "MeanSquaredError", "ranking_losses", "head_mean_absolute_error_1"),
        *("loss_giou", "loss1", "d_loss2", "mse24", "crossentropy2", "errorrate", "MSEScaled"),
    ],
)
def test_a_lower_value_is_better(name):
    assert keras_names.smaller_is_better(name)


@pytest.mark.parametrize(
    "name",
    [
        *("glossary_accuracy", "error_type_acc", "error_type_AUC", "noise_error_auc_1"),
        *("subcellular_f1_score", "subcellular_iou", "error_type_f1_score", "glossary_score"),
        *("answer", "MeanIoU", "accuracy_2", "top5_acc", "head_f1", "f1_score_1"),
    ],
)
def test_a_higher_value_is_better_whatever_the_output_is_called(name):
    assert not keras_names.smaller_is_better(name)
