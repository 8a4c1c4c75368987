"""Models of KerasHub in an experiment's config. Of these modules, only `config` needs no Keras."""
