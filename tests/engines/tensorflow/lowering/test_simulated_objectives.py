"""Own loss functions and objectives, traced through the real TPUStrategy on a simulated slice."""

import keras
import pytest
import tensorflow as tf

import tftpu
from tests.support.models.own_losses import (
    Encoder,
    Gan,
    contrastive_loss,
    critic_loss,
    generator_loss,
)
from tests.support.steps.simulated_slice import REPLICAS, TPU_ONLY, replica_ops
from tftpu.config import TrainConfig
from tftpu.engines.tensorflow import feed, internals
from tftpu.engines.tensorflow.step.loops import build_device_loop

SHARE = (tf.TensorSpec((8, 6)), tf.TensorSpec((8, 3)))


def traced(engine, model, objectives) -> list[tf.Operation]:
    """Returns the ops of the programs of a device loop."""
    executor = engine.prepare(model, TrainConfig(), SHARE, objectives)
    step = executor.training(SHARE).step
    whole = [tf.zeros((2, REPLICAS * s.shape[0], *s.shape[1:])) for s in SHARE]
    data = tf.data.Dataset.from_tensor_slices(tuple(whole))
    loop = build_device_loop(engine.strategy, step.train, step.synchronise, step.turns)
    iterator = iter(feed.distribute(data, engine.strategy))
    with engine.scope():
        graph = loop.get_concrete_function(iterator, tf.constant(2)).graph
    return replica_ops(graph)


@pytest.mark.slow
def test_objectives_that_take_turns_trace_with_a_program_for_each_turn():
    engine = tftpu.simulated_slice("v3-8")
    with engine.scope():
        gan = Gan()
        objectives = [
            tftpu.Objective(critic_loss, gan.critic, keras.optimizers.Adam()),
            tftpu.Objective(generator_loss, gan.generator, keras.optimizers.SGD(), every=3),
        ]
    ops = traced(engine, gan, objectives)
    found = [op for op in ops if op.type == "CrossReplicaSum"]
    # The critic is trained in both programs, the generator in one.
    expected = 2 * len(gan.critic.trainable_variables) + len(gan.generator.trainable_variables)
    assert len(found) == expected
    assert {op.type for op in ops if not internals.has_xla_kernel(op.type)} <= TPU_ONLY


@pytest.mark.medium
def test_a_gathering_loss_traces_with_its_collectives():
    engine = tftpu.simulated_slice("v3-8")
    with engine.scope():
        model = Encoder()
        optimizer = keras.optimizers.SGD()
    ops = traced(engine, model, [tftpu.Objective(contrastive_loss, None, optimizer)])
    found = [op for op in ops if op.type == "CrossReplicaSum"]
    # Its values, their gradient, and those of the weights.
    assert len(found) == 2 + len(model.trainable_variables)
    assert {op.type for op in ops if not internals.has_xla_kernel(op.type)} <= TPU_ONLY
