"""The base class of models in a config: the zoo's families, and a user's own."""

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

    Derive a dataclass: its fields become `--config.model.FIELD` on the command line. The families
    of the zoo are such classes.

    Attributes:
        name: name of the Keras model.
        init_from: initial weights, as `tftpu.models.load_weights` accepts them.
        freeze: globs over the paths of variables that are not trained, such as
            "stem*,stage1_*".
        lora: rank of low-rank adapters, which alone are trained, beside a classifier: LoRA (Hu et
            al. 2021, https://arxiv.org/abs/2106.09685); 0 trains the weights themselves.
        lora_targets: globs over the paths of the layers to adapt, such as "*_attention/*"; "" is
            all dense layers but the outputs.
        lora_base: int8 or int4 rounds the kernels of adapted layers: QLoRA (Dettmers et al. 2023,
            https://arxiv.org/abs/2305.14314); "" keeps them.
        base_fields: the fields that say where the base weights of adapters are. Not a field.

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
        """Returns the Keras model, not compiled; called in the scope of the devices.

        It may be called several times, for example by `tftpu preflight`.
        """
        raise UserError(
            f"{type(self).__name__} has no method build(self): add one that returns a Keras model."
        )

    def without_weights(self) -> "ModelConfig":
        """Returns the same model with random weights if `build` reads some: no trace can read."""
        return self

    def prepare_data(self, data: DataConfig) -> DataConfig:
        """Returns the data as the model takes them, such as texts as tokens.

        Args:
            data: the data of the experiment.
        """
        return data

    def objectives(self, model: "keras.Model") -> "Sequence[Objective]":
        """Returns loss functions of your own, each with its variables and its optimizer.

        They replace the loss, the metrics and the optimizer of the experiment; see
        `tftpu.Objective`. An empty sequence keeps those.

        Args:
            model: the model as `build` returned it.
        """
        return ()

    def validate(self, batch: PerReplicaBatch) -> None:
        """Raises `UserError` for a value that the model does not allow.

        Args:
            batch: the part of a global batch that one replica computes at a time.
        """
