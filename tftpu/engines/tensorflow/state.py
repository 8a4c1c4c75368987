"""The variables of a run: model, optimizer, averages, loss scale and step counter."""

import functools
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tftpu.config import TrainOptions
from tftpu.engines import checks, keras_internals
from tftpu.engines.leaf import Leaf
from tftpu.engines.objectives.losses import Losses
from tftpu.engines.objectives.objective import Objective
from tftpu.engines.objectives.parts import compiled_part, parts_of
from tftpu.engines.tensorflow.leaves import leaves_of
from tftpu.tensors import Nest

Tensors = list[Any]  # a list of tensors


class ModelState:
    """The variables of a model, for the strategy in whose scope it is made.

    Args:
        model: compiled, unless there are objectives; it is built here if it is not yet.
        batch_spec: spec of one replica's share, `(x, y)` or `(x, y, sample_weight)` of
            `tf.TensorSpec`s of static shape, nested as the model takes them.
        options: `ema_momentum` says whether averages of the weights are kept.
        objectives: instead of what the model was compiled with.
        labelled: False: the batch holds features alone; the model is built, and has no parts.

    Attributes:
        model: the Keras model.
        options: options of the step.
        replicas: number of replicas that share a global batch.
        parts: the objectives in the order of a step; what a model was compiled with is one.
        step: number of training steps done, () int64.
        averages: moving averages of the trainable weights; empty if none are kept.
        drawn_apart: states of seed generators whose draws differ by replica and microbatch.
        drawn_by_example: states of seed generators that draw by an example's position.

    Raises:
        UserError: the model cannot be trained as it is.
    """

    def __init__(
        self,
        model: keras.Model,
        batch_spec: Nest,
        options: TrainOptions,
        objectives: Sequence[Objective] = (),
        labelled: bool = True,
    ):
        checks.refuse_model(model, objectives)
        keras.tree.map_structure(checks.refuse_spec, batch_spec)
        symbolic = keras.tree.map_structure(
            lambda s: keras.KerasTensor(tuple(s.shape), s.dtype.name), batch_spec
        )
        self.model = model
        self.options = options
        self.replicas: int = tf.distribute.get_strategy().num_replicas_in_sync
        if objectives:
            self.parts = parts_of(model, objectives, symbolic)
        elif not labelled:
            x, _, _ = keras.utils.unpack_x_y_sample_weight(symbolic)
            keras_internals.build_by(lambda given: model(given, training=False), x)
            self.parts = []
        else:
            keras_internals.build(model, symbolic)
            self.parts = [compiled_part(model)]
        self.drawn_apart = keras_internals.seed_states(model)
        self.drawn_by_example = keras_internals.example_seeds(model)
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

    @property
    def seed_states(self) -> list[keras.Variable]:
        """The states of all seed generators."""
        return [*self.drawn_apart, *self.drawn_by_example]

    @property
    def untrained(self) -> list[keras.Variable]:
        """The variables of the model that are neither trained nor states of seed generators."""
        seeds = {id(v) for v in self.seed_states}
        return [v for v in self.model.non_trainable_variables if id(v) not in seeds]

    def trained_values(self) -> Tensors:
        """Returns the values of the trainable weights as tensors."""
        return [tf.convert_to_tensor(v.value) for v in self.model.trainable_variables]

    def evaluated_weights(self) -> Tensors:
        """Returns the weights that evaluation uses: the averages where they are kept."""
        return [tf.convert_to_tensor(v) for v in self.averages] or self.trained_values()

    @property
    def losses(self) -> list[Losses]:
        """The losses of each objective."""
        return [part.losses for part in self.parts]

    def seeds(self, replica: Any, microbatch: Any, first_example: Any, part: int = 0) -> Tensors:
        """Returns the state of each seed generator, in the order of `seed_states`.

        They differ by generator, step, replica, microbatch and objective only. Generators
        that draw by example do not differ by replica and microbatch; their state holds the position
        of the first example instead.

        Args:
            replica: id of the replica.
            microbatch: number of the microbatch.
            first_example: position of the microbatch's first example in the global batch.
            part: number of the objective.
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
            # One replica's examples are consecutive.
            seed = tf.concat([seed, [first_example, 2**31 - 1, 0]], 0) if by_example else seed
            seeds.append(tf.cast(seed, state.dtype))
        return seeds

    def groups(self) -> dict[str, list[Any]]:
        """Returns everything that a checkpoint holds, by group: Keras or TensorFlow variables."""
        seeds = {id(v) for v in self.seed_states}
        groups: dict[str, list[Any]] = {
            "model": [v for v in self.model.variables if id(v) not in seeds],
            "step": [self.step],
            "ema": self.averages,
        }
        for part in self.parts:
            suffix = f"_{part.name}" if part.name else ""
            own = {id(v) for v in part.optimizer.variables}
            groups[f"optimizer{suffix}"] = list(part.optimizer.variables)
            if part.scaler is not None:  # apart: a run may resume in another precision
                found = [v for v in part.scaler.variables if id(v) not in own]
                groups[f"loss_scale{suffix}"] = found
        return groups

    def leaves(self) -> dict[str, list[Leaf]]:
        """Returns `groups` as leaves, which checkpoints read and assign."""
        return leaves_of(self.groups())
