"""File formats: TFRecord files, `tf.train.Example` records and the manifest of a data set."""
