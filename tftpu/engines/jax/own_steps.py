"""Runs a model's own `train_step`, `test_step` and `predict_step` on a mesh, each as one program.

A step is written for the whole global batch, and XLA divides it among the devices: losses, metrics
and batch statistics are the same as on one device.
"""

import contextlib
import functools
import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import keras
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh

from tftpu.engines import keras_internals
from tftpu.engines.engine import LoopResult
from tftpu.engines.jax import feed, internals
from tftpu.engines.jax.functions import compile_function
from tftpu.engines.jax.placement import leaves, placing
from tftpu.engines.jax.placement.gathering import Gathering
from tftpu.engines.jax.placement.mesh import BatchShard
from tftpu.engines.jax.placement.sharding import Layout
from tftpu.engines.jax.step.update import compute_global_norm
from tftpu.engines.jax.tracing import tracing_for
from tftpu.engines.leaf import Leaf
from tftpu.engines.own_steps import OwnStepsExecutor, list_own_variables, to_logs
from tftpu.errors import UserError
from tftpu.tensors import Nest

Arrays = list[Any]  # a list of jax.Array


class StateValues(NamedTuple):
    """The values of all variables, in the order of the `state` of Keras's `train_step` on JAX.

    Attributes:
        trainable, untrained: the values of the model's variables; `untrained` has the seed states.
        optimizer, metrics: the values of the variables of the model's optimizer and metrics.
    """

    trainable: Arrays
    untrained: Arrays
    optimizer: Arrays
    metrics: Arrays


class JaxOwnSteps(OwnStepsExecutor):
    """See `tftpu.engines.engine.Executor`.

    Args:
        mesh: the devices.
        part: the part of each global batch that this process feeds.
        platform: the platform of the devices: "tpu", "gpu" or "cpu".
        model: the model.
        batch_spec: a batch as `keras.KerasTensor`s, which builds the model if needed.
        labelled: whether batches have labels; without them the model only predicts.
        compiler_options: XLA's options for the train step, by name.
    """

    def __init__(
        self,
        mesh: Mesh,
        part: BatchShard,
        platform: str,
        model: keras.Model,
        batch_spec: Nest,
        labelled: bool,
        compiler_options: dict[str, str],
    ):
        super().__init__(model)
        self._part = part
        self._platform = platform
        self.step = 0
        with tracing_for(platform, mesh):
            _build(model, batch_spec, labelled)
        self.layout = Layout(mesh, model)
        self._groups = [
            model.trainable_variables,
            model.non_trainable_variables,
            list(model.optimizer.variables) if labelled and model.optimizer is not None else [],
            list(model.metrics_variables) if labelled else [],
        ]
        self._gathering = Gathering(self.layout, [*self._groups[0], *self._groups[1]])
        weight, whole = self.layout.find_weight_sharding, self.layout.whole
        self._shardings = StateValues(
            [weight(v) for v in self._groups[0]],
            [weight(v) for v in self._groups[1]],
            [self.layout.find_slot_sharding(v) for v in self._groups[2]],
            [whole for _ in self._groups[3]],
        )
        self._outside = OutsideVariables(self._groups)
        self._place_variables()
        self._train = self._compile(
            model.train_step,
            tuple(self._shardings),
            donate_argnums=0,
            compiler_options=compiler_options,
        )
        self._test = self._compile(model.test_step, self._select_tested(self._shardings))
        self._predict = self._compile(model.predict_step, self._shardings.untrained)
        self._norm = jax.jit(compute_global_norm, out_shardings=whole)

    @property
    def weight_norm(self) -> float:
        """The global norm of the trainable weights."""
        return float(self._norm(self._read().trainable))

    def begin_at(self, step: int) -> None:
        """Sets the number of training steps done, as if all steps before `step` were trained."""
        self.step = step

    def train(self, batches: Iterator[Nest], steps: int) -> LoopResult:
        """Runs training steps, while the host prepares the next batches.

        Args:
            batches: an iterator over whole batches.
            steps: the number of steps.
        """
        waited, logs, values = 0.0, {}, self._read()
        done, asked = 0, time.monotonic()
        try:
            for found in itertools.islice(batches, steps):
                waited += time.monotonic() - asked
                logs, given = self._train(tuple(values), self._place(found))
                values = StateValues(*map(list, given))
                self.step += 1
                done, asked = done + 1, time.monotonic()
        finally:
            self._assign(values)
        return LoopResult(to_logs(logs), waited, done)

    def _test_group(self, group: list[Nest]) -> Any:
        values, logs = self._read(), {}
        for batch in group:
            logs, tested = self._test(self._select_tested(values), self._place(batch))
            trainable, untrained, metrics = map(list, tested)
            values = StateValues(trainable, untrained, values.optimizer, metrics)
        self._assign(values)
        return logs

    def predictions(self, dataset: Any, ahead: bool = True) -> Iterator[Nest]:
        """Yields the outputs of each batch, in order, as NumPy arrays."""
        for _, group in self.iterate_groups(dataset):
            yield from map(self._predict_batch, group)

    def predict_batch(self, x: Nest) -> Nest:
        """Returns the outputs for one batch of features of any size, as NumPy arrays."""
        return self._predict_batch((keras.tree.map_structure(np.asarray, x),))

    def compiled(
        self, function: Callable[..., Any], replaces_state: bool = False
    ) -> Callable[..., Any]:
        """Compiles a function to one program."""
        tracing = functools.partial(tracing_for, self._platform, self.layout.mesh)
        return compile_function(self.model, function, tracing, replaces_state=replaces_state)

    def state(self) -> dict[str, list[Leaf]]:
        """Returns the leaves of everything that a checkpoint saves, by group."""
        groups = {
            group: [leaves.from_variable(v) for v in variables]
            for group, variables in list_own_variables(self.model).items()
        }
        chief = jax.process_index() == 0
        done = Leaf.undivided(
            "step", (), "int64", lambda: np.array(self.step, np.int64),
            lambda value: self.begin_at(int(value)), writes=chief,
        )  # fmt: skip
        return {**groups, "step": [done], "ema": []}

    def _predict_batch(self, batch: Nest) -> Nest:
        values = self._read()
        outputs, untrained = self._predict((values.trainable, values.untrained), self._place(batch))
        self._assign(values._replace(untrained=list(untrained)))
        return jax.tree.map(np.asarray, outputs)

    def _compile(self, step: Callable[..., Any], shardings: Any, **options: Any) -> Any:
        """Compiles a step to one program, unless the model has run_eagerly or no jit_compile."""

        def run(state, batch):
            with tracing_for(self._platform, self.layout.mesh), self._gathering.reading():
                return step(state, batch)

        def trace(state, batch):
            with self._outside.watching():
                logs, new = run(state, batch)
            return logs, _to_structure(new, shardings)

        if self.model.run_eagerly:
            return jax.disable_jit()(run)
        if not self.model.jit_compile:
            return run
        compiled = jax.jit(trace, out_shardings=(self.layout.whole, shardings), **options)

        def run_checked(state, batch):
            self._outside.check()
            found = compiled(state, batch)
            self._outside.keep()
            return found

        return run_checked

    def _read(self) -> StateValues:
        return StateValues(*([v.value for v in group] for group in self._groups))

    def _assign(self, values: StateValues) -> None:
        for group, new in zip(self._groups, values):
            for variable, value in zip(group, new):
                variable.assign(value)

    def _select_tested(self, values: StateValues) -> tuple[Arrays, Arrays, Arrays]:
        """Returns the lists of values that form the state of Keras's `test_step`."""
        return values.trainable, values.untrained, values.metrics

    def _place_variables(self) -> None:
        for group, shardings in zip(self._groups, self._shardings):
            for variable, sharding in zip(group, shardings):
                value = placing.place_value(variable.value, sharding)
                internals.set_layout(variable, sharding)
                variable.assign(value)

    def _place(self, batch: Nest) -> Nest:
        batch = keras_internals.to_jax(batch)
        if any(map(keras_internals.is_sparse_or_ragged, keras.tree.flatten(batch))):
            return batch  # not divided among devices
        return feed.place_batch(batch, self.layout, self._part)

    def _iterate(self, batches: Any) -> Iterator[Nest]:
        return feed.iterate_arrays(batches)


