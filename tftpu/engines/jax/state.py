"""The variables of a run on a mesh: model, optimizer, averages, loss scale and step counter.

Between device loops the Keras variables hold the values, where callbacks and the model can read
them. A step takes the values as `StateValues` and returns new ones.
"""

import contextlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import keras
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from tftpu.config import TrainConfig
from tftpu.engines.base import BaseState
from tftpu.engines.jax import internals
from tftpu.engines.jax.placement import leaves, placing
from tftpu.engines.jax.placement.gathering import Gathering
from tftpu.engines.jax.placement.sharding import Layout
from tftpu.engines.leaf import Leaf
from tftpu.engines.objectives.objective import Objective
from tftpu.tensors import Nest

Arrays = list[Any]  # a list of jax.Array


class StateValues(NamedTuple):
    """The values of all variables that a step changes.

    Attributes:
        trainable: the values of the model's trainable weights.
        untrained: the values of the model's other variables, except the states of seed generators.
        optimizers: for each objective, the values of its optimizer's variables; [] if an earlier
            objective has the same optimizer.
        scales: for each objective, its dynamic loss scale, [factor, steps since it changed]; [] if
            it has none, or if an earlier objective has the same optimizer.
        averages: moving averages of the trainable weights; empty without `ema_momentum`.
    """

    trainable: Arrays
    untrained: Arrays
    optimizers: list[Arrays]
    scales: list[Arrays]
    averages: Arrays


