"""File formats: TFRecord, `tf.train.Example` and the manifest of a data set."""
