"""A model of KerasHub in a config. Like `tftpu.models.sizes`, this file imports no Keras."""

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar

from tftpu.config import DataConfig, ModelConfig, PerReplicaBatch
from tftpu.config.validation import at_least, one_of
from tftpu.errors import UserError

if TYPE_CHECKING:
    import keras


@dataclasses.dataclass
class KerasHub(ModelConfig):
    """A model of KerasHub: a task with its preprocessor, or a backbone alone.

    The task's preprocessor is applied to the data, which are therefore texts, or images with
    pixels from 0 to 255. If the experiment has no loss, it gets the loss and the metrics with which
    KerasHub compiles the task.

    Args:
        preset: a name of KerasHub such as "gemma3_1b", a local folder, or an address that begins
            with gs://, hf:// or kaggle://.
        task: the name of KerasHub's task class in lower case, such as "causal_lm" or
            "image_classifier"; "": the backbone, which takes prepared arrays and needs a loss.
        weights: "preset", or "none" for random weights.
        overrides: arguments of the backbone that differ from the preset's, such as {"num_layers":
            2}; only with random weights.
        num_classes: the number of classes of a classifier; 0: as in the preset.
        sequence_length: the number of tokens to which texts are cut or padded; 0: as in the preset.

    Example:

    ```python
    tftpu.KerasHub("gemma3_1b", task="causal_lm", lora=8)
    ```
    """

    preset: str = ""
    task: str = ""
    _: dataclasses.KW_ONLY
    weights: str = "preset"
    overrides: dict[str, Any] = dataclasses.field(default_factory=dict)
    num_classes: int = 0
    sequence_length: int = 0
    # The fields of `ModelConfig`, repeated here so that `preset` and `task` can be positional.
    name: str = ""
    init_from: str = ""
    freeze: str = ""
    lora: int = 0
    lora_targets: str = ""
    lora_base: str = ""
    base_fields: ClassVar[tuple[str, ...]] = ("preset",)

    def validate(self, batch: PerReplicaBatch) -> None:
        if not self.preset:
            raise UserError(
                "model.preset is empty: give a preset of KerasHub, such as gemma3_1b, or the "
                "folder of one."
            )
        one_of("model.weights", self.weights, ("preset", "none"))
        at_least("model.num_classes", self.num_classes, 0)
        at_least("model.sequence_length", self.sequence_length, 0)
        if self.overrides and self.weights == "preset":
            raise UserError(
                f"model.overrides={self.overrides} changes the backbone, which the weights of the "
                "preset do not fit: set model.weights=none for random ones."
            )
        if self.init_from:
            raise UserError(
                f"model.init_from={self.init_from} is for models of the zoo: name the folder of a "
                "preset with these weights as model.preset. `tftpu export RUN --format=preset` "
                "writes one from a run. For a weight file, call model.load_weights(FILE) and "
                "model.save_to_preset(FOLDER) of KerasHub."
            )

    def build(self) -> "keras.Model":
        from tftpu.models.keras_hub import presets

        return presets.load_model(self)

    def without_weights(self) -> "KerasHub":
        return dataclasses.replace(self, weights="none")

    def prepare_data(self, data: DataConfig) -> DataConfig:
        from tftpu.models.keras_hub import prepared

        return prepared.PreparedData(
            data.name, data.global_batch_size, data.data_dir, source=data, model=self
        )
