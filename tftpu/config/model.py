"""The base class of the models in configs, both those of `tftpu.models` and users' classes."""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from tftpu.config.data import DataConfig
from tftpu.config.per_replica_batch import PerReplicaBatch
from tftpu.errors import UserError

if TYPE_CHECKING:
    import keras

    from tftpu.engines.objectives.objective import Objective


@dataclasses.dataclass
class ModelConfig:
    """Hyper-parameters of a model, and how to build it.

    Derive a dataclass: its fields become `--config.model.FIELD` on the command line. The configs in
    `tftpu.models` are such classes.

    Attributes:
        name: name of the Keras model.
        init_from: initial weights, as `tftpu.models.load_weights` accepts them.
        freeze: comma-separated globs over the paths of variables that are not trained, such as
            "stem*,stage1_*".
        lora: rank of low-rank adapters: LoRA (Hu et al. 2021, https://arxiv.org/abs/2106.09685).
            Only adapters and, without `lora_targets`, a classifier are trained; 0 adds no adapters.
        lora_targets: comma-separated globs over the paths of the layers to adapt, such as
            "*_attention/*"; "" adapts all dense layers except the outputs.
        lora_base: int8 or int4 quantizes the kernels of adapted layers: QLoRA (Dettmers et al.
            2023, https://arxiv.org/abs/2305.14314); "" keeps their dtype.
        base_fields: names of the fields that say where the base weights are; a class variable.

    Example:

    ```python
    @dataclasses.dataclass
    class Perceptron(tftpu.ModelConfig):
        width: int = 64

        def build(self):
            layers = [keras.layers.Dense(self.width, "relu"), keras.layers.Dense(10)]
            return keras.Sequential([keras.Input((784,)), *layers])
    ```
    """

    name: str = ""
    init_from: str = ""
    freeze: str = ""
    lora: int = 0
    lora_targets: str = ""
    lora_base: str = ""
    base_fields: ClassVar[tuple[str, ...]] = ("init_from",)

    def build(self) -> "keras.Model":
        """Returns the Keras model, not compiled; called within the scope of the run's devices.

        It may be called several times, for example by `tftpu preflight`.
        """
        raise UserError(
            f"{type(self).__name__} has no method build(self): add one that returns a Keras model."
        )

    def without_weights(self) -> "ModelConfig":
        """Returns a config of the same model with random weights, whose `build` reads no files."""
        return self

    def prepare_data(self, data: DataConfig) -> DataConfig:
        """Returns the data prepared for the model, for example texts as tokens.

        Args:
            data: the data of the experiment.
        """
        return data

    def objectives(self, model: "keras.Model") -> "Sequence[Objective]":
        """Returns custom loss functions, each with its variables and its optimizer.

        They replace the loss, the metrics and the optimizer of the experiment; see
        `tftpu.Objective`. An empty sequence keeps those of the experiment.

        Args:
            model: the model as `build` returned it.
        """
        return ()

    def validate(self, batch: PerReplicaBatch) -> None:
        """Raises `UserError` for a value that the model does not allow.

        Args:
            batch: the part of a global batch that one replica computes at a time.
        """