class JaxState(BaseState):
    """The variables of a model for a mesh; `place` puts them on its devices.

    Args:
        mesh: the mesh; with an abstract mesh, a step can be lowered but not run.
        model: the model, compiled unless there are objectives; this builds it if needed.
        batch_spec: spec of a batch, `(x, y)` or `(x, y, sample_weight)` of `tf.TensorSpec`s.
        options: the options of the step; `ema_momentum` decides whether weight averages are kept.
        objectives: the objectives that replace the compiled loss and optimizer.
        labelled: whether batches have labels; without labels there are no objectives.

    Attributes:
        model: the Keras model.
        options: options of the step.
        groups: the objectives, in the order of their updates; a compiled loss counts as one.
        layout: the shardings of the variables.
        gathering: the context in which a forward pass gathers the weights that it reads.
        step: number of training steps done.
        averages: moving averages of the trainable weights; empty without `ema_momentum`.
        untrained: the variables of the model that are neither trained nor seed generators' states.

    Raises:
        UserError: the model cannot be trained as it is.
    """

    def __init__(
        self,
        mesh: Mesh | AbstractMesh,
        model: keras.Model,
        batch_spec: Nest,
        options: TrainConfig,
        objectives: Sequence[Objective] = (),
        labelled: bool = True,
    ):
        super().__init__(model, batch_spec, options, objectives, labelled)
        self.untrained = self.list_untrained()
        self.layout = Layout(mesh, model)
        self.gathering = Gathering(self.layout, [*model.trainable_variables, *self.untrained])
        self.step = 0
        self.averages: Arrays = []
        if options.ema_momentum is not None:
            self.averages = [jax.numpy.copy(v.value) for v in model.trainable_variables]

    def _outside_of_traces(self) -> contextlib.AbstractContextManager[Any]:
        return jax.ensure_compile_time_eval()

    @property
    def shardings(self) -> StateValues:
        """The sharding of each value, in the structure of `read_values`."""
        whole, of_weight = self.layout.whole, self.layout.find_weight_sharding
        weights = [of_weight(v) for v in self.model.trainable_variables]
        return StateValues(
            weights,
            [of_weight(v) for v in self.untrained],
            [[self.layout.find_slot_sharding(v) for v in own] for own in self._list_slots()],
            [[whole for _ in own] for own in self._list_scales()],
            weights if self.averages else [],
        )

    def read_trained_values(self) -> Arrays:
        """Returns the values of the trainable weights."""
        return [v.value for v in self.model.trainable_variables]

    def select_evaluated_weights(self) -> Arrays:
        """Returns the weights that evaluation uses: the averages if there are any."""
        return self.averages or self.read_trained_values()

    def read_values(self) -> StateValues:
        """Returns the values of all variables."""
        return StateValues(
            self.read_trained_values(),
            [v.value for v in self.untrained],
            [[v.value for v in own] for own in self._list_slots()],
            [[v.value for v in own] for own in self._list_scales()],
            self.averages,
        )

    def assign(self, values: StateValues) -> None:
        """Sets the variables to the values that a step returned."""
        for variable, array in zip(self._list_variables(), self._list_in_order(values)):
            variable.assign(array)
        self.averages = values.averages

    def place(self) -> None:
        """Puts every variable on the devices, with its sharding."""
        shardings = self.shardings
        for variable, sharding in zip(self._list_variables(), self._list_in_order(shardings)):
            value = placing.place_value(variable.value, sharding)
            internals.set_layout(variable, sharding)
            variable.assign(value)
        self.averages = [
            placing.place_value(average, place)
            for average, place in zip(self.averages, shardings.averages)
        ]

    def compute_seeds(self, step: Any, microbatch: Any, first: Any, part: int = 0) -> Arrays:
        """Returns the state of each seed generator, in the order of `list_seed_states`.

        Generators, steps, microbatches and objectives all get different states. The seeds of
        generators that draw a number per example are the same for all microbatches; their states
        contain the positions of the examples instead.

        Args:
            step: the number of steps done, () int32.
            microbatch: the index of the microbatch.
            first: the positions of the microbatch's examples in the global batch, as
                `MicrobatchLayout.find_positions` returns them.
            part: the index of the objective.
        """
        found = []
        for index, state in enumerate(self.seed_states):
            key = jax.random.key(self.options.seed)
            by_example = index >= len(self.drawn_apart)
            for data in (index, part, step, *(() if by_example else (microbatch,))):
                key = jax.random.fold_in(key, data)
            bits = jax.random.key_data(key)
            if by_example:
                words = [bits[0], bits[1], *first]
                bits = jax.numpy.stack([jax.numpy.asarray(w, "uint32") for w in words])
            found.append(bits.astype(state.dtype))
        return found

    def list_leaves(self) -> dict[str, list[Leaf]]:
        """Returns the leaves of everything that a checkpoint saves, by group."""
        groups = {
            group: [leaves.from_variable(v) for v in variables]
            for group, variables in self.group_variables().items()
        }
        chief = jax.process_index() == 0
        done = Leaf.undivided("step", (), "int64", self._read_steps_done, self._begin, writes=chief)
        averages = [self._build_average_leaf(i) for i in range(len(self.averages))]
        return {**groups, "step": [done], "ema": averages}

    def _read_steps_done(self) -> np.ndarray:
        return np.array(self.step, np.int64)

    def _begin(self, step: np.ndarray) -> None:
        self.step = int(step)

    def _build_average_leaf(self, index: int) -> Leaf:
        def assign(value: Any) -> None:
            self.averages[index] = value

        path = self.model.trainable_variables[index].path
        return leaves.from_array(f"ema/{path}", lambda: self.averages[index], assign)

    def _list_variables(self) -> list[keras.Variable]:
        """Returns all variables that a step changes, as one list."""
        variables = [*self.model.trainable_variables, *self.untrained]
        for slots, scale in zip(self._list_slots(), self._list_scales()):
            variables += [*slots, *scale]
        return variables

    def _list_slots(self) -> list[list[keras.Variable]]:
        """Returns each objective's optimizer variables; [] if an earlier objective shares them."""
        numbered = enumerate(self.groups)
        return [list(g.optimizer.variables) if g.owner == i else [] for i, g in numbered]

    def _list_scales(self) -> list[list[keras.Variable]]:
        """Returns the loss scale and step counter of each optimizer, as `StateValues.scales`."""
        found = []
        for number, group in enumerate(self.groups):
            scaler = group.scaler if group.owner == number else None
            found.append([scaler.dynamic_scale, scaler.step_counter] if scaler else [])
        return found

    def _list_in_order(self, values: StateValues) -> Arrays:
        """Returns the given values as one list, in the order of `_list_variables`."""
        arrays = [*values.trainable, *values.untrained]
        for optimizer, scale in zip(values.optimizers, values.scales):
            arrays += [*optimizer, *scale]
        return arrays
