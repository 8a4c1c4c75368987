"""The step traced through the real TPUStrategy class, on a simulated slice.

This runs all Python code of a TPU run, but no TPU hardware. Forbidden assignments in a replica,
dynamic shapes and ops that only the host can run fail here.
"""

import keras
import pytest
import tensorflow as tf

import tftpu
from tests.support.models.strategies import mlp
from tests.support.steps import reference
from tests.support.steps.simulated_slice import (
    REPLICAS,
    TPU_ONLY,
    assert_one_reduction_and_no_host_op,
    replica_ops,
    traced,
)
from tests.support.steps.step_cases import covering_set, optimizer_named
from tftpu import input_pipelines
from tftpu.config import TrainConfig
from tftpu.engines.tensorflow import feed, internals, xla_ops
from tftpu.engines.tensorflow.state import ModelState
from tftpu.engines.tensorflow.step.eval_step import EvalStep
from tftpu.engines.tensorflow.step.loops import build_device_loop
from tftpu.launch.run import experiment
from tftpu.launch.settings import config_flags
from tftpu.models.layers.normalization import GhostBatchNormalization


@pytest.mark.medium
@pytest.mark.parametrize("case", sorted({case[1:] for case in covering_set()}, key=str), ids=str)
def test_every_option_of_the_step_traces(case, slice_of_eight):
    gradient_accumulation_steps, optimizer, global_clipnorm, weighted, ema_momentum = case
    with slice_of_eight.scope():
        model = mlp()
        loss = keras.losses.SparseCategoricalCrossentropy(
            from_logits=True, reduction="mean_with_sample_weight"
        )
        model.compile(optimizer_named(optimizer), loss, weighted_metrics=["accuracy"])
    batch = [tf.TensorSpec((8, 6)), tf.TensorSpec((8,), tf.int64)]
    if weighted:
        batch.append(tf.TensorSpec((8,)))
    step, ops = traced(
        model,
        tuple(batch),
        gradient_accumulation_steps=gradient_accumulation_steps,
        global_clipnorm=global_clipnorm,
        ema_momentum=ema_momentum,
    )
    assert_one_reduction_and_no_host_op(step, ops)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16", "mixed_float16"])
@pytest.mark.parametrize("gradient_accumulation_steps", [1, 4])
def test_dropout_and_norms_trace_in_every_precision(
    policy, gradient_accumulation_steps, slice_of_eight
):
    keras.config.set_dtype_policy(policy)
    with slice_of_eight.scope():
        model = keras.Sequential(
            [
                keras.Input((6, 6, 2)),
                GhostBatchNormalization(2),
                keras.layers.Conv2D(4, 3),
                keras.layers.BatchNormalization(),
                keras.layers.Dropout(0.2),
                keras.layers.Flatten(),
                keras.layers.Dense(3, dtype="float32"),
            ]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer_named("sgd"), loss, metrics=["accuracy"])
    batch = (tf.TensorSpec((8, 6, 6, 2)), tf.TensorSpec((8,), tf.int64))
    step, ops = traced(
        model,
        batch,
        gradient_accumulation_steps=gradient_accumulation_steps,
        ema_momentum=reference.EMA,
    )
    assert_one_reduction_and_no_host_op(step, ops)
    # Counted while it trains: 4 x 4 places of 3 x 3 x 2 by 4, and 64 by 3, of 64 examples.
    assert step.model_flops == 3 * 2 * 64 * (16 * 18 * 4 + 64 * 3)


@pytest.mark.medium
def test_global_statistics_trace_and_communicate(slice_of_eight):
    with slice_of_eight.scope():
        norm = GhostBatchNormalization("global")
        layers = [keras.Input((6, 6, 2)), norm, keras.layers.Flatten(), keras.layers.Dense(3)]
        model = keras.Sequential(layers)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer_named("sgd"), loss)
    batch = (tf.TensorSpec((8, 6, 6, 2)), tf.TensorSpec((8,), tf.int64))
    _, ops = traced(model, batch)
    assert sum(op.type == "CrossReplicaSum" for op in ops) > len(model.trainable_variables) + 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "config", ["digits_resnet", pytest.param("python_gpt", marks=pytest.mark.slow)]
)
def test_the_configs_trace(config, slice_of_eight):
    settings = config_flags.load(config, [])
    settings.validate(REPLICAS)
    with slice_of_eight.scope():
        model = experiment.build_model(settings)
    share = settings.data.global_batch_size // REPLICAS
    batch = input_pipelines.batch_spec(settings.data, share)
    step, ops = traced(model, batch, global_clipnorm=settings.train.global_clipnorm)
    assert_one_reduction_and_no_host_op(step, ops)


@pytest.mark.medium
def test_the_trainers_loop_measures_time_only_on_the_host(slice_of_eight):
    """The clock for the input wait is read around the iterator, not in the TPU's program."""
    with slice_of_eight.scope():
        model = mlp()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer_named("sgd"), loss)
    data = tf.data.Dataset.from_tensor_slices((tf.zeros((128, 6)), tf.zeros(128, tf.int64)))
    data = data.batch(64, drop_remainder=True)
    engine = slice_of_eight
    executor = engine.prepare(model, TrainConfig(), engine.training_spec(data))
    train = executor.training(engine.training_spec(data))
    loop = build_device_loop(slice_of_eight.strategy, train.step.train, train.step.synchronise)
    iterator = iter(feed.distribute(data, slice_of_eight.strategy))
    graph = loop.get_concrete_function(iterator, tf.constant(2)).graph
    clocks = [op for op in xla_ops.list_graph_ops(graph) if op.type == "Timestamp"]
    assert len(clocks) == 2
    on_tpu = replica_ops(graph)
    assert not {id(op) for op in clocks} & {id(op) for op in on_tpu}
    assert_one_reduction_and_no_host_op(train.step, on_tpu)


def test_the_weight_norm_traces(slice_of_eight):
    with slice_of_eight.scope():
        model = mlp()
        model.compile(optimizer_named("sgd"), "mse")
        spec = tf.TensorSpec((8, 6)), tf.TensorSpec((8, 4))
        step = EvalStep(ModelState(model, spec, TrainConfig()))

    @tf.function(autograph=False)
    def norm():
        return slice_of_eight.strategy.run(step.compute_weight_norm)

    ops = replica_ops(norm.get_concrete_function().graph)
    assert not any(op.type in ("CrossReplicaSum", "AllToAll") for op in ops)
    assert {op.type for op in ops if not internals.has_xla_kernel(op.type)} <= TPU_ONLY


def test_the_check_finds_a_host_op(slice_of_eight):
    """The check can fail: a print formats a string."""

    class Printing(keras.losses.Loss):
        def call(self, y_true, y_pred):
            tf.print("here")
            return y_pred[:, 0]

    with slice_of_eight.scope():
        model = mlp()
        model.compile("sgd", Printing())
    batch = (tf.TensorSpec((8, 6)), tf.TensorSpec((8,), tf.int64))
    with pytest.raises(tftpu.UserError, match="StringFormat"):
        traced(model, batch)
