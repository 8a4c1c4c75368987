"""The private interfaces of Keras and TensorFlow still behave as tftpu expects."""

import os
import threading
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import tftpu
from tests.support.models.strategies import mlp
from tftpu import layer_internals
from tftpu.engines import keras_internals
from tftpu.engines.tensorflow import internals, xla_ops
from tftpu.errors import UserError


def built() -> keras.Model:
    model = mlp()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, name="ce")
    model.compile("adamw", loss, metrics=["accuracy"], weighted_metrics=["accuracy"])
    batch = (keras.KerasTensor((8, 6)), keras.KerasTensor((8,), "int64"), keras.KerasTensor((8,)))
    keras_internals.build(model, batch)
    return model


def test_the_losses_of_a_model():
    model = built()
    (term,) = keras_internals.list_loss_terms(model)
    assert (term.loss.name, term.weight) == ("ce", 1.0)
    y, y_pred, w = tf.zeros(8), tf.zeros((8, 4)), tf.ones(8)
    ((seen_y, seen_pred, seen_w),) = keras_internals.match_losses(model, y, y_pred, w)
    assert seen_y is y and seen_pred is y_pred and seen_w is w
    assert keras_internals.list_loss_terms(model) == [term]
    model.compile("sgd", "mae")
    assert keras_internals.list_loss_terms(model) == []  # nothing is built yet


@pytest.mark.filterwarnings("error:The structure of `inputs`")
def test_a_model_takes_the_features_that_its_inputs_name():
    rows = np.arange(8.0, dtype="float32").reshape(2, 4)
    features = {"segments": rows, "tokens": 2 * rows}
    tokens = keras.Input((4,), name="tokens")
    product = 3 * tokens
    sequential = keras.Sequential([tokens, keras.layers.Rescaling(3)])
    for inputs in (tokens, [tokens], {"tokens": tokens}):
        model = keras.Model(inputs, product)
        assert np.array_equal(keras_internals.call_model(model, features, False), 6 * rows)
    assert np.array_equal(keras_internals.call_model(sequential, features, False), 6 * rows)
    both = keras.Model([tokens, keras.Input((4,), name="other")], product)
    with pytest.raises(UserError, match=r"give 'segments', 'tokens', but .* the input 'other': "):
        keras_internals.call_model(both, features, False)


def test_a_call_of_ones_own_gets_all_features():
    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            x = keras.Input((1,), name="a")
            self._functional = keras.Model(x, 2 * x)

        def call(self, x):
            return self._functional(x["a"]) + x["b"]

    class OwnSequential(keras.Sequential):
        def call(self, x, training=None, mask=None):
            return super().call(x["a"]) + x["b"]

    sequential = OwnSequential([keras.Input((1,), name="a"), keras.layers.Rescaling(2)])
    given = {"a": np.ones((1, 1), "float32"), "b": np.ones((1, 1), "float32")}
    for model in (Own(), sequential):
        assert float(keras_internals.call_model(model, given, False)[0, 0]) == 3


def test_keras_divides_a_mean_loss_by_the_replicas_but_not_in_our_step():
    x = tf.constant([[1.0], [3.0]])

    def mean():
        return keras.losses.MeanSquaredError()(x, tf.zeros((2, 1)))

    with tftpu.connect(virtual_devices=4).scope():
        assert float(mean()) == 5.0 / 4
        with keras_internals.unscaled_losses():
            assert float(mean()) == 5.0
            with keras_internals.unscaled_losses():
                pass
            assert float(mean()) == 5.0
        assert float(mean()) == 5.0 / 4


def test_the_names_that_a_model_was_compiled_with():
    assert keras_internals.list_compiled_names(built()) == {
        "loss": [],
        "metric": ["accuracy", "accuracy"],
    }
    model = mlp()
    model.compile("sgd", {"out": "mse"}, metrics=[["mae"]])
    assert keras_internals.list_compiled_names(model) == {"loss": ["mse"], "metric": ["mae"]}


def test_the_setup_of_a_model_changes_with_compile_and_with_what_is_trainable():
    model = built()
    before = keras_internals.describe_training_setup(model)
    assert keras_internals.describe_training_setup(model) == before
    model.layers[0].trainable = False
    assert keras_internals.describe_training_setup(model) != before
    model.layers[0].trainable = True
    assert keras_internals.describe_training_setup(model) == before
    model.compile("adamw", "mse")
    assert keras_internals.describe_training_setup(model) != before


