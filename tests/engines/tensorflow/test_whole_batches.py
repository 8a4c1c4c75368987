"""Evaluation without padding."""

import tensorflow as tf

from tftpu.engines.tensorflow.whole_batches import WholeBatches


class CountedBatches:
    """A step that counts the batches it is given."""

    def __init__(self):
        self.count = tf.Variable(tf.constant(0))

    def evaluate(self, *_):
        self.count.assign_add(1)


def test_many_trainers_cause_no_warning_of_frequent_tracing(caplog):
    data = tf.data.Dataset.range(12).batch(4)
    for _ in range(8):
        step = CountedBatches()
        whole = WholeBatches(tf.distribute.get_strategy(), None, step)  # pyright: ignore[reportArgumentType]
        assert len(list(whole.run(data))) == step.count.numpy() == 3
    assert "retracing" not in caplog.text