class OutsideVariables:
    """The variables that compiled steps read although they are not part of the steps' state.

    In a compiled step, they keep the values that they had when the step was traced.

    Args:
        state: the variables in the state of a step, in groups.
    """

    def __init__(self, state: list[list[keras.Variable]]):
        self._known = {id(v) for group in state for v in group}
        self._read: dict[int, keras.Variable] = {}
        self._values: dict[int, Any] = {}

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Records the variables outside of the model that a step reads inside the `with` block.

        Raises `UserError` if the step reads model variables, or assigns any, outside of its state.
        """
        with (
            keras_internals.reading_variables(self._record),
            keras_internals.assigning_variables(self._check_assigned),
        ):
            yield

    def keep(self) -> None:
        """Stores the values of the recorded variables, for `check` to compare with."""
        for key, variable in self._read.items():
            self._values.setdefault(key, variable.value)

    def check(self) -> None:
        """Raises `UserError` if a recorded variable has changed since a step was traced."""
        for key, value in self._values.items():
            if self._read[key].value is not value:
                raise UserError(
                    f"The model's own step reads the variable {self._read[key].path!r}, which has "
                    "changed but is not part of the model. On JAX, a compiled step keeps the first "
                    "value of such a variable: make it an attribute of the model, and take its "
                    "value from the state."
                )

    def _record(self, variable: keras.Variable, value: Any) -> Any:
        if isinstance(value, Tracer):
            return value
        if id(variable) in self._known:
            raise UserError(
                f"The model's own step reads the variable {variable.path!r} from the model. Its "
                "present value is in the state that the step receives: take it from there, or "
                "read it within model.stateless_call(...) or a keras.StatelessScope."
            )
        self._read[id(variable)] = variable
        return value

    def _check_assigned(self, variable: keras.Variable, scoped: bool) -> None:
        if not scoped or id(variable) not in self._known:
            raise UserError(
                f"The model's own step assigns the variable {variable.path!r} outside of the state "
                "that it receives and returns, so the change would be lost. Return the new value "
                "as part of the state; the variable must be an attribute of the model."
            )


def _build(model: keras.Model, batch_spec: Nest, labelled: bool) -> None:
    """Creates the variables of a model, and those of its optimizer and metrics if `labelled`."""
    if labelled:
        keras_internals.build(model, batch_spec)
        return
    x, _, _ = keras.utils.unpack_x_y_sample_weight(batch_spec)
    keras_internals.build_by(lambda given: model(given, training=False), x)


def _to_structure(state: Any, expected: Any) -> Any:
    """Returns the state that a step returned, with its sequences of variables as lists.

    Raises:
        UserError: the numbers of sequences or of variables differ from the step's input.
    """
    found = [len(part) for part in state] if isinstance(expected, tuple) else len(state)
    wanted = [len(part) for part in expected] if isinstance(expected, tuple) else len(expected)
    if found != wanted:
        raise UserError(
            f"The model's own step returns a state of {found} variables, but it received one of "
            f"{wanted}: return (logs, state), with the lists of the state in the same order."
        )
    return tuple(map(list, state)) if isinstance(expected, tuple) else list(state)