def test_the_metrics_of_a_model():
    model = built()
    bound = keras_internals.list_bound_metrics(model)
    assert [(b.metric.name, b.output, b.weighted) for b in bound] == [
        ("accuracy", 0, False),
        ("accuracy", 0, True),
    ]
    assert set(keras_internals.compute_metric_results(model)) == {"accuracy", "weighted_accuracy"}


def test_the_seed_generators_of_a_model():
    dropout = keras.layers.Dropout(0.5)
    model = keras.Sequential([keras.Input((3,)), dropout])
    own, everyones = keras_internals.list_seed_states(model)
    assert own is dropout.seed_generator.state
    before = everyones.numpy()
    keras.random.uniform((1,))
    assert (everyones.numpy() != before).any()


def test_the_inputs_of_a_shared_layer():
    one, other, layer = keras.Input((2,)), keras.Input((2,)), keras.layers.Dense(1)
    assert keras_internals.list_symbolic_inputs(layer) == []
    layer(one)
    layer(other)
    found = keras_internals.list_symbolic_inputs(layer)
    assert found[0] is one and found[1] is other and len(found) == 2


def test_masks_are_found():
    embedding = keras.layers.Embedding(5, 2, mask_zero=True)
    mask = layer_internals.read_mask(embedding(np.array([[0, 1]])))
    np.testing.assert_array_equal(mask, [[False, True]])


def test_a_mask_that_is_set_is_found():
    tensor = keras.ops.ones((2, 3))
    layer_internals.attach_mask(tensor, keras.ops.ones((2, 3), "bool"))
    assert layer_internals.read_mask(tensor).shape == (2, 3)


def test_assignments_of_variables_are_seen():
    seen, variable = [], keras.Variable(1.0)

    def check(assigned, scoped):
        seen.append((assigned is variable, scoped))

    with keras_internals.assigning_variables(check):
        variable.assign(2.0)
        with keras.StatelessScope():
            variable.assign(3.0)
    variable.assign(4.0)
    assert seen == [(True, False), (True, True)] and float(variable.value) == 4.0


def test_the_overrides_of_an_optimizer():
    plain = ("SGD", "Adam", "AdamW", "Lamb", "Lion", "Adafactor", "Muon", "RMSprop")
    for name in plain:
        assert not keras_internals.has_own_apply(getattr(keras.optimizers, name)())
    assert keras_internals.has_own_apply(keras.optimizers.Nadam())


def test_weight_decay_and_clipping_of_an_optimizer():
    optimizer = keras.optimizers.AdamW(weight_decay=0.1, clipvalue=0.5)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    kernel, bias = (keras.Variable(np.ones(2, np.float32), name=n) for n in ("kernel", "bias"))
    optimizer.build([kernel, bias])
    optimizer.learning_rate = 0.5
    keras_internals.apply_weight_decay(optimizer, [kernel, bias])
    np.testing.assert_allclose(kernel.numpy(), 0.95)
    np.testing.assert_array_equal(bias.numpy(), 1.0)
    np.testing.assert_array_equal(keras_internals.clip(optimizer, [tf.constant([2.0])]), [[0.5]])


def test_kernels_show_which_ops_xla_compiles():
    assert internals.has_xla_kernel("MatMul")
    assert not internals.has_xla_kernel("StringFormat")
    assert "CPU" in internals.list_kernel_devices("MatMul")


def test_functions_within_a_graph_are_found():
    @tf.function
    def outer(x):
        return tf.while_loop(lambda i: i < 3, lambda i: tf.bitcast(i, tf.int32) + 1, [x])

    graph = outer.get_concrete_function(tf.constant(0)).graph
    inner = [
        op.type
        for op in graph.get_operations()
        for body in internals.list_called_functions(internals.list_functions(graph), op)
        for op in body.get_operations()
    ]
    assert "Bitcast" in inner and "Less" in inner


def test_functions_of_tensorflow_1_are_found_beside_those_of_2():
    @tf.function
    def outer(logits):
        inner = tf.function(lambda x: tf.bitcast(x, tf.float32) * 2.0)  # an AtomicFunction
        labels, lengths = tf.ones((2, 3), tf.int32), tf.constant([3, 3])
        return tf.nn.ctc_loss(labels, inner(logits), lengths, tf.constant([8, 8]), False)

    graph = outer.get_concrete_function(tf.zeros((2, 8, 5))).graph
    inner = {op.type for op in xla_ops.list_graph_ops(graph)}
    assert "Bitcast" in inner


