"""The module file of the pipeline: Transform calls `preprocessing_fn`, the Trainer `run_fn`."""

import dataclasses

import tftpu
from tftpu.launch import tfx

MEASURES = ("petal_length", "petal_width", "sepal_length", "sepal_width")


def preprocessing_fn(inputs):
    """Returns scaled measures, and numbers for the texts."""
    import tensorflow_transform as tft

    found = {f"{name}_scaled": tft.scale_to_z_score(inputs[name]) for name in MEASURES}
    for name in ("field", "species"):
        found[f"{name}_id"] = tft.compute_and_apply_vocabulary(inputs[name])
    return found


@dataclasses.dataclass
class Classifier(tftpu.ModelConfig):
    """A network of one hidden layer over the measures, with an embedding of the field."""

    width: int = 16

    def build(self):
        import keras
        from keras import layers

        given = {f"{name}_scaled": keras.Input((1,), name=f"{name}_scaled") for name in MEASURES}
        field = keras.Input((1,), name="field_id", dtype="int64")
        embedded = layers.Flatten()(layers.Embedding(2, 3, name="field")(field))
        hidden = layers.Concatenate()([*given.values(), embedded])
        hidden = layers.Dense(self.width, "relu", name="hidden")(hidden)
        logits = layers.Dense(3, name="logits")(hidden)
        return keras.Model({**given, "field_id": field}, logits)


def get_config() -> tftpu.Experiment:
    """Returns the experiment; the pipeline says where the examples are, and how many steps."""
    return tftpu.Experiment(
        model=Classifier(),
        data=tfx.Examples(label="species_id", global_batch_size=16),
        optimizer=tftpu.OptimizerConfig(name="adam", learning_rate=0.02),
        train=tftpu.TrainConfig(steps=200, eval_every=50, best_metric="accuracy"),
    )


def _of_raw_examples() -> tftpu.Experiment:
    config = get_config()
    config.data = dataclasses.replace(config.data, transformed=False)
    return config


def run_fn(fn_args):
    """Trains the same on raw examples, which go through the transform graph as they are read."""
    tfx.run_fn(fn_args, _of_raw_examples)
