"""Order, shards and caches: which examples a step reads, and from where."""