def test_the_layer_of_an_op():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, name="mine")])
    graph = tf.function(model).get_concrete_function(tf.zeros((1, 3))).graph
    layers = {internals.find_layer(op) for op in graph.get_operations() if op.type == "MatMul"}
    assert layers == {"mine"}


def test_the_history_of_a_callback_list():
    callbacks = keras_internals.build_callback_list([], mlp(), 1, 1)
    assert isinstance(keras_internals.find_history(callbacks), keras.callbacks.History)


def test_preflight_builds_on_a_strategy_of_one_device():
    strategy = tf.distribute.OneDeviceStrategy("/cpu:0")
    assert type(strategy.extended) is internals.OneDeviceExtended
    for name in ("_num_replicas_in_sync", "_use_merge_call", "_replica_ctx_all_reduce"):
        assert hasattr(internals.OneDeviceExtended, name)


def test_the_data_set_of_each_device_can_be_adapted():
    strategy = tftpu.connect(virtual_devices=2).strategy
    distributed = strategy.experimental_distribute_dataset(tf.data.Dataset.range(8).batch(4))
    adapted = []
    iterator = internals.create_iterator(distributed, lambda d: adapted.append(d) or d.map(abs))
    parts = strategy.experimental_local_results(next(iterator))
    assert [part.numpy().tolist() for part in parts] == [[0, 1], [2, 3]]
    assert len(adapted) == 2
    iter(distributed)
    assert len(adapted) == 2


def test_a_sum_over_replicas_lowers_to_that_of_xla():
    group = np.arange(4, dtype=np.int32)[None]
    function = tf.function(lambda x: internals.sum_over_replicas(x, group), jit_compile=True)
    concrete = function.get_concrete_function(tf.TensorSpec((3,)))
    text = internals.lower_to_hlo(concrete, "hlo")
    assert "f32[3]{0} all-reduce(" in text and "replica_groups={{0,1,2,3}}" in text
    assert isinstance(internals.lower_to_hlo(concrete, "hlo_serialized"), bytes)


@pytest.mark.parametrize("quiet", [True, False])
def test_many_graph_functions_are_traced_without_a_warning(quiet, caplog):
    make = internals.build_graph_function if quiet else tf.function
    for number in range(8):
        assert make(lambda x: x + (1 if quiet else 2))(tf.constant(number)) > number
    assert ("triggered tf.function retracing" in caplog.text) is not quiet


def test_an_empty_variable_is_zero_and_takes_memory_only_once_it_is_written():
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    before, shape = resident(), tf.TensorShape((4096, 8192))
    found = internals.create_empty_variable(
        shape, tf.float32, {"name": "kernel", "trainable": False}
    )
    assert resident() - before < 16 * 2**20  # of 128 MiB
    assert (found.shape, found.dtype, found.trainable) == (shape, tf.float32, False)
    assert not tf.reduce_any(found[:2] != 0)
    found.assign(tf.ones(shape))
    assert tf.reduce_all(found == 1)
    half = internals.create_empty_variable(tf.TensorShape((3, 4)), tf.bfloat16, {})
    assert half.dtype == tf.bfloat16 and not tf.reduce_any(half != 0)


def test_products_are_recorded_in_their_thread_and_nothing_stays_replaced():
    """Threads that trace replicas in turns enter and leave in any order."""
    own = keras.src.backend.numpy.matmul
    entered, left = threading.Event(), threading.Event()
    x, matrix = np.ones((1, 2, 3), "float32"), np.ones((3, 4), "float32")
    found = []

    def trace() -> None:
        with keras_internals.recording_products() as products:
            entered.set()
            left.wait(10)
            found.append(products.find_factors(keras.ops.matmul(x, matrix)))

    with keras_internals.recording_products() as products:
        thread = threading.Thread(target=trace)
        thread.start()
        entered.wait(10)
        ours = keras.ops.matmul(x, matrix)
    left.set()
    thread.join()
    assert products.find_factors(ours) is not None and found[0] is not None
    assert products.find_factors(keras.ops.matmul(x, matrix)) is None
    assert keras.src.backend.numpy.matmul is own


def test_the_config_of_a_functional_model_holds_its_graph_unless_a_class_builds_it():
    class Passes(keras.Model):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)

    class Builds(keras.Model):
        def __init__(self, width):
            inputs = keras.Input((2,))
            super().__init__(inputs, keras.layers.Dense(width)(inputs))

    inputs = keras.Input((2,))
    assert keras_internals.keeps_graph(Passes(inputs, 2 * inputs))
    assert not keras_internals.keeps_graph(Builds(3))
