"""The outputs of the model that are predicted, and the names of its classes."""

from typing import Any

from tftpu.config import Experiment
from tftpu.errors import UserError
from tftpu.launch.run import finished


class OutputSelector:
    """A function that changes the run's model to one with the requested outputs.

    Args:
        outputs: names of outputs; None for the classes of a classifier, or else the logits.

    Attributes:
        outputs: the names of the outputs; set once the model is built.
        probabilities: whether the model returns probabilities; set once it is built.
        shape: the shape of the model's outputs; set once it is built.
    """

    def __init__(self, outputs: list[str] | None):
        self.outputs = outputs or []
        self.probabilities = False
        self.shape: Any = ()

    @property
    def classifies(self) -> bool:
        """True if classes are requested."""
        return bool({"classes", "top5"} & set(self.outputs))

    def __call__(self, model: Any) -> Any:
        from tftpu.inference.prediction import outputs

        self.outputs = self.outputs or [outputs.choose_default(model)]
        self.shape = getattr(model, "output_shape", ())
        if self.classifies:
            self.probabilities = outputs.has_probabilities(model)
        if "embedding" not in self.outputs:
            return model
        changed = outputs.add_embedding(model)
        changed.compile(optimizer=model.optimizer)
        return changed


def read_class_names(experiment: Experiment, changed: OutputSelector) -> list[str] | None:
    """Returns the class names of the model that `changed` was called with; None if unknown here.

    Raises:
        UserError: the number of names differs from the model's number of classes.
    """
    names = finished.read_class_names(experiment)
    classes = changed.shape[-1] if isinstance(changed.shape, tuple) and changed.shape else None
    if names is not None and classes is not None and len(names) != classes:
        raise UserError(
            f"{type(experiment.data).__name__}.class_names() returns {len(names)} names, but the "
            f"model has {classes} classes."
        )
    return names
