"""Writes the model of a pipeline in the form that TensorFlow Serving and TFX's Evaluator read."""

import dataclasses
from typing import Any

import tensorflow as tf

from tftpu.config import Experiment
from tftpu.inference.exporting.inputs import Input
from tftpu.inference.exporting.serving import Serving
from tftpu.launch.run import finished
from tftpu.launch.run.experiment import build_plain_model
from tftpu.launch.tfx import base
from tftpu.launch.tfx.features import Features
from tftpu.launch.tfx.transform import SERIALIZED, Transform


def write(experiment: Experiment, workdir: str, to: str) -> None:
    """Writes the best checkpoint of a run as a SavedModel that takes raw, serialized examples.

    Its signature `serving_default` maps examples to the model's outputs. If there is a transform
    graph, `transform_features` maps examples with labels to transformed features.

    Args:
        experiment: the experiment of the run.
        workdir: folder of the run.
        to: the folder of the SavedModel.
    """
    cluster = dataclasses.replace(
        experiment.cluster, tpu="none", engine="tensorflow", virtual_devices=None
    )
    train = dataclasses.replace(experiment.train, precision="float32")
    experiment = dataclasses.replace(experiment, cluster=cluster, train=train)
    trainer, step, _ = finished.restore_without_data(experiment, workdir)
    data: Any = experiment.data
    features = Features(data)
    raw, model = features.select_served(), build_plain_model(experiment, trainer)
    serving = Serving(
        model,
        [Input("examples", (), "string")],
        lambda serialized: features.from_raw(serialized, raw),
    )
    module: Any = serving.module()
    signatures = {"serving_default": serving.function.get_concrete_function()}
    if features.transform:
        module.transform = features.transform.layer  # to save its tables and vocabularies, too
        signatures["transform_features"] = _trace_transform(features.transform)
    tf.saved_model.save(module, to, signatures)
    base.write(model, to)
    print(f"step {step}: {to}, from examples with {', '.join(raw)}", flush=True)


def _trace_transform(transform: Transform) -> Any:
    """Returns the function that maps raw examples with labels to transformed features."""

    def transformed(serialized: Any) -> dict[str, Any]:
        found = transform(serialized, transform.raw)
        # A signature returns dense tensors only.
        return {name: value for name, value in found.items() if isinstance(value, tf.Tensor)}

    function: Any = tf.function(transformed, input_signature=[SERIALIZED], autograph=False)
    return function.get_concrete_function()
