"""Models of KerasHub as models of a config. Only `config` is imported without Keras."""
