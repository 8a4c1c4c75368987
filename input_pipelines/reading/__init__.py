"""Order, shards and caches: the examples of a step, and the files they are read from."""
