"""Reading of examples: their order, TFRecord shards, image files, and caches of bucket files."""
