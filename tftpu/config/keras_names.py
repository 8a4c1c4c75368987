"""Names of Keras's losses and metrics, and the metrics whose lower values are better.

Nothing here imports Keras.
"""

import re
from typing import Any

from tftpu.errors import UserError, did_you_mean


def _split_names(words: str) -> tuple[str, ...]:
    return tuple(words.split())


LOSSES = _split_names(
    """
    BCE BinaryCrossentropy BinaryFocalCrossentropy CTC CategoricalCrossentropy
    CategoricalFocalCrossentropy CategoricalHinge Circle CosineSimilarity Dice Hinge Huber KLD
    KLDivergence LogCosh MAE MAPE MSE MSLE MeanAbsoluteError MeanAbsolutePercentageError
    MeanSquaredError MeanSquaredLogarithmicError Poisson SparseCategoricalCrossentropy
    SquaredHinge Tversky bce binary_crossentropy binary_focal_crossentropy
    categorical_crossentropy categorical_focal_crossentropy categorical_hinge circle
    cosine_similarity ctc dice hinge huber kl_divergence kld log_cosh mae mape
    mean_absolute_error mean_absolute_percentage_error mean_squared_error
    mean_squared_logarithmic_error mse msle poisson sparse_categorical_crossentropy
    squared_hinge tversky
    """
)
METRICS = _split_names(
    """
    acc
    AUC Accuracy BCE BinaryAccuracy BinaryCrossentropy BinaryIoU CategoricalAccuracy
    CategoricalCrossentropy CategoricalHinge ConcordanceCorrelation CosineSimilarity F1Score
    FBetaScore FalseNegatives FalsePositives Hinge KLDivergence LogCoshError MAE MAPE MSE MSLE
    Mean MeanAbsoluteError MeanAbsolutePercentageError MeanSquaredError
    MeanSquaredLogarithmicError PearsonCorrelation Poisson Precision R2Score Recall
    RootMeanSquaredError SparseCategoricalAccuracy SparseCategoricalCrossentropy
    SparseTopKCategoricalAccuracy SquaredHinge Sum TopKCategoricalAccuracy TrueNegatives
    TruePositives accuracy auc bce binary_accuracy binary_crossentropy binary_io_u
    categorical_accuracy categorical_crossentropy categorical_hinge concordance_correlation
    cosine_similarity f1_score f_beta_score false_negatives false_positives hinge kl_divergence
    log_cosh_error mae mape mean mean_absolute_error mean_absolute_percentage_error
    mean_squared_error mean_squared_logarithmic_error mse msle pearson_correlation poisson
    precision r2_score recall root_mean_squared_error sparse_categorical_accuracy
    sparse_categorical_crossentropy sparse_top_k_categorical_accuracy squared_hinge sum
    top_k_categorical_accuracy true_negatives true_positives
    """
)
# Metrics that Keras cannot create without arguments.
WITH_ARGUMENTS = _split_names(
    """
    IoU MeanIoU OneHotIoU OneHotMeanIoU PrecisionAtRecall RecallAtPrecision
    SensitivityAtSpecificity SpecificityAtSensitivity io_u mean_io_u one_hot_io_u
    one_hot_mean_io_u precision_at_recall recall_at_precision sensitivity_at_specificity
    specificity_at_sensitivity
    """
)
# Ends of words in the names of metrics for which lower is better.
_SMALLER_IS_BETTER = (
    *("loss", "losses", "error", "errors", "perplexity", "bits", "entropy", "divergence", "hinge"),
    *("poisson", "cosh", "mse", "mae", "mape", "msle", "bce"),
)
_SMALLER_WORDS = ("wer", "cer", "fid", "nll", "brier")  # the same as whole words
# Ends of names for which higher is better. The name of an output, such as "error_type" in
# "error_type_accuracy", may contain a word from above.
_LARGER_IS_BETTER = (
    *("acc", "accuracy", "auc", "iou", "io_u", "precision", "recall", "f1", "f1_score"),
)


def check_losses(field: str, value: Any) -> None:
    """Raises `UserError` unless all strings in a nested value are names of Keras's losses."""
    for name in texts_in(value):
        if name not in LOSSES:
            _refuse(field, name, "losses", LOSSES)


def check_metrics(field: str, value: Any) -> None:
    """Raises `UserError` unless all strings in a nested value name metrics without arguments."""
    for name in texts_in(value):
        if name in WITH_ARGUMENTS:
            raise UserError(
                f"{field} is {name!r}, which needs arguments: give an object of keras.metrics "
                "with its arguments, in a config file."
            )
        if name not in METRICS:
            _refuse(field, name, "metrics", METRICS)


def texts_in(value: Any) -> list[str]:
    """Returns the strings in a value and its nested lists, tuples and dicts; keys do not count."""
    if isinstance(value, str):
        return [value]
    is_nested = isinstance(value, list | tuple | dict)
    parts = value.values() if isinstance(value, dict) else value
    return [t for one in parts for t in texts_in(one)] if is_nested else []


def _refuse(field: str, name: str, module: str, known: tuple[str, ...]) -> None:
    alike = [one for one in known if one.islower() == name.islower()]
    raise UserError(
        f"{field} is {name!r}, but keras.{module} has nothing of that "
        f"name.{did_you_mean(name, alike)}"
    )


def smaller_is_better(metric: str) -> bool:
    """Returns whether lower values of a metric are better, by its name."""
    # metrics=["MSE"] has the result "MSE", and FalseNegatives() without a name that of its class.
    name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", metric).lower()
    name = re.sub(r"_\d+$", "", name)  # Keras numbers a second metric of one name
    if name.endswith(_LARGER_IS_BETTER) and not name.startswith("loss_"):
        return False
    return any(
        word.endswith(_SMALLER_IS_BETTER)
        or word.startswith(("error", "false"))
        or word in _SMALLER_WORDS
        for word in (word.rstrip("0123456789") for word in re.split(r"[\W_]+", name))
    )
