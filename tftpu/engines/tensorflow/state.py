"""The variables of a run: model, optimizer, averages, loss scale and step counter."""

import functools
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tftpu.config import TrainConfig
from tftpu.engines.base import BaseState
from tftpu.engines.leaf import Leaf
from tftpu.engines.objectives.objective import Objective
from tftpu.engines.tensorflow.leaves import build_leaves
from tftpu.tensors import Nest

Tensors = list[Any]  # a list of tensors


class ModelState(BaseState):
    """The variables of a model, for the strategy in whose scope this object is created.

    Args:
        model: the model, compiled unless there are objectives; this builds it if needed.
        batch_spec: the spec of one replica's shard: `(x, y)` or `(x, y, sample_weight)` of
            `tf.TensorSpec`s with static shapes, nested like the model's inputs.
        options: the options of the step; `ema_momentum` decides whether weight averages are kept.
        objectives: the objectives that replace the compiled loss and optimizer.
        labelled: whether batches have labels; without labels there are no objectives.

    Attributes:
        model: the Keras model.
        options: options of the step.
        replicas: number of replicas that share a global batch.
        groups: the objectives, in the order of their updates; a compiled loss counts as one.
        step: number of training steps done, () int64.
        averages: moving averages of the trainable weights; empty without `ema_momentum`.
        drawn_apart: the states of the seed generators whose random numbers differ between replicas
            and microbatches.
        drawn_by_example: the states of the seed generators whose random numbers depend on an
            example's position.

    Raises:
        UserError: the model cannot be trained as it is.
    """

    def __init__(
        self,
        model: keras.Model,
        batch_spec: Nest,
        options: TrainConfig,
        objectives: Sequence[Objective] = (),
        labelled: bool = True,
    ):
        super().__init__(model, batch_spec, options, objectives, labelled)
        self.replicas: int = tf.distribute.get_strategy().num_replicas_in_sync
        make = functools.partial(tf.Variable, trainable=False)
        self.step: Any = make(tf.zeros((), tf.int64), name="step")
        self.averages: list[Any] = []
        if options.ema_momentum is not None:
            self.averages = [
                make(
                    functools.partial(tf.identity, v),
                    shape=v.shape,
                    dtype=v.dtype,
                    name=f"ema/{v.path}",
                )
                for v in model.trainable_variables
            ]

    def read_trained_values(self) -> Tensors:
        """Returns the values of the trainable weights as tensors."""
        return [tf.convert_to_tensor(v.value) for v in self.model.trainable_variables]

    def select_evaluated_weights(self) -> Tensors:
        """Returns the weights that evaluation uses: the averages if there are any."""
        return [tf.convert_to_tensor(v) for v in self.averages] or self.read_trained_values()

    def compute_seeds(
        self, replica: Any, microbatch: Any, first_example: Any, part: int = 0
    ) -> Tensors:
        """Returns the state of each seed generator, in the order of `list_seed_states`.

        Generators, steps, replicas, microbatches and objectives all get different states. The seeds
        of generators that draw a number per example are the same for all replicas and microbatches;
        their states contain the position of the first example instead.

        Args:
            replica: the index of the replica.
            microbatch: the index of the microbatch.
            first_example: position of the microbatch's first example in the global batch.
            part: the index of the objective.
        """
        replica = tf.cast(replica, tf.int32)
        apart = (tf.cast(self.step, tf.int32), replica, microbatch)
        seeds = []
        for index, state in enumerate(self.seed_states):
            seed: Any = tf.constant([self.options.seed, index], tf.int32)
            seed = tf.random.fold_in(seed, part) if part else seed
            by_example = index >= len(self.drawn_apart)
            for data in apart[:1] if by_example else apart:
                seed = tf.random.fold_in(seed, data)
            # A replica's examples are consecutive, so only the first position matters.
            seed = tf.concat([seed, [first_example, 2**31 - 1, 0]], 0) if by_example else seed
            seeds.append(tf.cast(seed, state.dtype))
        return seeds

    def list_groups(self) -> dict[str, list[Any]]:
        """Returns all variables that a checkpoint saves, of Keras or TensorFlow, by group."""
        return {**self.group_variables(), "step": [self.step], "ema": self.averages}

    def list_leaves(self) -> dict[str, list[Leaf]]:
        """Returns the variables of `list_groups` as leaves of a checkpoint."""
        return build_leaves(self.list_groups())
